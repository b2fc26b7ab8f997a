"""The last step of a mixture of experts on a GPU: a row's expert outputs, the residual, the next norm's first half."""

import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.residual.triton import counted_square, fine_square, is_small, weighted
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import release, wait

COMBINED = 512  # columns of a program


def combine(
    outputs: Tensor,
    residual: Tensor,
    norm: Tensor | None,
    made: tuple[Tensor, ...],
    places: Tensor | None = None,
    counters: Tensor | None = None,
) -> None:
    """Add up the expert outputs of each row, [N * choices, H] or at `places` [N * choices], and the residual [N, H].

    Into `made`: (sum, sum * norm, squares, squares to set to zero); without a norm only the sum is written. `counters`
    are set to zero.
    """
    num_rows, size = residual.shape
    pointers = outputs, places, residual, residual if norm is None else norm, *made, counters
    choices = (len(outputs) if places is None else len(places)) // num_rows
    sizes = {"H": size, "CHOICES": choices, "NORM": norm is not None, "BLOCK": COMBINED}
    sizes["COUNTERS"] = 0 if counters is None else len(counters)
    launch(combine_kernel, (triton.cdiv(size, COMBINED), num_rows), *pointers, **sizes, num_warps=4, pdl=True)


@triton.jit
def place_of(places, pair):  # type: ignore[no-untyped-def]
    """Where a pair's output lies."""
    return pair if places is None else tl.load(places + pair).to(tl.int64)


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    outputs,  # [N * CHOICES, H], or more, of pairs at `places`
    places,  # [N * CHOICES] i32, or None
    residual,  # [N, H]
    norm,  # [H]
    out,  # [N, H]
    scaled,  # [N, H]
    next_squares,  # [N, 2] i64
    stale_squares,  # [N, 2] i64
    counters,  # [COUNTERS] i32, or None
    H: tl.constexpr,
    CHOICES: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTERS: tl.constexpr,
):
    """Grid (blocks of columns, rows): expert outputs in order, the residual, the first half of the next norm."""
    release()
    row = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < H
    # Nothing here is written by the previous kernel (down), which has waited for everything before it.
    before = tl.load(residual + row * H + cols, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        norms = tl.load(norm + cols, mask=inside, other=0.0).to(tl.float32)
    wait()
    if counters is not None and (tl.program_id(0) == 0) & (row == 0):
        tl.store(counters + tl.arange(0, COUNTERS), tl.zeros((COUNTERS,), tl.int32))
    total = tl.load(outputs + place_of(places, row * CHOICES) * H + cols, mask=inside, other=0.0).to(tl.float32)
    for choice in tl.static_range(1, CHOICES):
        place = place_of(places, row * CHOICES + choice)
        total += tl.load(outputs + place * H + cols, mask=inside, other=0.0).to(tl.float32)
    total += before
    result = total.to(out.dtype.element_ty)
    tl.store(out + row * H + cols, result, mask=inside)
    if NORM:
        value = result.to(tl.float32)
        tl.store(scaled + row * H + cols, weighted(value, norms).to(out.dtype.element_ty), mask=inside)
        coarse = tl.sum(counted_square(value))
        tl.atomic_add(next_squares + 2 * row, coarse, sem="relaxed")
        if is_small(coarse, H):
            tl.atomic_add(next_squares + 2 * row + 1, tl.sum(fine_square(value)), sem="relaxed")
        if tl.program_id(0) == 0:
            tl.store(stale_squares + 2 * row, tl.zeros((), tl.int64))
            tl.store(stale_squares + 2 * row + 1, tl.zeros((), tl.int64))
