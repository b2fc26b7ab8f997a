"""The backend that runs wherever torch does; the oracle for the others."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peregrine.attention.backend import Attend, Deferred
from peregrine.attention.kernel_choice import KernelCosts
from peregrine.attention.metadata import AttentionMetadata, LayerAttention
from peregrine.attention.traits import Traits
from peregrine.cache.store import KVStore
from peregrine.kernels.attention import (
    DeferredMLARope,
    QueryPlan,
    mla_rope,
    paged_attention_torch,
    plan_causal,
    plan_tree,
    slots_of_rows,
)
from peregrine.kernels.rope import rotate_heads


class TorchBackend:
    """Attention in plain torch: any device, page size, head dim and mask."""

    name = "torch"
    traits = Traits(
        devices=None,
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn}),
        page_sizes=None,
        head_dims=None,
        max_decode_q_len=0,  # one kernel for every shape
        tree_masks=True,
        windows=True,
        sinks=True,
        caps=True,
        mla_dims=None,
        automatic=True,
    )

    def missing(self) -> list[str]:
        """Nothing: torch is always there."""
        return []

    def with_costs(self, costs: KernelCosts) -> "TorchBackend":
        """Itself: it has one kernel."""
        return self

    def bind(self, store: KVStore, layers: Sequence[LayerAttention], metadata: AttentionMetadata) -> Attend:
        """Plan one forward for all layers; the returned callable stores keys and values, then attends."""
        plan = _plan(metadata)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Deferred | None = None) -> Tensor:
            if isinstance(rope, DeferredMLARope):
                q, k = mla_rope(q, k, rope)
            elif rope is not None:
                q, k = rotate_heads(q, k, rope)
            store.write(layer, metadata.slots, k, v)
            if not len(q):
                return q[..., : v.shape[2]]
            own = layers[layer]
            keys, values = store.keys[layer], store.values[layer]
            if store.k_scales is None or store.v_scales is None:
                return paged_attention_torch(q, keys, values, plan, own.scale, own.window, own.sinks, own.cap)
            # The keys' scale is a factor of every score, the values' scale a factor of the output before rounding.
            scale = own.scale * store.k_scales[layer]
            out = paged_attention_torch(q.float(), keys, values, plan, scale, own.window, own.sinks, own.cap)
            return (out * store.v_scales[layer]).to(q.dtype)

        return attend


def _plan(metadata: AttentionMetadata) -> QueryPlan:
    key_slots = slots_of_rows(metadata.page_table, metadata.page_size)
    if metadata.ancestors is not None:
        return plan_tree(metadata.positions, metadata.q_starts, metadata.past_lens, metadata.ancestors, key_slots)
    return plan_causal(metadata.positions, metadata.q_starts, metadata.window.max_q_len, key_slots)
