"""The attention kernel of a window is chosen by timing when an engine starts, and reported."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peregrine.attention import AttentionMetadata, Kernel, LayerAttention, Window, choose_launch
from peregrine.attention.kernel_choice import Shape, problem_of
from peregrine.attention.numba_backend import NumbaBackend
from peregrine.attention.torch_backend import TorchBackend
from peregrine.attention.triton_backend import ON_CUDA, TritonBackend
from peregrine.cache.store import KVShape, KVStore
from peregrine.engine import kernel_costs
from peregrine.engine.kernel_costs import CONTEXT, choose_kernels, full_window, window_shapes
from peregrine.kernels.attention import gpu_of
from peregrine.llm import engine_config
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import Eagle3Head
from peregrine.sampling import SamplingParams
from peregrine.spec.bound import BoundModel
from peregrine.spec.readers import ModelReader
from peregrine.spec.registry import DraftSource
from spec.harness import Case, build, eagle3_head, noisy_model, run

LAYERS = [LayerAttention(1.0, None, None)]


@pytest.fixture
def store() -> KVStore:
    return KVStore(1, 7, 16, KVShape.of_heads(2, 8), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("options", "network", "expected"),
    [
        ({"drafter": "none"}, None, {1: False}),
        ({"drafter": "ngram", "num_drafts": 3}, None, {1: False, 4: False}),
        ({"drafter": "eagle3", "num_drafts": 3}, Eagle3Head, {1: False, 4: False}),
        ({"drafter": "eagle3", "tree": (5, 4, 24)}, Eagle3Head, {1: False, 4: True, 6: False, 24: True}),
        ({"drafter": "eagle3", "tree": (3, 4, 24)}, Eagle3Head, {1: False, 4: True, 24: True}),
        ({"drafter": "eagle3", "tree": (3, 1, 4)}, Eagle3Head, {1: False, 4: False}),
        ({"drafter": "eagle3", "windows": "auto"}, Eagle3Head, {1: False}),
        ({"drafter": "small", "num_drafts": 3}, Decoder, {1: False, 4: False, 5: False}),
        ({"drafter": "small", "tree": (3, 2, 8)}, Decoder, {1: False, 2: True, 5: False, 8: True}),
    ],
    ids=[
        "plain",
        "ngram",
        "chain",
        "tree",
        "tree as wide as its path",
        "narrow tree",
        "planned",
        "model",
        "model's tree",
    ],
)
def test_the_windows_of_a_round(options: dict[str, object], network: type | None, expected: dict[int, bool]) -> None:
    """Queries per row, and whether they form a tree; the list is the same for every batch size."""
    draft = DraftSource(str(options["drafter"]), None if network is None else network.__new__(network))
    windows = window_shapes(engine_config("merlin", {"windows": "fixed"} | options), draft, (8, 1))
    assert windows == {(rows, q_len): tree for rows in (1, 8) for q_len, tree in expected.items()}
    assert list(windows) == sorted(windows)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drafter": "ngram", "num_drafts": 3},
        {"drafter": str(noisy_model()), "num_drafts": 3},
        {"drafter": str(noisy_model()), "tree": (3, 2, 8)},
        {"drafter": str(eagle3_head()), "tree": (4, 3, 14)},
        {"drafter": str(eagle3_head()), "num_drafts": 2},
    ],
    ids=["plain", "ngram", "model", "model's tree", "head's tree", "head"],
)
def test_a_round_has_no_other_windows(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows that target and drafter bind in real rounds are those measured, trees as trees."""
    bound: set[tuple[Shape, bool]] = set()
    bind = NumbaBackend.bind if not NumbaBackend().missing() else TorchBackend.bind

    def record(self: object, store: KVStore, layers: object, metadata: AttentionMetadata) -> object:
        window = metadata.window
        if window.q_len is not None:
            bound.add(((window.num_rows, window.q_len), metadata.ancestors is not None))
        return bind(self, store, layers, metadata)  # type: ignore[arg-type]

    for backend in (NumbaBackend, TorchBackend):
        monkeypatch.setattr(backend, "bind", record)
    asked = {"drafter": "none", "windows": "fixed", **options}
    engine = build(**asked).engine
    run(engine, [Case((5,), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))])
    network = getattr(engine.runner.drafter, "reader", None)
    network = network and (network.model.decoder if isinstance(network, ModelReader) else network.head)
    measured = window_shapes(engine_config("x", asked), DraftSource(str(asked["drafter"]), network), (1,))
    assert bound <= set(measured.items())
    assert {shape for shape, tree in bound if tree} == {shape for shape, tree in measured.items() if tree}


