"""What follows the product of a linear layer on a GPU: device functions of the Triton kernel and of Hopper's own.

They are plain `triton.jit` functions, which Gluon kernels can call too. The two kernels hold their tiles the other way
round: ROW_AXIS is the axis of a tile along which its rows (tokens) lie, 0 in Triton's and 1 in Hopper's.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.residual.triton import counted_square, fine_square, is_small, root_mean_square, weighted


@dataclass(frozen=True, slots=True)
class Addition:
    """What the kernel reads and writes to add to a residual stream."""

    residual: Tensor  # [M, N]
    norm: Tensor  # [N] weight of the next norm
    scaled: Tensor  # [M, N] result: the sum times the norm's weight
    squares: Tensor  # [M, 2] i64 result: the sum's squares are added to it
    stale_squares: Tensor  # [M, 2] i64 result: zeros

    def pointers(self, rows: slice) -> tuple[Tensor, ...]:
        """The kernel's arguments for some rows."""
        return self.residual[rows], self.norm, self.scaled[rows], self.squares[rows], self.stale_squares[rows]


@triton.jit
def merge_split(total, partial, arrived, tile, inner, part, SPLIT: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(sum, whether this program has it) of the partial sums of SPLIT programs that share a tile of SIZE outputs.

    Each program writes its part; the last one to arrive adds up all of them, in order.
    """
    tl.store(partial + (tile * SPLIT + part) * SIZE + inner, total)
    tl.debug_barrier()
    is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
    tl.debug_barrier()
    if is_last:
        total = tl.load(partial + tile * SPLIT * SIZE + inner, cache_modifier=".cg")
        for other in tl.static_range(1, SPLIT):
            total += tl.load(partial + (tile * SPLIT + other) * SIZE + inner, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return total, is_last


@triton.jit
def gated(total, up):  # type: ignore[no-untyped-def]
    """silu(total) * up, as Hopper's kernels round it."""
    return total / (1.0 + tl.exp(-total)) * up


@triton.jit
def addends(rows, cols, pointers, M, N: tl.constexpr, ROW_AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(residual, weights of the next norm) that `finish_outputs` needs: loaded before programs wait for each other."""
    COL_AXIS: tl.constexpr = 1 - ROW_AXIS
    inside = tl.expand_dims(rows < M, COL_AXIS) & tl.expand_dims(cols < N, ROW_AXIS)
    places = tl.expand_dims(rows.to(tl.int64), COL_AXIS) * N + tl.expand_dims(cols, ROW_AXIS)
    return tl.load(pointers[3] + places, mask=inside, other=0.0), tl.load(pointers[4] + cols % N)


@triton.jit
def finish_outputs(  # type: ignore[no-untyped-def]
    total,
    up,
    residual,
    weights,
    rows,
    own,
    cols,
    pointers,
    M,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    ROW_AXIS: tl.constexpr,
):
    """Scale, bias, gate, residual, and the first half of the next norm; pointers are those of `linear_kernel`.

    residual, weights: `addends`. Rows before `own` are another tile's, too, which adds up their squares.
    """
    bias, out, squares, _, _, scaled, next_squares, _ = pointers
    COL_AXIS: tl.constexpr = 1 - ROW_AXIS
    if SCALE:
        coarse = tl.load(squares + 2 * rows, mask=rows < M, other=0)
        fine = tl.load(squares + 2 * rows + 1, mask=rows < M, other=0)
        scale = tl.expand_dims(1.0 / root_mean_square(coarse, fine, eps, K), COL_AXIS)
        total = total * scale
    if BIAS:
        total += tl.expand_dims(tl.load(bias + cols % N).to(tl.float32), ROW_AXIS)
    if GATE:
        if SCALE:
            up = up * scale
        if BIAS:
            up += tl.expand_dims(tl.load(bias + N + cols % N).to(tl.float32), ROW_AXIS)
        # The Triton kernel and Hopper's round silu differently.
        total = total * tl.sigmoid(total) * up if ROW_AXIS == 0 else gated(total, up)
    inside = tl.expand_dims(rows < M, COL_AXIS) & tl.expand_dims(cols < N, ROW_AXIS)
    places = tl.expand_dims(rows.to(tl.int64), COL_AXIS) * N + tl.expand_dims(cols, ROW_AXIS)
    if ADD:
        total += residual.to(tl.float32)
    result = total.to(out.dtype.element_ty)
    tl.store(out + places, result, mask=inside)
    if ADD:
        value = tl.where(inside, result.to(tl.float32), 0.0)
        prepared = weighted(value, tl.expand_dims(weights.to(tl.float32), ROW_AXIS))
        tl.store(scaled + places, prepared.to(out.dtype.element_ty), mask=inside)
        coarse = tl.sum(counted_square(value), axis=COL_AXIS)
        counts = (rows >= own) & (rows < M)
        tl.atomic_add(next_squares + 2 * rows, coarse, mask=counts, sem="relaxed")
        is_fine = counts & is_small(coarse, N)
        if tl.max(is_fine.to(tl.int32), axis=0) > 0:  # seldom: most tiles of most layers have no such row
            fine = tl.sum(fine_square(value), axis=COL_AXIS)
            tl.atomic_add(next_squares + 2 * rows + 1, fine, mask=is_fine, sem="relaxed")


@triton.jit
def reset_squares(stale_squares, rows, M):  # type: ignore[no-untyped-def]
    """Zeros in the sums of squares of some rows, for the next addition."""
    tl.store(stale_squares + 2 * rows, 0, mask=rows < M)
    tl.store(stale_squares + 2 * rows + 1, 0, mask=rows < M)
