"""How Hopper's kernels for many rows copy and multiply, in Gluon: tiles, the ring they are copied into, and products.

There are as many programs as multiprocessors, and each takes tile after tile: some tokens by COLS rows of the weight.
One warp of a program copies steps of DEPTH inputs by TMA into a ring of places. Two or three groups of four warps
multiply them, each for HEIGHT tokens. Three groups read a weight once for 192 tokens; they have places for three steps
only, or for four, and registers for a residual, if tiles have half of the columns (HALF). The last tiles, which are too
few for all programs, may be cut into pieces of REST quarters of their columns.

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
CHUNK = gl.constexpr(64)  # outputs that are finished at a time
together = gluon.constexpr_function(tiles.large_together)


@gluon.jit
def place_of(tile, M, COL_TILES: gl.constexpr, GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """(first row, column tile) of a tile. Some tiles of rows share a tile of the weight while it is in L2."""
    ROWS: gl.constexpr = GROUPS * HEIGHT
    TOGETHER: gl.constexpr = together(COL_TILES)
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
def piece_of(piece, whole, M, COL_TILES: gl.constexpr, GROUPS: gl.constexpr, REST: gl.constexpr):  # type: ignore[no-untyped-def]
    """(first row, first quarter of a column tile) of a piece of REST quarters; so many tiles before it are whole.

    Pieces of three quarters lie across tiles: of the last tiles of rows that share a tile of the weight whole columns
    are cut.
    """
    ROWS: gl.constexpr = GROUPS * HEIGHT
    TOGETHER: gl.constexpr = together(COL_TILES)
    if REST == 3:
        tiles = (M + ROWS - 1) // ROWS
        first = (tiles - 1) // TOGETHER * TOGETHER
        row = (first + piece % (tiles - first)) * ROWS
        quarter = (whole - first * COL_TILES) // (tiles - first) * 4 + piece // (tiles - first) * 3
    else:
        row, col = place_of(whole + piece * REST // 4, M, COL_TILES, GROUPS)
        quarter = 4 * col + piece * REST % 4
    return row, quarter


@gluon.jit
def new_ring(x_desc, w_desc, GROUPS: gl.constexpr, HALF: gl.constexpr):  # type: ignore[no-untyped-def]
    """(inputs of each group, weights in tiles, in halves and in quarters of COLS, ready, free, lead): places, barriers.

    All groups of multiplying warps free a place; the first lets the others start through `lead`.
    """
    STAGES: gl.constexpr = 4 if GROUPS == 2 or HALF else 3  # two groups with HALF have room for more, and are no faster
    HALVES: gl.constexpr = 1 if HALF else 2  # of COLS, in a place
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLS // 2, DEPTH], w_desc.dtype)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [GROUPS * STAGES, HEIGHT, DEPTH], x_desc.layout)
    w_halves = gl.allocate_shared_memory(w_desc.dtype, [HALVES * STAGES, COLS // 2, DEPTH], w_layout)
    w_tiles = w_halves._reinterpret(w_desc.dtype, [STAGES, HALVES * COLS // 2, DEPTH], w_layout)
    w_quarters = w_halves._reinterpret(w_desc.dtype, [2 * HALVES * STAGES, COLS // 4, DEPTH], w_layout)
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
    w_desc, ring, place, first, quarter, depth, live, QUARTERS: gl.constexpr, GATE: gl.constexpr
):
    """Start the copies of one step's weights for some quarters of COLS, from that number on.

    `first` is where column 0 lies in w_desc, whose boxes are halves or quarters.
    """
    _, _, w_halves, w_quarters, ready, _, _ = ring
    STAGES: gl.constexpr = ready.shape[0]
    BOX: gl.constexpr = w_desc.block_shape[0] * (16 if GATE else 1)  # columns
    EACH: gl.constexpr = BOX * 4 // COLS  # quarters
    for n in gl.static_range(QUARTERS // EACH):
        if EACH == 2:
            slot = w_halves.index(place * (w_halves.shape[0] // STAGES) + n)
        else:
            slot = w_quarters.index(place * (w_quarters.shape[0] // STAGES) + n)
        at = quarter // EACH + n
        if GATE:
            slot = slot._reinterpret(w_desc.dtype, w_desc.block_shape, w_desc.layout)
            corner = [first + at * (BOX // 16), 0, 0, depth]
        else:
            corner = [first + at * BOX, depth]
        tma.async_copy_global_to_shared(w_desc, corner, ready.index(place), slot, live)


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
    HALF: gl.constexpr,
    REST: gl.constexpr,
):
    """The copying warp. The first weights are requested while the previous kernel is still running."""
    count, piece, whole, M = work
    x_desc, w_desc, residual_desc = matrices
    x_tiles, w_tiles, _, _, ready, free, _ = ring
    STAGES: gl.constexpr = ready.shape[0]
    GROUPS: gl.constexpr = x_tiles.shape[0] // STAGES
    QUARTERS: gl.constexpr = 2 if HALF else 4  # of COLS, in a tile
    TILE_COLS: gl.constexpr = COLS * QUARTERS // 4
    BYTES: gl.constexpr = (GROUPS * HEIGHT + TILE_COLS) * DEPTH * 2
    PIECE_BYTES: gl.constexpr = (GROUPS * HEIGHT + COLS * REST // 4) * DEPTH * 2
    _, _, first_col, first_part = work_of(0, M, COL_TILES, SPLIT, PAIRS, GROUPS)
    has_tiles = count > 0
    for early in gl.static_range(STAGES):
        mbarrier.expect(ready.index(early), BYTES, has_tiles)
        first_depth = (first_part * STEPS + early) * DEPTH
        request_weights(w_desc, ring, early, 0, first_col * QUARTERS, first_depth, has_tiles, QUARTERS, GATE)
    if REST:
        last_row, quarter = piece_of(piece, whole, M, COL_TILES, GROUPS, REST)
        is_all = (count == 0) & (piece >= 0)
        for early in gl.static_range(STAGES):
            mbarrier.expect(ready.index(early), PIECE_BYTES, is_all)
            request_weights(w_desc, ring, early, 0, quarter, early * DEPTH, is_all, REST, GATE)
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
            request_weights(w_desc, ring, place, 0, col * QUARTERS, depth, more, QUARTERS, GATE)
            i += 1
        if ADD and (PAIRS or part == SPLIT - 1):
            # The residual takes a place of the ring for each group.
            CHUNKS: gl.constexpr = TILE_COLS // CHUNK // 2 if PAIRS else TILE_COLS // CHUNK
            for which in gl.static_range(GROUPS):
                there = i % STAGES
                mbarrier.wait(free.index(there), ((i // STAGES) & 1) ^ 1)
                mbarrier.expect(ready.index(there), CHUNKS * HEIGHT * CHUNK * 2)
                chunks = residual_chunks(w_tiles, there, residual_desc)
                first, _ = rows_of(row, which, M)
                for c in gl.static_range(CHUNKS):
                    corner = [first, col * TILE_COLS + ((part if PAIRS else 0) * CHUNKS + c) * CHUNK]
                    tma.async_copy_global_to_shared(residual_desc, corner, ready.index(there), chunks.index(c))
                i += 1
    if REST and piece >= 0:
        for step in range(STEPS):
            here = i % STAGES
            mbarrier.wait(free.index(here), ((i // STAGES) & 1) ^ 1)
            later = i >= STAGES
            mbarrier.expect(ready.index(here), PIECE_BYTES, later)
            request_inputs(x_desc, x_tiles, ready, here, last_row, step * DEPTH, M)
            request_weights(w_desc, ring, here, 0, quarter, step * DEPTH, later, REST, GATE)
            i += 1


@gluon.jit
def residual_chunks(w_tiles, place, residual_desc):  # type: ignore[no-untyped-def]
    """A place of the ring as chunks of the residual."""
    shape: gl.constexpr = [w_tiles.shape[1] // CHUNK, HEIGHT, CHUNK]
    return w_tiles.index(place)._reinterpret(residual_desc.dtype, shape, residual_desc.layout)


@gluon.jit
def multiply(  # type: ignore[no-untyped-def]
    x_tiles, w_tiles, w_beside, ready, free, lead, i, WHICH: gl.constexpr, STEPS: gl.constexpr, TWO: gl.constexpr
):
    """(sums of one part of a tile [HEIGHT, columns], with TWO those of the columns beside them, steps done so far).

    The weights beside are the second half of COLS in w_beside, or the third quarter: three groups have too few
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


def weight_tiles(matrix: Tensor, gate: bool, experts: int = 1, quarters: bool = False) -> TensorDescriptor:
    """The TMA descriptor of a weight [experts * N, K] in halves of a tile, or in quarters; with `gate`
    [experts * 2 N, K] in such boxes of 8 gates, 8 ups and so on."""
    box = COLS.value // (4 if quarters else 2)
    if not gate:
        return tiled(matrix, box, DEPTH.value)
    outputs, inputs = matrix.shape[0] // (2 * experts), matrix.shape[1]
    block = [box // 16, 2, 8, DEPTH.value]
    layout = tile_layout(tuple(block), matrix.dtype)
    shape, strides = [(2 * experts - 1) * outputs // 8, 2, 8, inputs], [8 * inputs, outputs * inputs, inputs, 1]
    return TensorDescriptor(matrix, shape, strides, block, layout)
