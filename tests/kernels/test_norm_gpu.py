"""Norms in the interpreter: equal to the twin in every layout."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peregrine.hardware import triton_interprets
from peregrine.kernels.norm.reference import rms_norm_torch
from peregrine.kernels.runtime.gpu import TRITON_PRESENT

if not (TRITON_PRESENT and triton_interprets()):
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from peregrine.kernels.norm import triton as gpu

EPS = 1e-5
WIDTHS = (1, 40, 64, 100)


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed + size[-1])) * 3


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 1, 5, 17])
def test_rows_are_the_twins(rows: int, width: int) -> None:
    x, weight = draw(rows, width), draw(width, seed=1)
    torch.testing.assert_close(gpu.rms_norm(x, weight, EPS), rms_norm_torch(x, weight, EPS))


def test_half_precision_rounds_before_the_weight() -> None:
    x, weight = draw(17, 100).half(), draw(100, seed=1).half()
    assert torch.equal(gpu.rms_norm(x, weight, EPS), rms_norm_torch(x, weight, EPS))


def test_heads_are_rows() -> None:
    x, weight = draw(5, 3, 40), draw(40, seed=1)
    normed = gpu.rms_norm(x, weight, EPS)
    assert normed.shape == x.shape
    torch.testing.assert_close(normed, rms_norm_torch(x, weight, EPS))


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: torch.cat((x, x), dim=1)[:, : x.shape[1]], id="cut from wider rows"),
        pytest.param(lambda x: x.repeat_interleave(2, dim=0)[::2], id="every second row"),
        pytest.param(lambda x: x.T.contiguous().T, id="transposed"),
    ],
)
def test_views_have_the_bits_of_their_copies(view) -> None:
    x, weight = draw(5, 40), draw(40, seed=1)
    assert torch.equal(gpu.rms_norm(view(x), weight, EPS), gpu.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_a_pair_is_two_norms_side_by_side(rows: int, width: int) -> None:
    embedding, first, second = draw(30, width), draw(width, seed=1), draw(width, seed=2)
    tokens = torch.arange(rows) * 7 % 30
    hidden = draw(rows, 2 * width, seed=3)[:, width:]  # strided rows
    both = gpu.norm_pair(tokens, embedding, first, hidden, second, EPS)
    assert both.shape == (rows, 2 * width)
    embedded = rms_norm_torch(F.embedding(tokens, embedding), first, EPS)
    torch.testing.assert_close(both[:, :width], embedded)
    torch.testing.assert_close(both[:, width:], rms_norm_torch(hidden, second, EPS))
