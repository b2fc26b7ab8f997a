"""The residual stream on the GPU path, in the interpreter: the twin's values, with split norms."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.compile_experts import RMSNorm
from kernels.interpreted import send_models_to_triton
from peregrine.hardware import triton_interprets
from peregrine.kernels.linear import pack_weight
from peregrine.kernels.residual import Norm, Residual, embed_residual, start_residual
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


def drawn(out_size: int, in_size: int, seed: int) -> Tensor:
    return draw(out_size, in_size, seed=seed) * in_size**-0.5


def squares_of(values: Tensor) -> list[int]:
    """Each row's sum of squares in units, counted by Python."""
    return [sum(int(square * UNIT) for square in row) for row in values.square().double().tolist()]


def sums_of(values: Tensor) -> Tensor:
    """[N, 2] i64: each row's sums of squares in coarse and in fine units; parts of a unit are dropped."""
    squares = (values.float() * values.float()).double()
    fine = torch.where(squares < 1, squares, 0.0) * 2.0**48
    return torch.stack([(squares * 2.0**24).long().sum(dim=1), fine.long().sum(dim=1)], dim=1)


EMBEDDING = draw(VOCAB, HIDDEN) * 3
NORMS = [RMSNorm(draw(HIDDEN, seed=seed), EPS) for seed in range(3)]
GATE_UP, DOWN, DOWN_BIAS = drawn(2 * INNER, HIDDEN, 1), drawn(HIDDEN, INNER, 2), draw(HIDDEN, seed=2)
LAST = drawn(OUT, HIDDEN, 3)


def layer(residual: Residual, norm: Norm | None) -> Residual:
    """An MLP whose weights are packed for the current device."""
    return pack_weight(DOWN, DOWN_BIAS).add(pack_weight(GATE_UP).gated(residual), residual, norm)


@pytest.mark.parametrize("rows", ROWS)
def test_embedding_rows_are_prepared_for_a_norm(rows: int) -> None:
    tokens = torch.arange(rows) * 7 % VOCAB
    values, scaled, squares, spare = gpu.embed(tokens, EMBEDDING, NORMS[0].weight)
    assert torch.equal(values, EMBEDDING[tokens])
    assert torch.equal(scaled, EMBEDDING[tokens] * NORMS[0].weight)
    assert torch.equal(squares, sums_of(values))
    assert spare.shape == (rows, 2)
    assert not spare.any()


def test_tokens_may_lie_apart() -> None:
    """The first nodes of windows are every so many tokens of a buffer."""
    windows = torch.arange(12).view(4, 3)
    apart = windows[:, :1].flatten()
    assert not apart.is_contiguous()
    assert torch.equal(gpu.embed(apart, EMBEDDING, NORMS[0].weight)[0], EMBEDDING[windows[:, 0]])


def test_a_value_too_large_to_square_makes_its_row_nan_and_no_other() -> None:
    embedding = torch.tensor([[1.0, 1e30, 0.5], [1.0, 2.0, 3.0]])
    _, scaled, squares, _ = gpu.embed(torch.tensor([0, 1]), embedding, torch.ones(3))
    assert scaled.isnan().tolist() == [[False, True, False], [False] * 3]
    assert squares[1, 0] == 14 * UNIT


@pytest.mark.parametrize("rows", ROWS)
def test_a_norm_is_finished(rows: int) -> None:
    values = draw(rows, HIDDEN) * 3
    squares = sums_of(values)
    whole = F.rms_norm(values, (HIDDEN,), NORMS[0].weight, EPS)
    torch.testing.assert_close(gpu.finish_norm(values * NORMS[0].weight, squares, EPS), whole)


