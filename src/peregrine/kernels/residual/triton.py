"""The split norm on a GPU: device functions for its two halves, and kernels where a residual stream starts and ends."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.residual import reference
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter

SQUARE_UNIT, MAX_SQUARE = tl.constexpr(reference.SQUARE_UNIT), tl.constexpr(reference.MAX_SQUARE)
FINE_UNIT = tl.constexpr(reference.FINE_UNIT)
SMALL_UNITS = tl.constexpr(int(reference.SMALL_MEAN * reference.SQUARE_UNIT))  # coarse units of a small row, per value


@triton.jit
def weighted(value, weight):  # type: ignore[no-untyped-def]
    """First half of a norm: the value times the norm's weight; NaN if its square cannot be counted. f32"""
    return value * tl.where(value * value <= MAX_SQUARE, weight, float("nan"))


@triton.jit
def counted_square(value):  # type: ignore[no-untyped-def]
    """The square of a value f32 in coarse units, to be added up. i64"""
    square = value * value
    return (tl.where(square <= MAX_SQUARE, square, 0.0) * SQUARE_UNIT).to(tl.int64)


@triton.jit
def fine_square(value):  # type: ignore[no-untyped-def]
    """The square of a value f32 in fine units, to be added up; 0 if it is too large for a small row. i64"""
    square = value * value
    return (tl.where(square < 1.0, square, 0.0) * FINE_UNIT).to(tl.int64)


@triton.jit
def is_small(coarse, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether a row of H values may be so small that its fine sum is needed, from its coarse sum or a part of it."""
    return coarse < H * SMALL_UNITS


@triton.jit
def root_mean_square(coarse, fine, eps, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """Second half of a norm: what rows of H values are divided by, from their sums of squares.

    mean + eps is one fused multiply-add by name. Left to the compiler, whether it fuses depends on the code around it,
    and a row's bits would depend on the kernel that reads it (for an H that is no power of two).
    """
    mean = tl.fma(coarse.to(tl.float32), 1.0 / (H * SQUARE_UNIT), eps)
    fine_mean = tl.fma(fine.to(tl.float32), 1.0 / (H * FINE_UNIT), eps)
    return tl.sqrt_rn(tl.where(is_small(coarse, H), fine_mean, mean))


@triton.jit
def embed_kernel(  # type: ignore[no-untyped-def]
    tokens, embedding, norm, values, scaled, squares, spare, H: tl.constexpr, BLOCK: tl.constexpr
):
    enter()
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    places = tl.arange(0, BLOCK)
    inside = places < H
    value = tl.load(embedding + token * H + places, mask=inside, other=0.0)
    weights = tl.load(norm + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(values + row * H + places, value, mask=inside)
    wide = value.to(tl.float32)
    tl.store(scaled + row * H + places, weighted(wide, weights).to(scaled.dtype.element_ty), mask=inside)
    tl.store(squares + 2 * row, tl.sum(counted_square(wide), axis=0))
    tl.store(squares + 2 * row + 1, tl.sum(fine_square(wide), axis=0))
    tl.store(spare + 2 * row, tl.zeros((), tl.int64))
    tl.store(spare + 2 * row + 1, tl.zeros((), tl.int64))


@triton.jit
def finish_norm_kernel(  # type: ignore[no-untyped-def]
    scaled, squares, out, eps, H: tl.constexpr, BLOCK: tl.constexpr
):
    enter()
    row = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    inside = places < H
    divisor = root_mean_square(tl.load(squares + 2 * row), tl.load(squares + 2 * row + 1), eps, H)
    value = tl.load(scaled + row * H + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * H + places, (value / divisor).to(out.dtype.element_ty), mask=inside)


def embed(tokens: Tensor, embedding: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(values, values * norm, squares, zeros) of tokens [N] in embedding [V, H]."""
    tokens = tokens.contiguous()  # the first nodes of wider windows lie apart
    num_rows, size = tokens.shape[0], embedding.shape[1]
    values, scaled = embedding.new_empty(num_rows, size), embedding.new_empty(num_rows, size)
    squares, spare = torch.empty(2, num_rows, 2, dtype=torch.int64, device=tokens.device)
    if num_rows:
        pointers = tokens, embedding, norm, values, scaled, squares, spare
        launch(embed_kernel, (num_rows,), *pointers, H=size, BLOCK=triton.next_power_of_2(size), pdl=True)
    return values, scaled, squares, spare


def finish_norm(scaled: Tensor, squares: Tensor, eps: float) -> Tensor:
    """Values times a norm's weight [N, H], divided by their rows' root mean squares."""
    out, (num_rows, size) = torch.empty_like(scaled), scaled.shape
    if num_rows:
        block = triton.next_power_of_2(size)
        launch(finish_norm_kernel, (num_rows,), scaled, squares, out, eps, H=size, BLOCK=block, pdl=True)
    return out
