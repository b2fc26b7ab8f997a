"""Linear layers: accurate to float32, and a row's bits do not depend on other rows."""

import pytest
import torch
from torch import Tensor

from peregrine.kernels.linear import DenseWeight, WeightFormat, pack_weight
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT

needs_numba = pytest.mark.skipif(not NUMBA_PRESENT, reason="numba is not installed")


def linear(x: Tensor, packed: WeightFormat) -> Tensor:
    return packed.linear(x)


def linear_torch(x: Tensor, packed: WeightFormat) -> Tensor:
    """The twin on the same values."""
    return (packed if type(packed) is DenseWeight else packed.unpack()).linear(x)


BOTH = [pytest.param(linear, marks=needs_numba, id="kernel"), pytest.param(linear_torch, id="twin")]
ROWS = (0, 1, 2, 3, 5, 8, 17, 64)
SHAPES = [(1, 1), (1, 7), (16, 4), (17, 33), (40, 5), (100, 129), (384, 320), (48, 1024)]  # (O, I)


def _case(out_features: int, in_features: int, num_rows: int = max(ROWS)) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(out_features * 1009 + in_features)
    scale = in_features**-0.5
    return (
        torch.randn(num_rows, in_features),
        torch.randn(out_features, in_features) * scale,
        torch.randn(out_features),
    )


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_agrees_with_float64(function, shape, with_bias):
    x, weight, bias = _case(*shape)
    exact = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    packed = pack_weight(weight, bias if with_bias else None)
    for num_rows in ROWS:
        y = function(x[:num_rows], packed)
        assert y.shape == (num_rows, shape[0])
        assert y.dtype == torch.float32
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), exact[:num_rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(function, shape):
    x, weight, bias = _case(*shape)
    packed = pack_weight(weight, bias)
    together = function(x, packed)
    for num_rows in ROWS:
        assert torch.equal(function(x[:num_rows], packed), together[:num_rows])
    for first, last in ((63, 64), (7, 9), (3, 8), (30, 64)):
        assert torch.equal(function(x[first:last], packed), together[first:last])


@pytest.mark.parametrize("function", BOTH)
def test_threads_do_not_change_a_bit(function):
    x, weight, bias = _case(384, 320)
    packed = pack_weight(weight, bias)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(function(x[:5], packed))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_numba
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 9])
def test_the_kernel_adds_inputs_in_order_and_the_bias_last(num_rows):
    big = float(2**25)  # its neighbours in float32 are 4 apart
    weight = torch.tensor([[big, 1.0, -big, 1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]])
    y = linear(torch.ones(num_rows, 7), pack_weight(weight, torch.tensor([0.0, big])))
    assert torch.equal(y, torch.tensor([[1.0, big + 4]]).expand(num_rows, 2))


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: torch.cat((x, x), dim=1)[:, : x.shape[1]], id="cut from wider rows"),
        pytest.param(lambda x: torch.cat((x[:, :1], x), dim=1)[:, 1:], id="cut off alignment"),
        pytest.param(lambda x: x.T.contiguous().T, id="transposed"),
        pytest.param(lambda x: x.repeat_interleave(2, dim=0)[::2], id="every second row"),
    ],
)
def test_views_have_the_bits_of_their_copies(function, view):
    x, weight, bias = _case(100, 129, num_rows=17)
    packed = pack_weight(weight, bias)
    assert torch.equal(function(view(x), packed), function(x, packed))


@pytest.mark.parametrize("function", [linear, linear_torch])
def test_gradients_reach_the_input(function):
    x, weight, bias = _case(40, 33, num_rows=3)
    x.requires_grad_()
    function(x, pack_weight(weight, bias)).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(dim=0).expand(3, 33))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_takes_the_twin(dtype):
    x, weight, bias = (value.to(dtype) for value in _case(40, 64))
    packed = pack_weight(weight, bias)
    y = linear(x, packed)
    assert y.dtype == dtype
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=2e-2)
    assert torch.equal(linear(x[5:6], packed), y[5:6])


@needs_numba
@pytest.mark.parametrize("shape", [(16, 4), (100, 129), (17, 1), (384, 320)])
def test_weights_held_in_bfloat16_have_the_bits_of_their_values_in_float32(shape):
    x, weight, bias = _case(*shape)
    held, rounded = pack_weight(weight, bias, held=torch.bfloat16), weight.bfloat16().float()
    expected = pack_weight(rounded, bias)
    assert held.num_bytes * 2 == expected.num_bytes
    for num_rows in range(1, 18):  # more than 5: a panel is widened first
        assert torch.equal(linear(x[:num_rows], held), linear(x[:num_rows], expected))
    assert torch.equal(held.unpack().weight, rounded)
    assert not torch.equal(linear(x, pack_weight(weight, bias)), linear(x, held))


@needs_numba
def test_one_layout_is_kept():
    _, weight, bias = _case(40, 33)
    compiled, plain = pack_weight(weight), pack_weight(weight.bfloat16(), bias.bfloat16())
    assert compiled.is_recordable
    assert compiled.panels.numel() == 48 * 33
    assert type(plain) is DenseWeight
    assert plain.weight.shape == (40, 33)
    assert compiled.shape == plain.shape == (40, 33)
    assert (compiled.num_bytes, plain.num_bytes) == (4 * 48 * 33, 2 * 40 * 33)


def test_packing_takes_the_values_of_parameters():
    _, weight, bias = _case(40, 33)
    packed = pack_weight(torch.nn.Parameter(weight), torch.nn.Parameter(bias))
    assert not linear(torch.ones(2, 33), packed).requires_grad
    assert packed.is_recordable == NUMBA_PRESENT


@needs_numba
def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match="rows of 8, the weight takes rows of 7"):
        linear(torch.ones(2, 8), pack_weight(torch.ones(3, 7)))


def test_a_bias_of_another_length_is_refused():
    with pytest.raises(ValueError, match="3 outputs"):
        pack_weight(torch.ones(3, 7), torch.ones(1))
