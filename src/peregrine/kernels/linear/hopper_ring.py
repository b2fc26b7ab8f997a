"""How Hopper's kernels for many rows copy and multiply, in Gluon: tiles, the ring they are copied into, and products.

There are as many programs as multiprocessors, and each takes tile after tile: some tokens by COLS rows of the weight.
One warp of a program copies steps of DEPTH inputs by TMA into a ring of places. Two or three groups of four warps
multiply them, each for HEIGHT tokens. Three groups read a weight once for 192 tokens; they have registers for no
residual, and places for three steps only. NARROW tiles have three quarters of the columns, where these fill the device
and whole tiles do not.

With GATE a tile's rows are 8 gates, 8 ups, 8 gates and so on, copied by a descriptor of four dimensions: so a thread
has the gate and the up of an output.
"""

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
from triton.language.extra.cuda import gdc_wait

from peregrine.kernels.linear import tiles
from peregrine.kernels.linear.hopper import tile_layout, tiled
from peregrine.kernels.runtime.layouts import product_layout

HEIGHT = gl.constexpr(tiles.LARGE_HEIGHT)
COLS = gl.constexpr(tiles.LARGE_COLS)
DEPTH = gl.constexpr(tiles.LARGE_DEPTH)
MANY_COL_TILES = gl.constexpr(64)  # of a weight that is far larger than L2: it is read half as often
CHUNK = gl.constexpr(64)  # outputs that are finished at a time