def test_the_faster_kernel_serves_and_both_times_are_reported(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel_of(backend: object, metadata: AttentionMetadata) -> Kernel:
        assert isinstance(backend, TritonBackend)
        problem = problem_of(metadata, store, LAYERS[0], 2, torch.float32)
        return choose_launch(problem, ON_CUDA, gpu_of(store.keys), backend.costs).kernel

    def time_forward(model: BoundModel, metadata: AttentionMetadata) -> float:
        rows, context = metadata.window.num_rows, int(metadata.past_lens[0])
        timed.append((rows, context))
        is_slow = rows == 1 or (rows == 4 and context > CONTEXT)
        return {Kernel.DECODE: 0.02, Kernel.CONTEXT: 0.5 if is_slow else 0.01}[kernel_of(model.backend, metadata)]

    timed: list[tuple[int, int]] = []
    monkeypatch.setattr(kernel_costs, "time_forward", time_forward)
    first = SimpleNamespace(attention=SimpleNamespace(num_heads=2))
    decoder: Any = SimpleNamespace(layer=lambda index: first, embedding=torch.zeros(1))
    model = BoundModel(decoder, LAYERS, store, TritonBackend())
    windows = {(rows, 4): False for rows in (1, 4, 8, 99)}
    chosen, made = choose_kernels(model, windows, max_len=3000)
    assert kernel_of(chosen, full_window(store, (1, 4))) is Kernel.DECODE
    assert kernel_of(chosen, full_window(store, (8, 4))) is Kernel.CONTEXT
    # Faster for a chat and slower for a long one, where programs that share keys serve.
    assert kernel_of(chosen, full_window(store, (4, 4))) is Kernel.DECODE
    assert "4 x 4: decode, decode took 0.0200 ms and context 0.5000 ms at 3000 tokens" in made.because
    assert "1 x 4: decode, decode took 0.0200 ms and context 0.5000 ms;" in made.because
    assert "8 x 4: context, decode took 0.0200 ms and context 0.0100 ms" in made.because
    # Only one kernel serves this many rows: there is nothing to time.
    assert "99 x 4: context, tiles of queries alone fill the device" in made.because
    assert set(timed) == {(1, CONTEXT), (4, CONTEXT), (8, CONTEXT), (4, 3000), (8, 3000)}


def test_a_backend_with_one_kernel_is_not_timed() -> None:
    backend = TorchBackend()
    assert backend.with_costs(kernel_costs.only(Kernel.DECODE, [(1, 1)])) is backend


@pytest.mark.parametrize(("shape", "tree"), [((1, 1), False), ((3, 4), False), ((3, 4), True)])
def test_timing_reads_real_pages_and_writes_to_the_scratch_page(store: KVStore, shape: Shape, tree: bool) -> None:
    window = full_window(store, shape, tree)
    assert window.ancestors is None or window.ancestors.tolist() == [[1, 3, 7, 15]] * 3
    assert (window.ancestors is not None) == tree
    assert window.window == Window.uniform(*shape)
    assert set(window.page_table.flatten().tolist()) <= set(range(1, store.num_pages))
    assert window.page_table.shape[1] * store.page_size >= CONTEXT + shape[1]
    assert window.positions[-1] == CONTEXT + shape[1] - 1
    assert not window.slots.any()
    before = store.keys.clone()
    q = torch.ones(len(window.positions), 2, 8)
    TorchBackend().bind(store, LAYERS, window)(0, q, q, q)
    assert torch.equal(store.keys[:, store.page_size :], before[:, store.page_size :])
