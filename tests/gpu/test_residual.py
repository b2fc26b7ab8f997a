"""The second half of a split norm, bit for bit: one fused multiply-add, one square root."""

from fractions import Fraction

import numpy
import pytest
import torch
import triton
import triton.language as tl

from peregrine.kernels.residual.reference import FINE_UNIT, SMALL_MEAN, SQUARE_UNIT
from peregrine.kernels.residual.triton import root_mean_square

EPS = float(numpy.float32(1e-5))


@triton.jit
def _divisors(squares, out, eps, H: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = tl.arange(0, ROWS)
    coarse, fine = tl.load(squares + 2 * rows), tl.load(squares + 2 * rows + 1)
    tl.store(out + rows, root_mean_square(coarse, fine, eps, H))


def _nearest_float32(value: Fraction) -> numpy.float32:
    """The float32 nearest to an exact value. Going through float64 could round twice."""
    guess = numpy.float32(float(value))
    near = (guess, numpy.nextafter(guess, numpy.float32(0)), numpy.nextafter(guess, numpy.float32(numpy.inf)))
    return min(near, key=lambda candidate: abs(Fraction(float(candidate)) - value))


@pytest.mark.parametrize("size", [320, 576, 2048, 3584, 4096])
def test_a_divisor_is_one_multiply_add_and_one_root(size: int) -> None:
    """Sizes that are no power of two show whether the multiplication and the addition of eps are rounded apart."""
    means = torch.logspace(-9, 3, 256, dtype=torch.float64) * (1 + torch.linspace(0, 1, 256, dtype=torch.float64))
    sums = torch.stack([(means * size * unit).to(torch.int64) for unit in (SQUARE_UNIT, FINE_UNIT)], dim=1)
    sums[:, 1] *= means < 2 * SMALL_MEAN  # larger rows have no fine sums
    out = torch.empty(256, device="cuda")
    _divisors[(1,)](sums.cuda(), out, EPS, H=size, ROWS=256)
    for (coarse, fine), divisor in zip(sums.tolist(), out.cpu().numpy(), strict=True):
        is_small = coarse < size * SMALL_MEAN * SQUARE_UNIT
        units, unit = (fine, FINE_UNIT) if is_small else (coarse, SQUARE_UNIT)
        factor = Fraction(float(numpy.float32(1 / (size * unit))))
        mean = _nearest_float32(Fraction(float(numpy.float32(units))) * factor + Fraction(EPS))
        assert divisor == numpy.sqrt(mean)