@gluon.jit
def place_of(tile, M, COL_TILES: gl.constexpr, GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """(first row, column tile) of a tile. Some tiles of rows share a tile of the weight while it is in L2."""
    ROWS: gl.constexpr = GROUPS * HEIGHT
    TOGETHER: gl.constexpr = 16 if COL_TILES > MANY_COL_TILES else 8
    block, inside = tile // (TOGETHER * COL_TILES), tile % (TOGETHER * COL_TILES)
    height = gl.minimum((M + ROWS - 1) // ROWS - block * TOGETHER, TOGETHER)
    return (block * TOGETHER + inside % height) * ROWS, inside // height


@gluon.jit
def rows_of(row, WHICH: gl.constexpr, M):  # type: ignore[no-untyped-def]
    """(first row that group WHICH of warps multiplies, first of these that no other group has) in the tile at `row`.

    The last rows begin so early that they are whole: copies of rows past the last one would take far longer.
    """
    own = row + WHICH * HEIGHT
    return gl.minimum(own, M - HEIGHT), own


@gluon.jit
def work_of(  # type: ignore[no-untyped-def]
    local, M, COL_TILES: gl.constexpr, SPLIT: gl.constexpr, PAIRS: gl.constexpr, GROUPS: gl.constexpr
):
    """(tile, first row, column tile, part) of a program's n-th piece of work."""
    if PAIRS:
        item = gl.program_id(0) + local * gl.num_programs(0)
        tile, part = item // SPLIT, item % SPLIT
    else:
        tile, part = gl.program_id(0) + local // SPLIT * gl.num_programs(0), local % SPLIT
    row, col = place_of(tile, M, COL_TILES, GROUPS)
    return tile, row, col, part


@gluon.jit
def new_ring(x_desc, w_desc, GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """(inputs of each group, weights in tiles, in halves and in quarters of them, ready, free, lead): places, barriers.

    All groups of multiplying warps free a place; the first lets the others start through `lead`.
    """
    STAGES: gl.constexpr = 4 if GROUPS == 2 else 3  # as many as fit
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLS // 2, DEPTH], w_desc.dtype)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [GROUPS * STAGES, HEIGHT, DEPTH], x_desc.layout)
    w_halves = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, COLS // 2, DEPTH], w_layout)
    w_tiles = w_halves._reinterpret(w_desc.dtype, [STAGES, COLS, DEPTH], w_layout)
    w_quarters = w_halves._reinterpret(w_desc.dtype, [4 * STAGES, COLS // 4, DEPTH], w_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(ready.index(place), count=1)
        mbarrier.init(free.index(place), count=GROUPS)
    mbarrier.init(lead, count=1)
    fence_async_shared()
    return x_tiles, w_tiles, w_halves, w_quarters, ready, free, lead


@gluon.jit
def request_inputs(x_desc, x_tiles, ready, place, row, depth, M):  # type: ignore[no-untyped-def]
    """Start the copies of one step's inputs, those of each group."""
    GROUPS: gl.constexpr = x_tiles.shape[0] // ready.shape[0]
    for which in gl.static_range(GROUPS):
        first, _ = rows_of(row, which, M)
        x_tile = x_tiles.index(GROUPS * place + which)
        tma.async_copy_global_to_shared(x_desc, [first, depth], ready.index(place), x_tile)


@gluon.jit
def request_weights(  # type: ignore[no-untyped-def]
    w_desc, w_halves, ready, slot, first, half, depth, live, GATE: gl.constexpr
):
    """Start the copy of one step's weights for half of a tile's columns; `first` is where column 0 lies in w_desc."""
    w_half = w_halves.index(slot)
    barrier = ready.index(slot // 2)
    if GATE:
        w_half = w_half._reinterpret(w_desc.dtype, w_desc.block_shape, w_desc.layout)
        tma.async_copy_global_to_shared(w_desc, [first + half * (COLS // 32), 0, 0, depth], barrier, w_half, live)
    else:
        tma.async_copy_global_to_shared(w_desc, [first + half * (COLS // 2), depth], barrier, w_half, live)


@gluon.jit
def request_tile(w_desc, ring, place, col, depth, live, GATE: gl.constexpr, NARROW: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the copies of one step's weights for a tile's columns: of its two halves, or of three quarters."""
    _, _, w_halves, w_quarters, ready, _, _ = ring
    if NARROW:
        for quarter in gl.static_range(3):
            first = (3 * col + quarter) * (COLS // 4)
            slot = w_quarters.index(4 * place + quarter)
            tma.async_copy_global_to_shared(w_desc, [first, depth], ready.index(place), slot, live)
    else:
        request_weights(w_desc, w_halves, ready, 2 * place, 0, 2 * col, depth, live, GATE)
        request_weights(w_desc, w_halves, ready, 2 * place + 1, 0, 2 * col + 1, depth, live, GATE)


@gluon.jit
def copy_tiles(  # type: ignore[no-untyped-def]
    matrices,
    work,
    ring,
    STEPS: gl.constexpr,
    SPLIT: gl.constexpr,
    COL_TILES: gl.constexpr,
    PAIRS: gl.constexpr,
    GATE: gl.constexpr,
    ADD: gl.constexpr,
    NARROW: gl.constexpr,
):
    """The copying warp. The first weights are requested while the previous kernel is still running."""
    count, half_tile, M = work
    x_desc, w_desc, residual_desc = matrices
    x_tiles, w_tiles, w_halves, _, ready, free, _ = ring
    STAGES: gl.constexpr = ready.shape[0]
    GROUPS: gl.constexpr = x_tiles.shape[0] // STAGES
    BYTES: gl.constexpr = (GROUPS * HEIGHT + (COLS * 3 // 4 if NARROW else COLS)) * DEPTH * 2
    _, _, first_col, first_part = work_of(0, M, COL_TILES, SPLIT, PAIRS, GROUPS)
    has_tiles = count > 0
    for early in gl.static_range(STAGES):
        mbarrier.expect(ready.index(early), BYTES, has_tiles)
        first_depth = (first_part * STEPS + early) * DEPTH
        request_tile(w_desc, ring, early, first_col, first_depth, has_tiles, GATE, NARROW)
    gdc_wait()
    i = 0
    for local in range(count):
        _, row, col, part = work_of(local, M, COL_TILES, SPLIT, PAIRS, GROUPS)
        for step in range(STEPS):
            place = i % STAGES
            mbarrier.wait(free.index(place), ((i // STAGES) & 1) ^ 1)
            more = i >= STAGES
            mbarrier.expect(ready.index(place), BYTES, more)
            depth = (part * STEPS + step) * DEPTH
            request_inputs(x_desc, x_tiles, ready, place, row, depth, M)
            request_tile(w_desc, ring, place, col, depth, more, GATE, NARROW)
            i += 1
        if ADD and (PAIRS or part == SPLIT - 1):
            # The residual takes two places of the ring, one for each group.
            CHUNKS: gl.constexpr = COLS // CHUNK // 2 if PAIRS else COLS // CHUNK
            for which in gl.static_range(GROUPS):
                there = i % STAGES
                mbarrier.wait(free.index(there), ((i // STAGES) & 1) ^ 1)
                mbarrier.expect(ready.index(there), CHUNKS * HEIGHT * CHUNK * 2)
                chunks = residual_chunks(w_tiles, there, residual_desc)
                first, _ = rows_of(row, which, M)
                for c in gl.static_range(CHUNKS):
                    corner = [first, col * COLS + ((part if PAIRS else 0) * CHUNKS + c) * CHUNK]
                    tma.async_copy_global_to_shared(residual_desc, corner, ready.index(there), chunks.index(c))
                i += 1
    if SPLIT == 1 and not ADD and not NARROW and half_tile >= 0:
        last_row, last_col = place_of(half_tile // 2, M, COL_TILES, GROUPS)
        for step in range(STEPS):
            here = i % STAGES
            mbarrier.wait(free.index(here), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(here), BYTES - COLS // 2 * DEPTH * 2)
            request_inputs(x_desc, x_tiles, ready, here, last_row, step * DEPTH, M)
            half = 2 * last_col + half_tile % 2
            request_weights(w_desc, w_halves, ready, 2 * here, 0, half, step * DEPTH, True, GATE)
            i += 1


@gluon.jit
def residual_chunks(w_tiles, place, residual_desc):  # type: ignore[no-untyped-def]
    """A place of the ring as chunks of the residual."""
    shape: gl.constexpr = [COLS // CHUNK, HEIGHT, CHUNK]
    return w_tiles.index(place)._reinterpret(residual_desc.dtype, shape, residual_desc.layout)


@gluon.jit
def multiply(  # type: ignore[no-untyped-def]
    x_tiles, w_tiles, w_beside, ready, free, lead, i, WHICH: gl.constexpr, STEPS: gl.constexpr, TWO: gl.constexpr
):
    """(sums of one part of a tile [HEIGHT, columns], with TWO those of the columns beside them, steps done so far).

    The weights beside are the second half of a tile in w_beside, or its third quarter: three groups have too few
    registers for one product of all columns, and a product has a power of two of them.
    """
    STAGES: gl.constexpr = ready.shape[0]
    GROUPS: gl.constexpr = x_tiles.shape[0] // STAGES
    WIDTH: gl.constexpr = w_tiles.shape[1]
    EACH: gl.constexpr = w_tiles.shape[0] // STAGES  # places of the weights for each of the ring
    BESIDE: gl.constexpr = w_beside.shape[0] // STAGES
    BESIDE_WIDTH: gl.constexpr = w_beside.shape[1]
    # Steps by which the other groups are behind the first at least, so that some multiply while one finishes.
    LAG: gl.constexpr = STAGES - 2
    total = gl.zeros((HEIGHT, WIDTH), gl.float32, product_layout(WIDTH))
    beside = total
    if TWO:
        beside = gl.zeros((HEIGHT, BESIDE_WIDTH), gl.float32, product_layout(BESIDE_WIDTH))
    for step in range(STEPS):
        place = i % STAGES
        mbarrier.wait(ready.index(place), (i // STAGES) & 1)
        x_tile = x_tiles.index(GROUPS * place + WHICH)
        total = warpgroup_mma(x_tile, w_tiles.index(EACH * place).permute((1, 0)), total, is_async=True)
        if TWO:
            w_tile = w_beside.index(BESIDE * place + BESIDE // 2)
            beside = warpgroup_mma(x_tile, w_tile.permute((1, 0)), beside, is_async=True)
            total, beside = warpgroup_mma_wait(2, deps=(total, beside))
        else:
            total = warpgroup_mma_wait(1, deps=(total,))
        gl.thread_barrier()
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1, pred=step > 0)  # the step before is done
        if WHICH == 0:
            mbarrier.arrive(lead, count=1, pred=i == LAG)
        i += 1
    total, beside = warpgroup_mma_wait(0, deps=(total, beside))
    gl.thread_barrier()
    mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), count=1)
    return total, beside, i


def weight_tiles(matrix: Tensor, gate: bool, experts: int = 1, narrow: bool = False) -> TensorDescriptor:
    """The TMA descriptor of a weight [experts * N, K] in halves of a tile, or in quarters if it is `narrow`; with
    `gate` [experts * 2 N, K] in halves of 8 gates, 8 ups and so on."""
    if not gate:
        return tiled(matrix, COLS.value // (4 if narrow else 2), DEPTH.value)
    outputs, inputs = matrix.shape[0] // (2 * experts), matrix.shape[1]
    block = [COLS.value // 32, 2, 8, DEPTH.value]
    layout = tile_layout(tuple(block), matrix.dtype)
    shape, strides = [(2 * experts - 1) * outputs // 8, 2, 8, inputs], [8 * inputs, outputs * inputs, inputs, 1]
    return TensorDescriptor(matrix, shape, strides, block, layout)
