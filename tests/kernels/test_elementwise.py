"""sigmoid and silu: accurate, and an element has the same bits at every place of every tensor."""

import pytest
import torch
from torch.nn import functional as F

from peregrine.kernels.activation.elementwise import sigmoid, silu

FUNCTIONS = {"sigmoid": (sigmoid, torch.sigmoid), "silu": (silu, F.silu)}
each_function = pytest.mark.parametrize(("function", "library"), FUNCTIONS.values(), ids=FUNCTIONS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def draw(count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)) * 8


@each_function
@each_dtype
def test_an_element_has_the_same_bits_at_every_place(function, library, dtype):
    x = draw(257).to(dtype)
    together = function(x)
    for first in range(257):  # alone, and at the start of a tail of every length
        assert torch.equal(function(x[first : first + 1].clone())[0], together[first])
        assert torch.equal(function(x[first:]), together[first:])


@each_function
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_bits(function, library, threads):
    x = draw(40_003)  # torch splits more than 32,768 elements between threads
    before, alone = torch.get_num_threads(), torch.cat([function(part) for part in x.split(1001)])
    torch.set_num_threads(threads)
    try:
        assert torch.equal(function(x), alone)
    finally:
        torch.set_num_threads(before)


@each_function
def test_agrees_with_float64(function, library):
    x = torch.cat([draw(1000), torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, 1e30, torch.inf])])
    torch.testing.assert_close(function(x).double(), library(x.double()), rtol=5e-7, atol=1e-35)
    assert function(torch.tensor([torch.nan])).isnan().all()


@each_function
def test_gradients_are_finite(function, library):
    x = torch.tensor([-200.0, -1.0, 0.0, 1.0, 200.0], requires_grad=True)
    function(x).sum().backward()
    assert x.grad.isfinite().all()
