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

from peregrine.kernels.linear.epilogue import addends, finish_outputs, merge_split, reset_squares

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
    EXCHANGE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Arguments are those of `linear_kernel`, with x and weight as TMA descriptors.

    A program has ROWS rows, and without GATE it may have TAIL more: tiles have powers of two, and 192 is 128 and 64.
    Where the last rows are fewer they begin earlier: copies of rows past the last one would take far longer.
    Where the inputs are split, SPLIT programs have a part each.
    With EXCHANGE all programs are resident: of two that share a tile one finishes the first rows, the other the tail.
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
    col, own = gl.program_id(0) * COLS, gl.program_id(1) * (ROWS + TAIL)
    row, tail_row = gl.minimum(own, gl.maximum(M - ROWS, 0)), gl.minimum(own + ROWS, gl.maximum(M - TAIL, 0))
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
            tma.async_copy_global_to_shared(tail_desc, [tail_row, depth], ready.index(place), beside, live)
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
            tma.async_copy_global_to_shared(tail_desc, [tail_row, depth], ready.index(there), beside, more)
    total, up = warpgroup_mma_wait(0, deps=(total, up))
    tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    pointers = bias, out, squares, residual, norm, scaled, next_squares, stale_squares, partial, arrived
    if EXCHANGE:
        end = warpgroup_mma_wait(0, deps=(end,))
        if part == 0:
            finish_tile(
                *(total, total, end, row, own, col, tile, part, pointers, M, eps),
                *(N, K, SCALE, BIAS, GATE, ADD, SPLIT, True, num_warps),
            )
        else:
            finish_tile(
                *(end, end, total, tail_row, own + ROWS, col, tile, part, pointers, M, eps),
                *(N, K, SCALE, BIAS, GATE, ADD, SPLIT, True, num_warps),
            )
    else:
        finish_tile(
            *(total, up, total, row, own, col, tile, part, pointers, M, eps),
            *(N, K, SCALE, BIAS, GATE, ADD, SPLIT, False, num_warps),
        )
        if TAIL:
            end = warpgroup_mma_wait(0, deps=(end,))
            # Partial sums of tails come after those of all tiles.
            tile += gl.num_programs(1) * gl.num_programs(0) * (ROWS // TAIL)
            finish_tile(
                *(end, end, end, tail_row, own + ROWS, col, tile, part, pointers, M, eps),
                *(N, K, SCALE, BIAS, GATE, ADD, SPLIT, False, num_warps),
            )


@gluon.jit
def send(sums, place, flag, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Leave sums [COLS, rows] for another program, which is resident, too."""
    gl.store(place + inner_places(sums, layout), gl.convert_layout(sums, layout))
    gl.thread_barrier()
    gl.atomic_add(flag, 1, sem="release")


@gluon.jit
def received(sums, place, flag, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """What another program has left for these sums; resets its flag."""
    while gl.atomic_cas(flag, 1, 0, sem="acquire") == 0:
        pass
    gl.thread_barrier()
    return gl.load(place + inner_places(sums, layout), cache_modifier=".cg")


@gluon.jit
def inner_places(sums, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where the sums [COLS, rows] of a tile lie in its part of the workspace."""
    COLS: gl.constexpr = sums.shape[0]
    cols = gl.arange(0, COLS, gl.SliceLayout(1, layout))
    return gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))[None, :] * COLS + cols[:, None]


@gluon.constexpr_function
def near_layout(cols, num_warps):  # type: ignore[no-untyped-def]
    """Outputs are adjacent in memory, so a thread holds adjacent ones."""
    return gl.BlockedLayout([4, 1], [min(cols // 4, 32), max(128 // cols, 1)], [1, num_warps], [0, 1])


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
    sent,
    row,
    own,
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
    EXCHANGE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """What follows the products of a tile [COLS, ROWS]; of programs that share it, the last one does it.

    With EXCHANGE two programs share it: this one finishes these sums, the other those that it is sent.
    """
    COLS: gl.constexpr = total.shape[0]
    ROWS: gl.constexpr = total.shape[1]
    bias, out, squares, residual, norm, scaled, next_squares, stale_squares, partial, arrived = pointers
    results = bias, out, squares, residual, norm, scaled, next_squares, stale_squares
    near: gl.constexpr = near_layout(COLS, num_warps)
    cols = col + gl.arange(0, COLS, gl.SliceLayout(1, near))
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(0, near))
    if EXCHANGE:
        KEPT: gl.constexpr = ROWS * COLS
        SENT: gl.constexpr = sent.shape[0] * sent.shape[1]
        place, flag = partial + tile * (KEPT + SENT), arrived + 2 * tile
        send(sent, place + (1 - part) * KEPT, flag + part, near)
    before, weights = rows, cols
    if ADD:
        before, weights = addends(rows, cols, results, M, N, ROW_AXIS=1)
    total = gl.convert_layout(total, near)
    up = gl.convert_layout(up, near)
    last = True
    if EXCHANGE:
        total += received(total, place + part * SENT, flag + 1 - part, near)
    elif SPLIT > 1:
        total, last = merge_split(total, partial, arrived, tile, inner_places(total, near), part, SPLIT, ROWS * COLS)
    if last:
        sums = total, up, before, weights
        finish_outputs(*sums, rows, own, cols, results, M, eps, N, K, SCALE, BIAS, GATE, ADD, ROW_AXIS=1)
        if ADD and col == 0:
            reset_squares(stale_squares, rows, M)
