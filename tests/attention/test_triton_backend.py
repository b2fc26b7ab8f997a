"""The Triton backend launches the kernel with the lower cost, and applies a deferred rotation."""

from dataclasses import replace

import pytest
import torch

from peregrine.attention import Kernel, LayerAttention, triton_backend
from peregrine.attention.conformance.paging import Layout, attend, lay_out
from peregrine.attention.conformance.problem import chain
from peregrine.attention.kernel_choice import only
from peregrine.attention.torch_backend import TorchBackend
from peregrine.attention.triton_backend import INTERPRETED, ON_CUDA, TritonBackend
from peregrine.hardware import triton_interprets
from peregrine.kernels.attention import DeferredMLARope
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

needs_interpreter = pytest.mark.skipif(
    not (TRITON_PRESENT and triton_interprets()), reason="needs Triton's interpreter"
)
LAYER = LayerAttention(0.2, None, None)
HEADS = (4, 1, 16)
MLA_HEADS = (4, 1, 48, 32)


def test_traits_say_where_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert TritonBackend().traits is ON_CUDA
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonBackend().traits is INTERPRETED
    assert not INTERPRETED.automatic
    assert torch.bfloat16 not in INTERPRETED.dtypes


def test_mla_needs_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLA tiles need more shared memory than earlier devices have; there plain torch serves."""
    monkeypatch.setattr(triton_backend, "triton_interprets", lambda: False)
    for generation, fits in ((8, False), (9, True), (10, True)):
        monkeypatch.setattr(triton_backend, "generation", lambda generation=generation: generation)
        assert TritonBackend().traits == replace(ON_CUDA, mla_dims=None if fits else frozenset())


@needs_interpreter
@pytest.mark.parametrize("kernel", Kernel)
def test_the_kernel_that_costs_less_is_launched(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    from peregrine.kernels.attention import kv_write_triton as kv_write
    from peregrine.kernels.attention import triton as dense

    launched = []
    right = dense.launch

    def spy(what: object, *arguments: object, **options: object) -> None:
        launched.append(what)
        right(what, *arguments, **options)

    for module in (dense, kv_write):
        monkeypatch.setattr(module, "launch", spy)
    attend(TritonBackend(only(kernel, [(1, 2)])), [chain(140, 2, HEADS)], LAYER)
    decode, context = [dense.decode_kernel, dense.merge_kernel], [dense.context_kernel]
    assert launched == [kv_write.write_kernel, *(decode if kernel is Kernel.DECODE else context)]


@needs_interpreter
@pytest.mark.parametrize("kernel", Kernel)
def test_mla_has_both_kernels(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    from peregrine.kernels.attention import mla_merge_triton as merge
    from peregrine.kernels.attention import mla_triton as gpu

    launched = []
    right = gpu.launch

    def spy(what: object, *arguments: object, **options: object) -> None:
        launched.append((what, options.get("SPLIT_KV")))
        right(what, *arguments, **options)

    for module in (gpu, merge):
        monkeypatch.setattr(module, "launch", spy)
    attend(TritonBackend(only(kernel, [(1, 2)])), [chain(140, 2, MLA_HEADS)], LAYER)
    decode = [(gpu.mla_kernel, True), (merge.mla_merge_kernel, None)]
    assert launched == (decode if kernel is Kernel.DECODE else [(gpu.mla_kernel, False)])


@needs_interpreter
@pytest.mark.parametrize("live", [[0, 1, 2], [2], []])
def test_mla_queries_and_keys_are_rotated_on_the_way(live: list[int]) -> None:
    """Against the torch backend, called as a model calls it on a GPU; with few live rows, and with none."""
    rows = [chain(140, 3, MLA_HEADS).at(*(live or [0]))]
    rank, rope = MLA_HEADS[3], MLA_HEADS[2] - MLA_HEADS[3]
    rng = torch.Generator().manual_seed(1)
    q_rope = torch.randn(len(live), MLA_HEADS[0], rope, generator=rng)
    places = torch.arange(140, 143)
    table = torch.randn(150, rope, generator=rng)
    deferred = DeferredMLARope(q_rope, places[live], places, table, torch.rand(rank, generator=rng), 1e-6)
    outs, stores = [], []
    for backend in (TorchBackend(), TritonBackend()):
        forward = lay_out(rows, Layout())
        bound = backend.bind(forward.store, [LAYER] * 2, forward.metadata)
        outs.append(bound(1, forward.q[: len(live)], forward.k, forward.v, deferred))
        stores.append(forward.store.keys)
    assert outs[0].shape == (len(live), MLA_HEADS[0], rank)
    torch.testing.assert_close(outs[1], outs[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(stores[1], stores[0], atol=1e-6, rtol=1e-5)
