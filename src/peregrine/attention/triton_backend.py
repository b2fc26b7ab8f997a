"""The backend of Triton kernels for CUDA devices: every mask, a kernel for short windows and one for all."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from peregrine.attention.backend import Attend, Deferred
from peregrine.attention.kernel_choice import UNMEASURED, KernelCosts, choose_launch, problem_of
from peregrine.attention.metadata import AttentionMetadata, LayerAttention
from peregrine.attention.traits import Traits
from peregrine.cache.store import KVStore
from peregrine.hardware import triton_interprets
from peregrine.kernels.attention import DeferredMLARope, Launch, StoredKV, gpu_of
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import HOPPER, TRITON_PRESENT, generation

_dense = DeviceFile("peregrine.kernels.attention.triton")
_mla = DeviceFile("peregrine.kernels.attention.mla_triton")
_kv_write = DeviceFile("peregrine.kernels.attention.kv_write_triton")
_mla_write = DeviceFile("peregrine.kernels.attention.mla_write_triton")
_plan = DeviceFile("peregrine.kernels.attention.plan_triton")

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
ON_CUDA = Traits(
    devices=frozenset({"cuda"}),
    dtypes=DTYPES,
    kv_dtypes=DTYPES | {torch.float8_e4m3fn},
    page_sizes=frozenset(1 << i for i in range(11)),  # powers of two: blocks of keys are whole pages, or the reverse
    head_dims=frozenset(range(8, 257, 8)),  # whole vectors of 8
    mla_dims=None,
    max_decode_q_len=64,
    tree_masks=True,
    windows=True,
    sinks=True,
    caps=False,
    automatic=True,
)
# An MLA tile needs more shared memory than devices before Hopper have.
BEFORE_HOPPER = replace(ON_CUDA, mla_dims=frozenset())
# Triton's interpreter, for tests: it has no product of bfloat16 and rounds float8 wrongly.
INTERPRETED = replace(
    ON_CUDA,
    devices=frozenset({"cpu"}),
    dtypes=frozenset({torch.float32}),
    kv_dtypes=frozenset({torch.float32}),
    automatic=False,
)


class TritonBackend:
    """Attention in Triton. `costs` says which kernel is faster where two may serve; their bits are the same."""

    name = "triton"

    def __init__(self, costs: KernelCosts = UNMEASURED) -> None:
        self.costs = costs

    @property
    def traits(self) -> Traits:
        """Those of CUDA devices, or of the CPU while Triton interprets."""
        if triton_interprets():
            return INTERPRETED
        return ON_CUDA if generation() >= HOPPER else BEFORE_HOPPER

    def missing(self) -> list[str]:
        """Triton, if it is not installed."""
        return [] if TRITON_PRESENT else ["needs triton, which comes with CUDA builds of torch"]

    def with_costs(self, costs: KernelCosts) -> "TritonBackend":
        """A backend with these costs."""
        return TritonBackend(costs)

    def bind(self, store: KVStore, layers: Sequence[LayerAttention], metadata: AttentionMetadata) -> Attend:
        """Plan one forward for all layers; the returned callable stores keys and values, then attends."""
        plan = _plan.plan_gpu(
            metadata.positions,
            metadata.q_starts,
            metadata.past_lens,
            metadata.page_table,
            metadata.page_size,
            metadata.ancestors,
            metadata.window.max_q_len,
        )
        slots, rank = metadata.slots, store.shape.value_dim
        launches: dict[tuple[bool, bool], Launch] = {}  # by what layers differ in

        def launch_for(layer: LayerAttention, q: Tensor) -> Launch:
            kind = layer.window is not None, layer.sinks is not None
            if kind not in launches:
                problem = problem_of(metadata, store, layer, q.shape[1], q.dtype)
                launches[kind] = choose_launch(problem, self.traits, gpu_of(q), self.costs)
            return launches[kind]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Deferred | None = None) -> Tensor:
            assert not isinstance(rope, DeferredMLARope), "keys and values are apart"
            own, kv = layers[layer], _stored(store, layer)
            if rope is None:
                _kv_write.write_kv(kv, slots, k, v)
            else:
                q = _kv_write.rope_write_kv(kv, slots, q, k, v, rope)
            if not len(q):
                return q
            out: Tensor = _dense.dense_attention(q, kv, plan, launch_for(own, q), own.scale, own.window, own.sinks)
            return out

        def mla_attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Deferred | None = None) -> Tensor:
            own, keys = layers[layer], store.keys[layer]
            assert own.window is None, "MLA has no sliding window"
            assert own.sinks is None, "MLA has no sinks"
            if rope is None:
                _mla_write.mla_write_kv(keys, slots, k, rank)
            else:
                assert isinstance(rope, DeferredMLARope), "keys hold their values"
                q = _mla_write.mla_rope_write_kv(keys, slots, q, k, rope)
            if not len(q):
                return q[..., :rank]
            out: Tensor = _mla.mla_attention(q, keys, plan, launch_for(own, q), rank, own.scale)
            return out

        return mla_attend if store.shape.shared else attend


def _stored(store: KVStore, layer: int) -> StoredKV:
    """One layer's part of the store."""
    return StoredKV(
        keys=store.keys[layer],
        values=store.values[layer],
        k_scale=None if store.k_scales is None else store.k_scales[layer],
        v_scale=None if store.v_scales is None else store.v_scales[layer],
    )
