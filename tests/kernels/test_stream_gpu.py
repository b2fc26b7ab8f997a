"""The residual stream as a GPU carries it, in the interpreter: the twin's values, with norms cut in two halves."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.interpreted import send_models_to_triton
from peregrine.hardware import triton_interprets
from peregrine.kernels.linear.reference import PackedWeight
from peregrine.kernels.residual.reference import (
    Residual,
    embed_residual,
    join_stream,
    normed,
    start_residual,
    stream_gate,
    stream_linear,
)
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

if not (TRITON_PRESENT and triton_interprets()):
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from peregrine.kernels.residual import triton as gpu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of inf

HIDDEN, INNER, OUT, VOCAB, EPS = 80, 96, 48, 50, 1e-5
UNIT = 2**24
ROWS = (0, 1, 5, 17)


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + size[-1]))


def packed(out_size: int, in_size: int, seed: int, with_bias: bool = False) -> PackedWeight:
    bias = draw(out_size, seed=seed) if with_bias else None
    return PackedWeight(out_size, None, draw(out_size, in_size, seed=seed) * in_size**-0.5, bias)


def squares_of(values: Tensor) -> list[int]:
    """Each row's sum of squares in units, counted by Python."""
    return [sum(int(square * UNIT) for square in row) for row in values.square().double().tolist()]


EMBEDDING = draw(VOCAB, HIDDEN) * 3
NORMS = [draw(HIDDEN, seed=seed) for seed in range(3)]
GATE_UP, DOWN = packed(2 * INNER, HIDDEN, 1), packed(HIDDEN, INNER, 2, with_bias=True)
LAST = packed(OUT, HIDDEN, 3)


def layer(stream: Residual, norm: Tensor | None) -> Residual:
    return join_stream(stream_gate(stream, GATE_UP), DOWN, stream, norm, EPS)


@pytest.mark.parametrize("rows", ROWS)
def test_embedding_rows_are_made_ready_for_a_norm(rows: int) -> None:
    tokens = torch.arange(rows) * 7 % VOCAB
    values, scaled, squares, spare = gpu.embed(tokens, EMBEDDING, NORMS[0])
    assert torch.equal(values, EMBEDDING[tokens])
    assert torch.equal(scaled, EMBEDDING[tokens] * NORMS[0])
    assert squares.tolist() == squares_of(values)
    assert spare.tolist() == [0] * rows


def test_a_value_too_large_to_count_spoils_its_row_and_no_other() -> None:
    embedding = torch.tensor([[1.0, 1e30, 0.5], [1.0, 2.0, 3.0]])
    _, scaled, squares, _ = gpu.embed(torch.tensor([0, 1]), embedding, torch.ones(3))
    assert scaled.isnan().tolist() == [[False, True, False], [False] * 3]
    assert squares[1] == 14 * UNIT


@pytest.mark.parametrize("rows", ROWS)
def test_a_norm_is_finished(rows: int) -> None:
    values = draw(rows, HIDDEN) * 3
    squares = torch.tensor(squares_of(values), dtype=torch.int64)
    whole = F.rms_norm(values, (HIDDEN,), NORMS[0], EPS)
    torch.testing.assert_close(gpu.finish_norm(values * NORMS[0], squares, EPS), whole)


@pytest.mark.parametrize("rows", ROWS)
def test_layers_are_the_twins(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, the norm after them, and a linear of it."""
    tokens = torch.arange(rows) * 7 % VOCAB

    def run() -> tuple[Residual, Tensor, Tensor]:
        stream = embed_residual(tokens, EMBEDDING, NORMS[0], EPS)
        stream = layer(layer(stream, NORMS[1]), NORMS[2])
        return stream, normed(stream), stream_linear(stream, LAST)

    _, hidden, scores = run()
    send_models_to_triton(monkeypatch)
    stream, gpu_hidden, gpu_scores = run()
    assert stream.squares is not None
    assert stream.squares.tolist() == squares_of(stream.values)
    torch.testing.assert_close(gpu_hidden, hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gpu_scores, scores, rtol=1e-4, atol=1e-5)


def test_sums_that_are_no_longer_read_serve_the_addition_after_next(monkeypatch: pytest.MonkeyPatch) -> None:
    send_models_to_triton(monkeypatch)
    first = embed_residual(torch.arange(5), EMBEDDING, NORMS[0], EPS)
    second = layer(first, NORMS[1])
    assert second.squares is first.spare
    assert second.spare is first.squares
    assert second.spare is not None
    assert not second.spare.any()
    third = layer(second, NORMS[2])
    assert third.squares is first.squares
    assert third.squares.tolist() == squares_of(third.values)


@pytest.mark.parametrize("norm", [NORMS[1], None], ids=["normed", "plain"])
def test_a_stream_without_sums_gets_them_where_a_norm_follows(
    norm: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first layer of a draft head, whose input is read as it is."""
    values, x = draw(5, HIDDEN, seed=4), draw(5, INNER, seed=5)
    expected = normed(join_stream(x, DOWN, start_residual(values, None, EPS), norm, EPS))
    send_models_to_triton(monkeypatch)
    stream = join_stream(x, DOWN, start_residual(values, None, EPS), norm, EPS)
    assert (stream.squares is None) == (norm is None)
    torch.testing.assert_close(normed(stream), expected, rtol=1e-4, atol=1e-5)


def test_chosen_rows_go_on_as_they_would_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    send_models_to_triton(monkeypatch)
    stream = embed_residual(torch.arange(9), EMBEDDING, NORMS[0], EPS)
    chosen = torch.tensor([7, 0, 4])
    alone = stream.rows(chosen)
    assert torch.equal(alone.values, stream.values[chosen])
    after = layer(alone, NORMS[1])
    assert after.squares is not None
    assert after.squares.tolist() == squares_of(after.values)
    torch.testing.assert_close(after.values, layer(stream, NORMS[1]).values[chosen], rtol=1e-5, atol=1e-5)