@pytest.mark.parametrize("rows", ROWS)
def test_layers_are_the_twins(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, the norm after them, and a linear of it."""
    tokens = torch.arange(rows) * 7 % VOCAB

    def run() -> tuple[Residual, Tensor, Tensor]:
        residual = embed_residual(tokens, EMBEDDING, NORMS[0])
        residual = layer(layer(residual, NORMS[1]), NORMS[2])
        return residual, residual.finish_norm(), pack_weight(LAST).linear_normed(residual)

    _, hidden, scores = run()
    send_models_to_triton(monkeypatch)
    residual, gpu_hidden, gpu_scores = run()
    assert residual.squares is not None
    assert residual.squares[:, 0].tolist() == squares_of(residual.values)
    torch.testing.assert_close(gpu_hidden, hidden, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gpu_scores, scores, rtol=1e-4, atol=1e-5)


def test_sums_of_squares_alternate_between_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    send_models_to_triton(monkeypatch)
    first = embed_residual(torch.arange(5), EMBEDDING, NORMS[0])
    second = layer(first, NORMS[1])
    assert second.squares is first.spare
    assert second.spare is first.squares
    assert second.spare is not None
    assert not second.spare.any()
    third = layer(second, NORMS[2])
    assert third.squares is first.squares
    assert third.squares[:, 0].tolist() == squares_of(third.values)


@pytest.mark.parametrize("norm", [NORMS[1], None], ids=["normed", "plain"])
def test_a_residual_without_sums_gets_them_where_a_norm_follows(
    norm: Norm | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like the first layer of a draft head, whose input has no norm."""
    values, x = draw(5, HIDDEN, seed=4), draw(5, INNER, seed=5)
    expected = pack_weight(DOWN, DOWN_BIAS).add(x, start_residual(values, None), norm).finish_norm()
    send_models_to_triton(monkeypatch)
    residual = pack_weight(DOWN, DOWN_BIAS).add(x, start_residual(values, None), norm)
    assert (residual.squares is None) == (norm is None)
    torch.testing.assert_close(residual.finish_norm(), expected, rtol=1e-4, atol=1e-5)


def test_selected_rows_agree_with_the_whole_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    send_models_to_triton(monkeypatch)
    residual = embed_residual(torch.arange(9), EMBEDDING, NORMS[0])
    chosen = torch.tensor([7, 0, 4])
    alone = residual.rows(chosen)
    assert torch.equal(alone.values, residual.values[chosen])
    after = layer(alone, NORMS[1])
    assert after.squares is not None
    assert after.squares[:, 0].tolist() == squares_of(after.values)
    torch.testing.assert_close(after.values, layer(residual, NORMS[1]).values[chosen], rtol=1e-5, atol=1e-5)


def test_a_residual_with_a_split_norm_is_added_to_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The addition sets its sums of squares to zero: reading them again would divide by a wrong norm."""
    send_models_to_triton(monkeypatch)
    residual = embed_residual(torch.arange(5), EMBEDDING, NORMS[0])
    layer(residual, NORMS[1])
    with pytest.raises(AssertionError, match="zeroed"):
        pack_weight(LAST).linear_normed(residual)
    with pytest.raises(AssertionError, match="added to once"):
        pack_weight(DOWN, DOWN_BIAS).add(draw(5, INNER), residual, NORMS[1])


def exact_norm(values: Tensor, norm: Norm) -> Tensor:
    wide = values.double()
    return wide * (wide.square().mean(dim=1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [5e-4, 1.0, 3e4], ids=["small", "ordinary", "large"])
def test_norms_of_small_and_of_large_values_are_right(
    size: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 5e-4 a square is four coarse units and a bit; at 3e4, times a weight of 3, float16 is infinite."""
    spread = 0.8 + 0.4 * draw(VOCAB, HIDDEN, seed=1).abs().clamp(max=1)
    embedding = (draw(VOCAB, HIDDEN).sign() * size * spread).to(dtype)
    norm = RMSNorm((3 + 0.1 * draw(HIDDEN)).to(dtype), 1e-7)
    nothing, zero = torch.zeros(5, INNER, dtype=dtype), torch.zeros(HIDDEN, INNER, dtype=dtype)
    send_models_to_triton(monkeypatch)
    first = embed_residual(torch.arange(5), embedding, norm)
    # Two roundings; to bfloat16 the interpreter cuts off instead.
    rtol = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(first.finish_norm().double(), exact_norm(embedding[:5], norm), rtol=rtol, atol=0.0)
    added = pack_weight(zero).add(nothing, first, norm)  # the addition of nothing, which counts squares again
    torch.testing.assert_close(added.finish_norm().double(), exact_norm(embedding[:5], norm), rtol=rtol, atol=0.0)
    assert (added.squares is None) == (dtype is torch.float16)
