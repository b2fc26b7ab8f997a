"""The backend of compiled CPU kernels: float32, every mask, one kernel for every window."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peregrine.attention.backend import Attend, Deferred
from peregrine.attention.kernel_choice import KernelCosts
from peregrine.attention.metadata import AttentionMetadata, LayerAttention
from peregrine.attention.traits import Traits
from peregrine.cache.store import KVStore
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT


class NumbaBackend:
    """Attention compiled with numba for the CPU at hand."""

    name = "numba"
    traits = Traits(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32}),
        kv_dtypes=frozenset({torch.float32}),
        page_sizes=None,
        head_dims=frozenset(range(8, 1025, 8)),  # whole vectors of 8
        max_decode_q_len=0,  # one kernel for every shape
        tree_masks=True,
        windows=True,
        sinks=True,
        caps=False,
        mla_dims=frozenset(range(8, 1025, 8)),
        automatic=True,
    )

    def missing(self) -> list[str]:
        """numba, if it is not installed."""
        return [] if NUMBA_PRESENT else ["needs numba; run: pip install numba"]

    def with_costs(self, costs: KernelCosts) -> "NumbaBackend":
        """Itself: it has one kernel."""
        return self

    def bind(self, store: KVStore, layers: Sequence[LayerAttention], metadata: AttentionMetadata) -> Attend:
        """Plan one forward for all layers; the returned callable stores keys and values, then attends."""
        # Imports numba, which is slow and may be absent.
        from peregrine.kernels.attention.cpu import paged_attention_cpu
        from peregrine.kernels.attention.plan_cpu import CpuKV, plan_cpu, write_cpu

        plan = plan_cpu(
            metadata.positions,
            metadata.q_starts,
            metadata.past_lens,
            metadata.window.max_q_len,
            metadata.page_table,
            metadata.page_size,
            metadata.ancestors,
        )
        slots = metadata.slots.contiguous()
        keys, values = store.keys.data_ptr(), store.values.data_ptr()
        key_bytes, value_bytes = (4 * part.stride(0) for part in (store.keys, store.values))
        sizes = store.shape.num_heads, store.shape.value_dim, store.values.stride(1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Deferred | None = None) -> Tensor:
            assert rope is None, "on a CPU, queries and keys are rotated before attention"
            own = layers[layer]
            kv = CpuKV(keys + layer * key_bytes, values + layer * value_bytes, *sizes)
            write_cpu(kv, slots, k, v)
            if not len(q):
                return q[..., : kv.value_dim]
            return paged_attention_cpu(q, kv, plan, own.scale, own.window, own.sinks)

        return attend
