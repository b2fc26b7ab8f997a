"""The gated activation: silu(gate) * up, element by element."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peregrine.kernels.activation.reference import silu_mul, silu_mul_torch
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT

needs_numba = pytest.mark.skipif(not NUMBA_PRESENT, reason="numba is not installed")
BOTH = [pytest.param(silu_mul, marks=needs_numba, id="kernel"), pytest.param(silu_mul_torch, id="twin")]
ROWS = (0, 1, 2, 3, 5, 8, 17, 64)
WIDTHS = (1, 7, 16, 33, 1024)


def _rows(width: int, num_rows: int = max(ROWS)) -> Tensor:
    torch.manual_seed(width)
    return torch.randn(num_rows, 2 * width) * 8


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("width", WIDTHS)
def test_agrees_with_float64(function, width):
    gate_up = _rows(width)
    exact = F.silu(gate_up[:, :width].double()) * gate_up[:, width:].double()
    for num_rows in ROWS:
        y = function(gate_up[:num_rows])
        assert y.shape == (num_rows, width)
        torch.testing.assert_close(y.double(), exact[:num_rows], rtol=2e-6, atol=0)


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_in_any_batch(function, width):
    gate_up = _rows(width)
    together = function(gate_up)
    for num_rows in ROWS:
        assert torch.equal(function(gate_up[:num_rows]), together[:num_rows])
    assert torch.equal(function(gate_up[7:9]), together[7:9])


@needs_numba
def test_an_element_has_the_same_bits_in_any_column():
    gate, up = _rows(1)[:1].unbind(dim=1)
    for width in (1, 15, 16, 17):  # below, at and past the lanes of a vector
        y = silu_mul(torch.cat((gate.expand(width), up.expand(width)))[None])
        assert torch.equal(y, silu_mul(torch.stack((gate, up), dim=1)).expand(1, width))


@pytest.mark.parametrize("function", BOTH)
def test_extremes(function):
    gate = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 1e-40, 88.0, 200.0, 1e30, float("inf"), float("nan")])
    y = function(torch.cat((gate, torch.ones_like(gate)))[None])[0]
    assert torch.equal(y[-3:-1], gate[-3:-1])
    assert y[-1].isnan()
    torch.testing.assert_close(y[:-3].double(), F.silu(gate[:-3].double()), rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("function", BOTH)
def test_views_have_the_bits_of_their_copies(function):
    gate_up = _rows(33, num_rows=5)
    wide = torch.cat((gate_up, gate_up), dim=1)
    assert torch.equal(function(wide[:, :66]), function(gate_up))
    assert torch.equal(function(gate_up.T.contiguous().T), function(gate_up))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_takes_the_twin(dtype):
    gate_up = _rows(33).to(dtype)
    y = silu_mul(gate_up)
    assert y.dtype == dtype
    assert torch.equal(y, silu_mul_torch(gate_up))


@pytest.mark.parametrize("function", [silu_mul, silu_mul_torch])
def test_gradients_reach_both_halves(function):
    gate_up = _rows(3, num_rows=2).requires_grad_()
    function(gate_up).sum().backward()
    gate, up = gate_up.detach().chunk(2, dim=1)
    share = gate.sigmoid()
    torch.testing.assert_close(gate_up.grad[:, 3:], F.silu(gate))
    torch.testing.assert_close(gate_up.grad[:, :3], up * share * (1 + gate * (1 - share)))


@needs_numba
def test_rows_of_odd_length_are_refused():
    with pytest.raises(ValueError, match="7"):
        silu_mul(torch.ones(2, 7))
