"""The linear kernel for Hopper, in Gluon: the arithmetic of `triton.py`, with weights requested before x is ready.

A program requests its first tiles of weights as soon as it starts, which may be while the previous kernel is still
running: no kernel writes weights. Only then it waits for that kernel and requests x. So memory is kept busy across
launches, where small batches would leave it idle. The tensor memory accelerator (TMA) copies tiles into a ring of
STAGES slots; each step multiplies one tile and requests the one that takes its slot.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.linear.epilogue import finish_outputs, merge_split, reset_squares

NUMBERS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def tiled(matrix: Tensor, rows: int, depth: int) -> TensorDescriptor:
    """The TMA descriptor of a matrix in tiles of rows x depth; rows past the last read as zeros."""
    return TensorDescriptor.from_tensor(matrix, [rows, depth], tile_layout((rows, depth), matrix.dtype))


@functools.cache
def tile_layout(shape: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory; remembered, since Gluon takes longer to find it than to make a descriptor."""
    return gl.NVMMASharedLayout.get_default_for(list(shape), NUMBERS[dtype])


@gluon.jit
def request_weights(w_desc, w_tiles, ready, place, col, depth, live, N: gl.constexpr, GATE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the copies of one step's weights: one tile, or with GATE one of the gates and one of the ups."""
    tma.async_copy_global_to_shared(w_desc, [col, depth], ready.index(place), w_tiles.index(place), live)
    if GATE:
        STAGES: gl.constexpr = w_tiles.shape[0] // 2
        beside = w_tiles.index(STAGES + place)
        tma.async_copy_global_to_shared(w_desc, [N + col, depth], ready.index(place), beside, live)


@gluon.jit(do_not_specialize=["M"])
def hopper_kernel(  # type: ignore[no-untyped-def]
    x_desc,  # [M, K] in tiles of ROWS x DEPTH
    tail_desc,  # the same in tiles of TAIL x DEPTH
    w_desc,  # [N, K] or [2 N, K] in tiles of COLS x DEPTH
    bias,
    out,
    squares,
    residual,
    norm,
    scaled,
    next_squares,
    stale_squares,
    partial,
    arrived,
    M,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    SCALE: gl.constexpr,
    BIAS: gl.constexpr,
    GATE: gl.constexpr,
    ADD: gl.constexpr,
    SPLIT: gl.constexpr,
    ROWS: gl.constexpr,
    TAIL: gl.constexpr,
    COLS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Arguments are those of `linear_kernel`, with x and weight as TMA descriptors.

    A program has ROWS rows, and without GATE it may have TAIL more: tiles have powers of two, and 192 is 128 and 64.
    """
    STEPS: gl.constexpr = K // SPLIT // DEPTH
    BYTES: gl.constexpr = (COLS * (2 if GATE else 1) + ROWS + TAIL) * DEPTH * 2
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES * (2 if GATE else 1), COLS, DEPTH], w_desc.layout)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, DEPTH], x_desc.layout)
    if TAIL:
        tail_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TAIL, DEPTH], tail_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(ready.index(place), count=1)
    fence_async_shared()
    part = gl.program_id(2)
    col, row = gl.program_id(0) * COLS, gl.program_id(1) * (ROWS + TAIL)
    begin = part * (K // SPLIT)
    for place in gl.static_range(STAGES):
        live = place < STEPS
        mbarrier.expect(ready.index(place), BYTES, live)
        request_weights(w_desc, w_tiles, ready, place, col, begin + place * DEPTH, live, N, GATE)
    gdc_launch_dependents()
    gdc_wait()
    for place in gl.static_range(STAGES):
        live = place < STEPS
        depth = begin + place * DEPTH
        tma.async_copy_global_to_shared(x_desc, [row, depth], ready.index(place), x_tiles.index(place), live)
        if TAIL:
            beside = tail_tiles.index(place)
            tma.async_copy_global_to_shared(tail_desc, [row + ROWS, depth], ready.index(place), beside, live)
    product: gl.constexpr = product_layout(ROWS, COLS, num_warps)
    if TAIL:
        end = gl.zeros((COLS, TAIL), gl.float32, product_layout(TAIL, COLS, num_warps))
    total = gl.zeros((COLS, ROWS), gl.float32, product)
    up = gl.zeros((COLS, ROWS), gl.float32, product)
    for step in range(STEPS):
        here = step % STAGES
        mbarrier.wait(ready.index(here), (step // STAGES) & 1)
        x_tile = x_tiles.index(here).permute((1, 0))
        total = warpgroup_mma(w_tiles.index(here), x_tile, total, is_async=True)
        # While this step is multiplied, the slot of the step before it, which is finished now, is filled again.
        if GATE:
            up = warpgroup_mma(w_tiles.index(STAGES + here), x_tile, up, is_async=True)
            total, up = warpgroup_mma_wait(2, deps=(total, up))
        elif TAIL:
            end = warpgroup_mma(w_tiles.index(here), tail_tiles.index(here).permute((1, 0)), end, is_async=True)
            total, end = warpgroup_mma_wait(2, deps=(total, end))
        else:
            total = warpgroup_mma_wait(1, deps=(total,))
        later = step - 1 + STAGES
        depth = begin + later * DEPTH
        more = (step > 0) & (later < STEPS)
        there = later % STAGES
        mbarrier.expect(ready.index(there), BYTES, more)
        request_weights(w_desc, w_tiles, ready, there, col, depth, more, N, GATE)
        tma.async_copy_global_to_shared(x_desc, [row, depth], ready.index(there), x_tiles.index(there), more)
        if TAIL:
            beside = tail_tiles.index(there)
            tma.async_copy_global_to_shared(tail_desc, [row + ROWS, depth], ready.index(there), beside, more)
    total, up = warpgroup_mma_wait(0, deps=(total, up))
    tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    pointers = bias, out, squares, residual, norm, scaled, next_squares, stale_squares, partial, arrived
    finish_tile(total, up, row, col, tile, part, pointers, M, eps, N, K, SCALE, BIAS, GATE, ADD, SPLIT, num_warps)
    if TAIL:
        end = warpgroup_mma_wait(0, deps=(end,))
        # Partial sums of tails come after those of all tiles.
        tile += gl.num_programs(1) * gl.num_programs(0) * (ROWS // TAIL)
        row += ROWS
        finish_tile(end, end, row, col, tile, part, pointers, M, eps, N, K, SCALE, BIAS, GATE, ADD, SPLIT, num_warps)


@gluon.constexpr_function
def product_layout(rows, cols, num_warps):  # type: ignore[no-untyped-def]
    """How a tile's sums lie in registers: a warp has 16 outputs, and where there are more warps, some of the rows."""
    along = min(num_warps, cols // 16)
    instruction = [16, rows * along // num_warps, 16]
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[along, num_warps // along], instr_shape=instruction)


@gluon.jit
def finish_tile(  # type: ignore[no-untyped-def]
    total,
    up,
    row,
    col,
    tile,
    part,
    pointers,
    M,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    SCALE: gl.constexpr,
    BIAS: gl.constexpr,
    GATE: gl.constexpr,
    ADD: gl.constexpr,
    SPLIT: gl.constexpr,
    num_warps: gl.constexpr,
):
    """What follows the products of a tile [COLS, ROWS]; of programs that share it, the last one does it."""
    COLS: gl.constexpr = total.shape[0]
    ROWS: gl.constexpr = total.shape[1]
    bias, out, squares, residual, norm, scaled, next_squares, stale_squares, partial, arrived = pointers
    # Outputs are adjacent in memory, so a thread holds adjacent ones.
    near: gl.constexpr = gl.BlockedLayout(
        [4, 1], [COLS // 4 if COLS < 128 else 32, 128 // COLS if COLS < 128 else 1], [1, num_warps], [0, 1]
    )
    total = gl.convert_layout(total, near)
    up = gl.convert_layout(up, near)
    cols = col + gl.arange(0, COLS, gl.SliceLayout(1, near))
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(0, near))
    last = True
    if SPLIT > 1:
        inner = (rows - row)[None, :] * COLS + (cols - col)[:, None]
        total, last = merge_split(total, partial, arrived, tile, inner, part, SPLIT, ROWS * COLS)
    if last:
        results = bias, out, squares, residual, norm, scaled, next_squares, stale_squares
        finish_outputs(total, up, rows, cols, results, M, eps, N, K, SCALE, BIAS, GATE, ADD, ROW_AXIS=1)
        if ADD and col == 0:
            reset_squares(stale_squares, rows, M)
