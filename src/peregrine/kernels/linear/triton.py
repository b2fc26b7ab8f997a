"""Linear layers on a GPU, with all that stands around them in a decoder layer done in the same launch.

    y = x @ weight.T + bias                 and, where asked for:
    scale      each row by 1 / rms of the stream that x was prepared from: the second half of a norm
    gate       silu of the first half of the outputs times the second half
    add        to the residual stream, and prepare the stream for its next norm: its values times the norm's weight,
               and its sum of squares as a whole number

Every output is one chain of matrix instructions over the inputs in ascending order (with `split`: some chains, added
in order), whatever the tile. Tiles of any height, width and depth give the same bits, so each number of rows may have
the tile that is fastest for it, and a row's bits do not depend on its company. Sums of squares are whole numbers of
2**-24: it does not matter who adds first.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.linear import tiles as linear_tiles
from peregrine.kernels.linear.tiles import HEIGHTS, SPLIT_COLS, SPLIT_DEPTH, SPLIT_PROGRAMS, Room, Tile, pick_tile
from peregrine.kernels.runtime.gpu import dense_rows, is_hopper, launch, shared_bytes

MAX_ROWS = 4096  # of one launch; longer inputs are cut, and so is the memory that partial sums take
SQUARE_UNIT, MAX_SQUARE = tl.constexpr(linear_tiles.SQUARE_UNIT), tl.constexpr(linear_tiles.MAX_SQUARE)


@triton.jit(do_not_specialize=["M"])
def linear_kernel(  # type: ignore[no-untyped-def]
    x,  # [M, K]
    weight,  # [N, K], or [2 N, K] with GATE
    bias,  # [N] or [2 N]
    out,  # [M, N]
    squares,  # [M] i64 of the stream that x was prepared from
    residual,  # [M, N]
    norm,  # [N] weight of the norm that comes next
    scaled,  # [M, N] out * norm
    next_squares,  # [M] i64, zero before
    stale_squares,  # [M] i64 nobody reads any more: made zero, to be next_squares of the next addition
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
        total = tl.dot(weights, values, total, input_precision="ieee")
        if GATE:
            weights = tl.load(w_places + N * K + start, eviction_policy="evict_first")
            up = tl.dot(weights, values, up, input_precision="ieee")
    total, up = tl.trans(total), tl.trans(up)  # [ROWS, COLS]
    last = True
    if SPLIT > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        inner = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
        tl.store(partial + (tile * SPLIT + part) * ROWS * COLS + inner, total)
        tl.debug_barrier()
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
        tl.debug_barrier()
        if last:
            total = tl.load(partial + tile * SPLIT * ROWS * COLS + inner, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                total += tl.load(partial + (tile * SPLIT + other) * ROWS * COLS + inner, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if last:
        if SCALE:
            mean = tl.load(squares + rows, mask=rows < M, other=0).to(tl.float32) / (K * SQUARE_UNIT)
            scale = (1.0 / tl.sqrt_rn(mean + eps))[:, None]
            total = total * scale
        if BIAS:
            total += tl.load(bias + cols % N).to(tl.float32)[None, :]
        if GATE:
            if SCALE:
                up = up * scale
            if BIAS:
                up += tl.load(bias + N + cols % N).to(tl.float32)[None, :]
            total = total * tl.sigmoid(total) * up
        inside = (rows < M)[:, None] & (cols < N)[None, :]
        places = rows.to(tl.int64)[:, None] * N + cols[None, :]
        if ADD:
            total += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
        result = total.to(out.dtype.element_ty)
        tl.store(out + places, result, mask=inside)
        if ADD:
            value = tl.where(inside, result.to(tl.float32), 0.0)
            norm_weights = tl.load(norm + cols % N).to(tl.float32)[None, :]
            square = value * value
            ready = tl.where(square <= MAX_SQUARE, value * norm_weights, float("nan"))
            tl.store(scaled + places, ready.to(out.dtype.element_ty), mask=inside)
            square = tl.where(square <= MAX_SQUARE, square, 0.0) * SQUARE_UNIT
            tl.atomic_add(next_squares + rows, tl.sum(square.to(tl.int64), axis=1), mask=rows < M, sem="relaxed")
            if tl.program_id(0) == 0:
                tl.store(stale_squares + rows, tl.zeros((ROWS,), tl.int64), mask=rows < M)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias: [M, K], [N, K] -> [M, N]."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    run(x, weight, bias, out)
    return out


def linear_scaled(x: Tensor, squares: Tensor, eps: float, weight: Tensor, bias: Tensor | None, gate: bool) -> Tensor:
    """The linear of a normed stream: x [M, K] its values times the norm's weight, squares [M] i64.

    With `gate`: silu of the first half of the outputs times the second half. -> [M, N] or [M, N / 2]
    """
    out = x.new_empty(x.shape[0], weight.shape[0] // (2 if gate else 1))
    run(x, weight, bias, out, scale=(squares, eps), gate=gate)
    return out


def linear_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    squares: Tensor,
    stale_squares: Tensor,
) -> tuple[Tensor, Tensor]:
    """(sum, sum * norm) of the linear and the residual [M, N]; the sum's squares [M] are added to `squares`."""
    residual = residual.contiguous()
    out, scaled = torch.empty_like(residual), torch.empty_like(residual)
    run(x, weight, bias, out, add=(residual, norm, scaled, squares, stale_squares))
    return out, scaled


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    scale: tuple[Tensor, float] | None = None,
    gate: bool = False,
    add: tuple[Tensor, ...] | None = None,
    tile: Tile | None = None,
) -> None:
    """One launch for every MAX_ROWS rows. `scale` is (squares, eps); no tile: the one the tables say."""
    x = dense_rows(x)
    num_rows, num_outputs = out.shape
    on_hopper = hopper_takes(weight)
    if tile is None:
        room = Room(shared_bytes(x.device), x.element_size())
        tile = pick_tile(min(num_rows, MAX_ROWS), num_outputs, x.shape[1], gate, on_hopper, room)
    squares, eps = scale or (None, 0.0)
    partial, arrived = _workspace(x.device)
    constants: dict[str, Any] = {
        "N": num_outputs,
        "K": x.shape[1],
        "SCALE": squares is not None,
        "BIAS": bias is not None,
        "GATE": gate,
        "ADD": add is not None,
        "SPLIT": tile.split,
        "ROWS": tile.rows,
        "COLS": tile.cols,
        "DEPTH": tile.depth,
        "num_warps": tile.warps,
    }
    for first in range(0, num_rows, MAX_ROWS):
        rows = slice(first, min(first + MAX_ROWS, num_rows))
        count = rows.stop - first
        grid = triton.cdiv(num_outputs, tile.cols), triton.cdiv(count, tile.rows), tile.split
        added = tuple(t if t.ndim == 1 and t is add[1] else t[rows] for t in add) if add else (out,) * 5
        beside = (
            weight if bias is None else bias,
            out[rows],
            out if squares is None else squares[rows],
            *added,
            partial,
            arrived,
            count,
        )
        if on_hopper:
            # Imports Gluon, which other devices have no use for.
            from peregrine.kernels.linear.hopper import hopper_kernel, tiled

            tiles = tiled(x[rows], tile.rows, tile.depth), tiled(weight, tile.cols, tile.depth)
            launch(hopper_kernel, grid, *tiles, *beside, eps, **constants, STAGES=tile.stages, pdl=True)
        else:
            sizes = x.stride(0), eps
            launch(linear_kernel, grid, x[rows], weight, *beside, *sizes, **constants, num_stages=tile.stages)


def hopper_takes(weight: Tensor) -> bool:
    """Whether a weight [N, K] is multiplied by Hopper's own kernel; decided by the weight alone, never by the rows."""
    half = weight.dtype in (torch.bfloat16, torch.float16)
    return half and is_hopper(weight) and weight.shape[1] % SPLIT_DEPTH == 0


@functools.cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Where programs that share a tile leave their sums, and how many have; one place for all launches."""
    partial = torch.empty(SPLIT_PROGRAMS * SPLIT_COLS * MAX_ROWS, dtype=torch.float32, device=device)
    most_tiles = SPLIT_PROGRAMS // 2 * MAX_ROWS // min(HEIGHTS)
    return partial, torch.zeros(most_tiles, dtype=torch.int32, device=device)
