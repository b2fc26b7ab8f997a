"""Linear layers on a GPU, with everything around them in a decoder layer done in the same launch.

    y = x @ weight.T + bias                 and, if asked for:
    scale      divide each row by its root mean square: the second half of a split norm
    gate       silu of the first half of the outputs times the second half
    add        to the residual stream, and do the first half of its next norm

Every output is one chain of matrix instructions over the inputs in ascending order (with `split`: a few chains, added
in order). Tiles of every height, width and depth give the same bits, so each number of rows has the tile that is
fastest for it, and a row's bits do not depend on the batch.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.linear.cuda_linear import run_cuda
from peregrine.kernels.linear.cuda_tiles import ClusteredPlan, CudaPlan, FittedPlan, hopper_plan
from peregrine.kernels.linear.epilogue import Addition, addends, finish_outputs, merge_split, reset_squares
from peregrine.kernels.linear.reference import DenseWeight
from peregrine.kernels.linear.tiles import (
    MAX_ROWS,
    SPLIT_DEPTH,
    LargePlan,
    Room,
    Tile,
    pick_split,
    pick_tile,
    workspace_sizes,
)
from peregrine.kernels.residual import Norm, Residual, add_to_residual, splits_norm
from peregrine.kernels.runtime.fence import fence_copies
from peregrine.kernels.runtime.gpu import dense_rows, is_hopper, launch, multiprocessors, shared_bytes
from peregrine.kernels.runtime.pdl import enter


@dataclass(frozen=True, slots=True)
class TritonWeight(DenseWeight):
    """Plain tensors on a GPU, read by the kernels of this folder."""

    whole_outputs: int | None = None  # of the weight whose rows these are a part of: the split follows from them

    def linear(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias: [N, I] -> [N, O]; where a gradient is wanted, the twin."""
        return DenseWeight.linear(self, x) if x.requires_grad else self._read(x, None)

    def linear_normed(self, residual: Residual) -> Tensor:
        """The linear of the normed residual: -> [N, O]."""
        return self._read(residual.normed, residual.scale)

    def gated(self, residual: Residual) -> Tensor:
        """silu(first half) * second half of the linear of the normed residual: -> [N, O / 2]."""
        return self._read(residual.normed, residual.scale, gate=True)

    def add(self, x: Tensor, residual: Residual, norm: Norm | None) -> Residual:
        """The residual plus the linear of x [N, I], prepared for the norm that comes next."""
        if not splits_norm(norm, residual.values):
            return add_to_residual(self.linear(x), residual, norm)
        before = residual.values.contiguous()
        values, scaled = torch.empty_like(before), torch.empty_like(before)
        squares, stale = residual.take_sums()
        addition = Addition(before, norm.weight, scaled, squares, stale)
        run(x, self, values, add=addition, split=self._split(gate=False))
        return Residual(values, scaled, squares, stale, norm.eps)

    def _read(self, x: Tensor, scale: tuple[Tensor, float] | None, gate: bool = False) -> Tensor:
        out = x.new_empty(x.shape[0], self.weight.shape[0] // (2 if gate else 1))
        run(x, self, out, scale=scale, gate=gate, split=self._split(gate))
        return out

    def _split(self, gate: bool) -> int:
        return pick_split(self.whole_outputs or len(self.weight), self.weight.shape[1], gate)


def run(
    x: Tensor,
    weight: DenseWeight,
    out: Tensor,
    *,
    scale: tuple[Tensor, float] | None = None,
    gate: bool = False,
    add: Addition | None = None,
    tile: Tile | None = None,
    plan: LargePlan | CudaPlan | None = None,
    split: int | None = None,
) -> None:
    """One launch for every MAX_ROWS rows. `scale` is (squares, eps); without a tile, the one that the tables say.

    Without a tile more rows may go to Hopper's kernels for them, in one launch, by this plan or the best. `split`: see
    `pick_tile`.
    """
    x, on_hopper = dense_rows(x), hopper_takes(weight.weight)
    if plan is None and tile is None and on_hopper:
        num_sms = multiprocessors(x.device, 0)
        plan = hopper_plan(len(x), out.shape[1], x.shape[1], gate, add is not None, num_sms, split)
    if isinstance(plan, FittedPlan | ClusteredPlan):
        run_cuda(x, weight, out, plan, scale, gate, add.pointers(slice(None)) if add else None)
    elif plan is not None:
        # Imports Gluon, which other devices do not need.
        from peregrine.kernels.linear.hopper_launch import run_large

        run_large(x, weight, out, scale, gate, add, plan, _workspace(x.device))
    else:
        _run_tiles(x, weight, out, scale, gate, add, tile, split)


def _run_tiles(
    x: Tensor,
    weight: DenseWeight,
    out: Tensor,
    scale: tuple[Tensor, float] | None,
    gate: bool,
    add: Addition | None,
    tile: Tile | None,
    split: int | None,
) -> None:
    """By the tiles of the tables, or by this one."""
    (num_rows, num_outputs), num_inputs = out.shape, x.shape[1]
    matrix, bias, on_hopper = weight.weight, weight.bias, hopper_takes(weight.weight)
    room = Room(shared_bytes(x.device), x.element_size())
    tile = tile or pick_tile(min(num_rows, MAX_ROWS), num_outputs, num_inputs, gate, on_hopper, room, split)
    squares, eps = scale or (None, 0.0)
    constants: dict[str, Any] = {
        "N": num_outputs,
        "K": num_inputs,
        "SCALE": squares is not None,
        "BIAS": bias is not None,
        "GATE": gate,
        "ADD": add is not None,
        **tile.constants(),
    }
    for first in range(0, num_rows, MAX_ROWS):
        rows = slice(first, min(first + MAX_ROWS, num_rows))
        count = rows.stop - first
        grid = triton.cdiv(num_outputs, tile.cols), triton.cdiv(count, tile.rows + tile.tail), tile.split
        pointers = (
            matrix if bias is None else bias,
            out[rows],
            out if squares is None else squares[rows],
            *(add.pointers(rows) if add else (out,) * 5),
            *_workspace(x.device),
        )
        if on_hopper:
            # Imports Gluon, which other devices do not need.
            from peregrine.kernels.linear.hopper import hopper_kernel, tiled

            parts = (x[rows], tile.rows), (x[rows], tile.tail or tile.rows), (matrix, tile.cols)
            tiles = [tiled(*part, tile.depth) for part in parts]
            more = {"TAIL": tile.tail, "STAGES": tile.stages}
            # Programs that wait for each other must all run at once.
            more["EXCHANGE"] = tile.in_halves and math.prod(grid) <= multiprocessors(x.device, 0)
            launch(hopper_kernel, grid, *tiles, *pointers, count, eps, **constants, **more, pdl=True)
        else:
            sizes = count, x.stride(0), eps
            launch(linear_kernel, grid, x[rows], matrix, *pointers, *sizes, **constants, num_stages=tile.stages)


def hopper_takes(weight: Tensor) -> bool:
    """Whether Hopper's own kernel multiplies by a weight [N, K]; follows from the weight alone, never from the rows."""
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    return is_half and is_hopper(weight) and weight.shape[1] % SPLIT_DEPTH == 0


@functools.cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial sums and counters of programs that share a tile; one buffer per device, for all launches."""
    numbers, counters = workspace_sizes(MAX_ROWS)
    partial = torch.empty(numbers, dtype=torch.float32, device=device)
    return partial, torch.zeros(counters, dtype=torch.int32, device=device)


@triton.jit
def prefetched_product(w_places, x_places, live, INPUTS: tl.constexpr, DEPTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """weight @ x of one tile [COLS, ROWS]; the first step's weights are loaded before the kernel waits."""
    weights = tl.load(w_places)
    enter()
    values = tl.load(x_places, mask=live[None, :], other=0.0)
    total = tl.dot(weights, values, input_precision="ieee")
    for start in range(DEPTH, INPUTS, DEPTH):
        values, weights = tl.load(x_places + start, mask=live[None, :], other=0.0), tl.load(w_places + start)
        fence_copies(start)
        total = tl.dot(weights, values, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["M"])
def linear_kernel(  # type: ignore[no-untyped-def]
    x,  # [M, K]
    weight,  # [N, K], or [2 N, K] with GATE
    bias,  # [N] or [2 N]
    out,  # [M, N]
    squares,  # [M, 2] i64 of the residual that x was prepared from, with SCALE
    residual,  # [M, N], and the five below: with ADD
    norm,  # [N] weight of the norm that comes next
    scaled,  # [M, N] out * norm
    next_squares,  # [M, 2] i64, zero before
    stale_squares,  # [M, 2] i64 not read any more: set to zero, for the next addition
    partial,  # [tiles, SPLIT, ROWS * COLS] f32
    arrived,  # [tiles] i32, all zero before and after
    M,
    x_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    ADD: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    part = tl.program_id(2)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    depth = part * (K // SPLIT) + tl.arange(0, DEPTH)
    # Outputs past the last are computed from others and not stored. The weight is the left matrix of the product:
    # matrix instructions are 64 rows high, and there are always 64 outputs, but seldom 64 tokens.
    w_places = weight + (cols % N).to(tl.int64)[:, None] * K + depth[None, :]
    x_places = x + rows.to(tl.int64)[None, :] * x_stride + depth[:, None]
    live = (rows < M)[None, :]
    total = tl.zeros((COLS, ROWS), tl.float32)
    up = tl.zeros((COLS, ROWS), tl.float32)
    for start in range(0, K // SPLIT, DEPTH):
        values = tl.load(x_places + start, mask=live, other=0.0)
        weights = tl.load(w_places + start, eviction_policy="evict_first")
        ups = tl.load(w_places + N * K + start, eviction_policy="evict_first") if GATE else weights
        fence_copies(start)
        total = tl.dot(weights, values, total, input_precision="ieee")
        if GATE:
            up = tl.dot(ups, values, up, input_precision="ieee")
    total, up = tl.trans(total), tl.trans(up)  # [ROWS, COLS]
    pointers = bias, out, squares, residual, norm, scaled, next_squares, stale_squares
    before, weights = rows, cols
    if ADD:
        before, weights = addends(rows, cols, pointers, M, N, ROW_AXIS=0)
    last = True
    if SPLIT > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        inner = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
        total, last = merge_split(total, partial, arrived, tile, inner, part, SPLIT, ROWS * COLS)
    if last:
        sums, own = (total, up, before, weights), tl.program_id(1) * ROWS
        finish_outputs(*sums, rows, own, cols, pointers, M, eps, N, K, SCALE, BIAS, GATE, ADD, ROW_AXIS=0)
        if ADD and tl.program_id(0) == 0:
            reset_squares(stale_squares, rows, M)
