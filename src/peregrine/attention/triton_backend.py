"""The backend of Triton kernels for CUDA devices: every mask, a kernel for short windows and one for all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peregrine.attention.backend import Attend, Deferred, LayerAttention
from peregrine.attention.kernel_choice import UNMEASURED, Kernel, KernelCosts, kernel_for
from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.traits import GraphSupport, Traits
from peregrine.cache.store import KVStore
from peregrine.hardware import triton_interprets
from peregrine.kernels.attention import DeferredMLARope
from peregrine.kernels.runtime.gpu import HOPPER, TRITON_PRESENT, generation
from peregrine.kernels.runtime.interpreter import mend_interpreter

if TYPE_CHECKING:
    from peregrine.kernels.attention.plan_triton import GpuPlan

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
ON_CUDA = Traits(
    devices=frozenset({"cuda"}),
    dtypes=DTYPES,
    kv_dtypes=DTYPES | {torch.float8_e4m3fn},
    page_sizes=frozenset(1 << i for i in range(11)),  # powers of two: blocks of keys are whole pages, or the reverse
    head_dims=frozenset(range(8, 257, 8)),  # whole vectors of 8
    max_decode_q_len=64,
    tree_masks=True,
    windows=True,
    sinks=True,
    latent_dims=None,
    reads_host_lens=False,
    graphs=GraphSupport.ANY,
    automatic=True,
)
# The interpreter has no product of bfloat16, rounds float8 wrongly, and nobody wants its speed.
INTERPRETED = replace(
    ON_CUDA,
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32}),
    kv_dtypes=frozenset({torch.float32}),
    graphs=GraphSupport.NEVER,
    automatic=False,
)


# A tile of latents takes more shared memory than devices before Hopper have.
BEFORE_HOPPER = replace(ON_CUDA, latent_dims=frozenset())


class TritonBackend:
    """Attention in Triton. `costs` says which kernel is faster where both may serve; bits are the same."""

    name = "triton"

    def __init__(self, costs: KernelCosts = UNMEASURED) -> None:
        self.costs = costs

    @property
    def traits(self) -> Traits:
        """On CUDA devices, or on the CPU while Triton interprets."""
        if triton_interprets():
            return INTERPRETED
        return ON_CUDA if generation() >= HOPPER else BEFORE_HOPPER

    def missing(self) -> list[str]:
        """Triton, if it is not installed."""
        return [] if TRITON_PRESENT else ["needs triton, which comes with CUDA builds of torch"]

    def with_costs(self, costs: KernelCosts) -> "TritonBackend":
        """The same backend with other costs."""
        return TritonBackend(costs)

    def bind(self, store: KVStore, layers: Sequence[LayerAttention], metadata: AttentionMetadata) -> Attend:
        """Plan once for all layers; the returned callable writes keys and values, then attends."""
        if triton_interprets():
            mend_interpreter()
        # Imports triton, which is slow and may be absent.
        from peregrine.kernels.attention import plan_triton as gpu
        from peregrine.kernels.rope.triton import turn_and_store

        plan = gpu.plan_gpu(
            metadata.positions,
            metadata.q_starts,
            metadata.past_lens,
            metadata.page_table,
            metadata.page_size,
            metadata.ancestors,
        )
        kernel = kernel_for(metadata.window, self.traits, self.costs)
        if store.shape.shared:
            return _latent_attend(store, layers, metadata.slots, plan, kernel)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Deferred | None = None) -> Tensor:
            assert not isinstance(turn, DeferredMLARope), "keys and values are apart"
            own = layers[layer]
            kv = gpu.StoredKV(
                keys=store.keys[layer],
                values=store.values[layer],
                k_scale=None if store.k_scales is None else store.k_scales[layer],
                v_scale=None if store.v_scales is None else store.v_scales[layer],
            )
            if turn is not None:
                q = turn_and_store(q, k, v, turn, metadata.slots, (kv.keys, kv.values, kv.k_scale, kv.v_scale))
            else:
                gpu.write_gpu(kv, metadata.slots, k, v)
            if not len(q):
                return q
            if kernel is Kernel.DECODE:
                return gpu.decode_gpu(q, kv, plan, own.scale, own.window, own.sinks)
            return gpu.context_gpu(q, kv, plan, own.scale, own.window, own.sinks)

        return attend


def _latent_attend(
    store: KVStore, layers: Sequence[LayerAttention], slots: Tensor, plan: "GpuPlan", kernel: Kernel
) -> Attend:
    """The same for keys that hold their values, of one KV head."""
    # Imports triton, which is slow and may be absent.
    from peregrine.kernels.attention import mla_plan_triton as gpu
    from peregrine.kernels.attention.mla_kv_write_triton import turn_latent_gpu, write_latent_gpu

    rank = store.shape.value_dim

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Deferred | None = None) -> Tensor:
        own, keys = layers[layer], store.keys[layer]
        assert own.window is None, "latent attention has no sliding window"
        assert own.sinks is None, "latent attention has no sinks"
        if turn is None:
            write_latent_gpu(k, rank, slots, keys)
        else:
            assert isinstance(turn, DeferredMLARope), "keys hold their values"
            q = turn_latent_gpu(q, k, turn, slots, keys)
        if not len(q):
            return q[..., :rank]
        if kernel is Kernel.DECODE:
            return gpu.latent_decode_gpu(q, keys, plan, rank, own.scale)
        return gpu.latent_context_gpu(q, keys, plan, rank, own.scale)

    return attend
