"""A replayed run gives the bits of the run itself, and what cannot be recorded is noticed."""

import pytest
import torch
from torch import Tensor

from peregrine.kernels.activation.reference import silu_mul
from peregrine.kernels.linear import pack_weight
from peregrine.kernels.norm.reference import add_rms_norm
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.kernels.runtime.cpu_graph import RECORDED_USE, CpuGraph, CpuGraphs, record_at_once

pytestmark = pytest.mark.skipif(not NUMBA_PRESENT, reason="needs numba")


@pytest.fixture
def mlp():
    generator = torch.Generator().manual_seed(0)
    up = pack_weight(torch.randn(96, 32, generator=generator))
    down = pack_weight(torch.randn(32, 48, generator=generator))

    def step(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        normed, total = add_rms_norm(x, residual, torch.ones(32), 1e-5)
        return down.linear(silu_mul(up.linear(normed)).flatten(1)), total

    weight = torch.ones(32)

    def clean(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        normed, total = add_rms_norm(x, residual, weight, 1e-5)
        return down.linear(silu_mul(up.linear(normed)).flatten(1)), total

    return step, clean


def draw(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 32, generator=generator), torch.randn(rows, 32, generator=generator)


@pytest.mark.parametrize("rows", [1, 4, 17])
@pytest.mark.parametrize("inference", [True, False])
def test_a_replayed_run_has_the_same_bits(mlp, rows: int, inference: bool) -> None:
    _, clean = mlp
    with torch.inference_mode(inference):
        graph = CpuGraph(clean, draw(rows, 0))
        assert graph.complete
        for seed in range(1, 6):
            torch.randn(10_000)  # free memory is reused by other tensors now
            expected = clean(*draw(rows, seed))
            assert all(torch.equal(a, b) for a, b in zip(graph(*draw(rows, seed)), expected, strict=True))


def test_work_done_by_torch_is_noticed(mlp) -> None:
    step, _ = mlp  # makes its norm's weight anew each time
    assert not CpuGraph(step, draw(2, 0)).complete
    assert not CpuGraph(lambda x, y: (x.add_(1),), draw(2, 0)).complete
    assert not CpuGraph(lambda x, y: (x.t().contiguous(),), draw(2, 0)).complete
    assert not CpuGraph(lambda x, y: (x[: int(y[0, 0] > 0)],), draw(2, 0)).complete  # a number that Python reads
    assert CpuGraph(lambda x, y: (x.view(-1)[3:],), draw(2, 0)).complete


def test_graphs_run_what_cannot_be_recorded(mlp) -> None:
    step, clean = mlp
    graphs = CpuGraphs(max_rows=8, kept_rows=5, few=8)
    for seed in range(2 + RECORDED_USE):
        for rows in (1, 2, 3, 20):
            for index, function in enumerate((step, clean)):
                inputs = draw(rows, seed)
                expected = function(*inputs)
                made = graphs.run(index, function, *inputs)
                assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
    assert list(graphs._graphs) == [2, 3]  # 1 was used least recently, 20 is too large


def test_an_unchanged_input_is_not_copied(mlp) -> None:
    _, clean = mlp
    x, residual = draw(2, 0)
    graph = CpuGraph(clean, (x, residual))
    x.mul_(2)
    expected = clean(x, residual)
    assert torch.equal(graph(x, residual)[0], expected[0])


def test_graphs_inside_a_recording_are_part_of_it(mlp) -> None:
    """A replay makes its calls without Python: an outer recording would not see them."""
    _, clean = mlp
    inner, outer = CpuGraphs(max_rows=8), CpuGraphs(max_rows=8)
    for seed in range(1 + RECORDED_USE):
        inner.run("once", clean, *draw(2, seed))  # recorded on its own before and after
        inputs = draw(2, seed + 10)
        made = outer.run("outer", lambda x, y: inner.run("once", clean, x, y), *inputs)
        assert all(torch.equal(a, b) for a, b in zip(made, clean(*inputs), strict=True))
    assert outer._graphs[2]["outer"].complete


def test_a_graph_with_copies_of_its_inputs_leaves_them_alone(mlp) -> None:
    _, clean = mlp
    first, x = draw(2, 0), draw(2, 0)
    graphs = CpuGraphs(max_rows=8, copies_inputs=True)
    for _ in range(RECORDED_USE):
        graphs.run("mlp", clean, *x)
    graphs.run("mlp", clean, *draw(2, 1))
    assert all(torch.equal(a, b) for a, b in zip(x, first, strict=True))


def test_what_is_seldom_run_is_not_recorded(mlp) -> None:
    """To record takes longer than a few replays save: windows have many numbers of tokens, some of them seldom seen."""
    _, clean = mlp
    few, many = 20, 21
    graphs = CpuGraphs(max_rows=32, few=few)
    for use in range(1, 2 + RECORDED_USE):
        graphs.run("mlp", clean, *draw(many, use))
        assert list(graphs._graphs) == ([many] if use >= RECORDED_USE else [])
    with record_at_once(when=False):
        graphs.run("mlp", clean, *draw(many + 1, 0))
    with record_at_once(), record_at_once(when=False):
        graphs.run("mlp", clean, *draw(many + 2, 0))
    graphs.run("mlp", clean, *draw(many + 3, 0))
    assert list(graphs._graphs) == [many, many + 2]
    graphs.run("mlp", clean, *draw(few, 0))
    assert list(graphs._graphs)[-1] == few, "few rows are recorded at once"
