"""Which attention kernel serves is measured when an engine starts, and said."""

import pytest
import torch

from peregrine.attention import Kernel, LayerAttention, Window, kernel_for
from peregrine.attention.kernel_choice import Shape
from peregrine.attention.torch_backend import TorchBackend
from peregrine.attention.triton_backend import ON_CUDA, TritonBackend
from peregrine.cache.store import KVShape, KVStore
from peregrine.engine import kernel_costs
from peregrine.engine.kernel_costs import CONTEXT, choose_kernels, full_window, window_shapes
from peregrine.llm import engine_config

LAYERS = [LayerAttention(1.0, None, None)]


@pytest.fixture
def store() -> KVStore:
    return KVStore(1, 7, 16, KVShape.of_heads(2, 8), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("options", "drafts", "expected"),
    [
        ({}, False, [(1, 1), (8, 1)]),
        ({"num_drafts": 3}, True, [(1, 1), (1, 4), (8, 1), (8, 4)]),
        ({"tree": (5, 4, 24)}, True, [(1, 1), (1, 6), (8, 1), (8, 6)]),
    ],
    ids=["plain", "chain", "tree"],
)
def test_the_windows_of_a_round(options: dict[str, object], drafts: bool, expected: list[Shape]) -> None:
    assert window_shapes(engine_config("merlin", options), drafts, (8, 1)) == expected


def test_the_faster_kernel_serves_and_both_times_are_told(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def time_forward(backend: TritonBackend, *others: object) -> float:
        shape = others[-1]
        taken = kernel_for(Window.uniform(*shape), ON_CUDA, backend.costs)  # type: ignore[misc]
        return {Kernel.DECODE: 0.02, Kernel.CONTEXT: 0.01 if shape == (8, 4) else 0.5}[taken]

    monkeypatch.setattr(kernel_costs, "time_forward", time_forward)
    chosen, made = choose_kernels(TritonBackend(), store, LAYERS, 2, torch.float32, [(1, 4), (8, 4)])
    assert isinstance(chosen, TritonBackend)
    assert kernel_for(Window.uniform(1, 4), ON_CUDA, chosen.costs) is Kernel.DECODE
    assert kernel_for(Window.uniform(8, 4), ON_CUDA, chosen.costs) is Kernel.CONTEXT
    assert "1 x 4: decode, decode took 0.0200 ms and context 0.5000 ms" in made.because
    assert "8 x 4: context, decode took 0.0200 ms and context 0.0100 ms" in made.because


def test_a_backend_with_one_kernel_stays_itself() -> None:
    backend = TorchBackend()
    assert backend.with_costs(kernel_costs.only(Kernel.DECODE, [(1, 1)])) is backend


@pytest.mark.parametrize("shape", [(1, 1), (3, 4)])
def test_what_is_measured_reads_real_pages_and_writes_to_the_scratch_page(store: KVStore, shape: Shape) -> None:
    window = full_window(store, shape)
    assert window.window == Window.uniform(*shape)
    assert set(window.page_table.flatten().tolist()) <= set(range(1, store.num_pages))
    assert window.page_table.shape[1] * store.page_size >= CONTEXT + shape[1]
    assert window.positions[-1] == CONTEXT + shape[1] - 1
    assert not window.slots.any()
    before = store.keys.clone()
    q = torch.ones(len(window.positions), 2, 8)
    TorchBackend().bind(store, LAYERS, window)(0, q, q, q)
    assert torch.equal(store.keys[:, store.page_size :], before[:, store.page_size :])
