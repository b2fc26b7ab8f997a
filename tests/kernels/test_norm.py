"""Norms: Hugging Face's semantics, and a row's bits do not depend on other rows."""

import pytest
import torch
from torch import Tensor

from peregrine.kernels.norm.reference import add_rms_norm, add_rms_norm_torch, norm_pair, rms_norm, rms_norm_torch
from peregrine.kernels.residual import Residual, add_to_residual
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT

needs_numba = pytest.mark.skipif(not NUMBA_PRESENT, reason="numba is not installed")
BOTH = [pytest.param(rms_norm, marks=needs_numba, id="kernel"), pytest.param(rms_norm_torch, id="twin")]
BOTH_ADDED = [
    pytest.param(add_rms_norm, rms_norm, marks=needs_numba, id="kernel"),
    pytest.param(add_rms_norm_torch, rms_norm_torch, id="twin"),
]
ROWS = (0, 1, 2, 3, 5, 8, 17, 64, 300)
WIDTHS = (1, 7, 16, 48, 320, 384, 1001)
EPS = 1e-5


def _rows(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(shape[-1])
    return torch.randn(*shape) * 3, torch.randn(shape[-1])


def _exact(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("width", WIDTHS)
def test_agrees_with_float64(function, width):
    x, weight = _rows(max(ROWS), width)
    for num_rows in ROWS:
        y = function(x[:num_rows], weight, EPS)
        assert y.shape == (num_rows, width)
        torch.testing.assert_close(y.double(), _exact(x[:num_rows], weight), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_has_the_same_bits_in_any_batch(function, width):
    x, weight = _rows(max(ROWS), width)
    together = function(x, weight, EPS)
    for num_rows in ROWS:
        assert torch.equal(function(x[:num_rows], weight, EPS), together[:num_rows])
    for first, last in ((63, 64), (7, 9), (299, 300)):
        assert torch.equal(function(x[first:last], weight, EPS), together[first:last])


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize(("num_rows", "heads", "dim"), [(0, 2, 8), (1, 1, 48), (1, 8, 48), (5, 3, 7), (100, 8, 64)])
def test_heads_are_rows_of_their_own(function, num_rows, heads, dim):
    x, weight = _rows(num_rows, heads, dim)
    flat = function(x.reshape(num_rows * heads, dim), weight, EPS)
    assert torch.equal(function(x, weight, EPS), flat.view(num_rows, heads, dim))


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
    x, weight = _rows(6, 4, 40)
    y = function(view(x), weight, EPS)
    assert torch.equal(y, function(x, weight, EPS))
    assert y.is_contiguous()


@pytest.mark.parametrize(("added", "plain"), BOTH_ADDED)
@pytest.mark.parametrize("width", WIDTHS)
def test_adding_first_is_the_norm_of_the_sum(added, plain, width):
    x, weight = _rows(max(ROWS), width)
    residual = torch.randn(max(ROWS), width)
    for num_rows in ROWS:
        normed, total = added(x[:num_rows], residual[:num_rows], weight, EPS)
        assert torch.equal(total, x[:num_rows] + residual[:num_rows])
        assert torch.equal(normed, plain(total, weight, EPS))


@pytest.mark.parametrize(("added", "plain"), BOTH_ADDED)
def test_adding_takes_views(added, plain):
    x, weight = _rows(6, 40)
    wide = torch.cat((x, x), dim=1)
    normed, total = added(wide[:, :40], x.T.contiguous().T, weight, EPS)
    assert torch.equal(total, x + x)
    assert torch.equal(normed, plain(x + x, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_before_the_weight(dtype):
    x, weight = (value.to(dtype) for value in _rows(64, 320))
    scale = torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + EPS)
    assert torch.equal(rms_norm(x, weight, EPS), weight * (x.float() * scale).to(dtype))
    normed, total = add_rms_norm(x, x, weight, EPS)
    assert total.dtype == dtype
    assert torch.equal(normed, rms_norm(x + x, weight, EPS))


@pytest.mark.parametrize("function", [rms_norm, rms_norm_torch])
def test_gradients_reach_input_and_weight(function):
    x, weight = (value.double().requires_grad_() for value in _rows(2, 5))

    def single(x: Tensor, weight: Tensor) -> Tensor:
        return function(x.float(), weight.float(), EPS).double()

    assert torch.autograd.gradcheck(single, (x, weight), eps=1e-2, atol=1e-2, rtol=1e-2)


def test_a_weight_that_needs_a_gradient_gets_one():
    x, weight = _rows(3, 8)
    weight.requires_grad_()
    rms_norm(x, weight, EPS).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert not rms_norm(x, weight, EPS).requires_grad


@needs_numba
def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"dense \[8\]"):
        rms_norm(torch.ones(2, 8), torch.ones(7), EPS)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), EPS)


@needs_numba
@pytest.mark.parametrize("rows", [0, 1, 5, 300])
@pytest.mark.parametrize("width", [7, 320])
def test_a_pair_is_its_two_norms(rows, width):
    """Bit for bit, from views as well."""
    hidden, first = _rows(rows, width)
    embedding, second = _rows(99, width)
    tokens = torch.randint(0, 99, (rows, 2))[:, 0]
    both = norm_pair(tokens, embedding, first, hidden, second, EPS)
    assert torch.equal(both[:, :width], rms_norm(embedding[tokens], first, EPS))
    assert torch.equal(both[:, width:], rms_norm(hidden, second, EPS))


@pytest.mark.parametrize("rows", [0, 1, 300])
def test_a_residual_without_a_norm_is_the_sum(rows):
    values, _ = _rows(rows, 320)
    update = values.flip(0).clone()
    added = add_to_residual(update.T.contiguous().T, Residual(values, values), None)
    assert torch.equal(added.values, update + values)
    assert added.normed is added.values
