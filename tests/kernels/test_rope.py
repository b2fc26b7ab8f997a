"""Rotary positions: a rotation of each pair, and a row's bits do not depend on other rows."""

import pytest
import torch
from torch import Tensor

from peregrine.kernels.rope.reference import rope, rope_torch
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT

needs_numba = pytest.mark.skipif(not NUMBA_PRESENT, reason="numba is not installed")
BOTH = [pytest.param(rope, marks=needs_numba, id="kernel"), pytest.param(rope_torch, id="twin")]
ROWS = (0, 1, 2, 3, 5, 8, 17, 64)
SHAPES = [(1, 2), (2, 6), (8, 48), (3, 64), (16, 66)]  # (heads, D)
TABLE_ROWS = 100


def _angles(dim: int) -> Tensor:
    frequencies = 100.0 ** -(torch.arange(dim // 2, dtype=torch.float64) * 2 / dim)
    return torch.arange(TABLE_ROWS, dtype=torch.float64)[:, None] * frequencies


def _case(heads: int, dim: int, num_rows: int = max(ROWS)) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(heads * dim)
    table = torch.cat((_angles(dim).cos(), _angles(dim).sin()), dim=1).float()
    return torch.randn(num_rows, heads, dim), torch.randint(TABLE_ROWS, (num_rows,)), table


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotates_pairs_like_complex_numbers(function, shape):
    x, positions, table = _case(*shape)
    half = shape[1] // 2
    rotation = torch.polar(torch.ones(()).double(), _angles(shape[1])[positions])[:, None]
    rotated = torch.complex(x[..., :half].double(), x[..., half:].double()) * rotation
    exact = torch.cat((rotated.real, rotated.imag), dim=-1)
    for num_rows in ROWS:
        y = function(x[:num_rows], positions[:num_rows], table)
        assert y.shape == (num_rows, *shape)
        torch.testing.assert_close(y.double(), exact[:num_rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(function, shape):
    x, positions, table = _case(*shape)
    together = function(x, positions, table)
    for num_rows in ROWS:
        assert torch.equal(function(x[:num_rows], positions[:num_rows], table), together[:num_rows])
    assert torch.equal(function(x[7:9], positions[7:9], table), together[7:9])


@pytest.mark.parametrize("function", BOTH)
def test_position_zero_changes_nothing(function):
    x, _, table = _case(8, 48)
    assert torch.equal(function(x, torch.zeros(len(x), dtype=torch.int64), table), x)


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: torch.cat((x, x), dim=1)[:, : x.shape[1]], id="heads cut from wider rows"),
        pytest.param(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), id="heads first"),
        pytest.param(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), id="strided elements"),
    ],
)
def test_views_have_the_bits_of_their_copies(function, view):
    x, positions, table = _case(4, 48, num_rows=6)
    wide_positions = positions.repeat_interleave(2)[::2]
    y = function(view(x), wide_positions, table)
    assert torch.equal(y, function(x, positions, table))
    assert y.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    x, positions, table = _case(8, 48)
    x = x.to(dtype)
    assert torch.equal(rope(x, positions, table), rope_torch(x.float(), positions, table).to(dtype))


@pytest.mark.parametrize("function", [rope, rope_torch])
def test_gradients_are_rotated_back(function):
    x, positions, table = _case(2, 6, num_rows=4)
    x.requires_grad_()
    y = function(x, positions, table)
    y.backward(y.detach())
    torch.testing.assert_close(x.grad, x.detach())


@needs_numba
@pytest.mark.parametrize("position", [-1, TABLE_ROWS, 2**40])
def test_a_position_outside_the_table_makes_its_row_nan_alone(position):
    x, positions, table = _case(2, 6, num_rows=3)
    expected = rope(x, positions, table)
    positions[1] = position
    y = rope(x, positions, table)
    assert y[1].isnan().all()
    assert torch.equal(y[::2], expected[::2])


@needs_numba
def test_sizes_that_do_not_fit_are_refused():
    x, positions, table = _case(2, 6, num_rows=3)
    with pytest.raises(ValueError, match="positions"):
        rope(x, positions[:2], table)
    with pytest.raises(ValueError, match="positions"):
        rope(x, positions.int(), table)
    with pytest.raises(ValueError, match="rows of 4"):
        rope(x, positions, table[:, :4])
