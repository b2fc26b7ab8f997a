"""How Hopper's kernels for many rows copy and multiply, in Gluon: tiles, the ring they are copied into, and products.

There are as many programs as multiprocessors, and each takes tile after tile: some tokens by COLS rows of the weight.
One warp of a program copies steps of DEPTH inputs by TMA into a ring of places. Two or three groups of four warps
multiply them, each for HEIGHT tokens. Three groups read a weight once for 192 tokens; they have places for three steps
only, or for four, and registers for a residual, if tiles have half of the columns. Tiles have EIGHTHS of COLS, so many
that they fill the device. Where tiles are left over, too few for all programs, they may be cut into pieces: REST
quarters of their columns, or with PAIRS one of two parts of the inputs.

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
def work_of(local, M, COL_TILES: gl.constexpr, SPLIT: gl.constexpr, GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """(first row, column tile, part of the inputs) of what a program multiplies as its n-th."""
    row, col = place_of(gl.program_id(0) + local // SPLIT * gl.num_programs(0), M, COL_TILES, GROUPS)
    return row, col, local % SPLIT


@gluon.jit
def piece_of(  # type: ignore[no-untyped-def]
    piece,
    whole,
    M,
    COL_TILES: gl.constexpr,
    GROUPS: gl.constexpr,
    TILE_COLS: gl.constexpr,
    SPLIT: gl.constexpr,
    REST: gl.constexpr,
):
    """(first row, first column, part of the inputs) of a piece of a tile; so many tiles before it are whole.

    Pieces are REST quarters of the columns, or of split inputs one part. Those of three quarters lie across tiles: of
    the last tiles of rows that share a tile of the weight whole columns are cut.
    """
    ROWS: gl.constexpr = GROUPS * HEIGHT
    TOGETHER: gl.constexpr = together(COL_TILES)
    if REST == 3:
        tiles = (M + ROWS - 1) // ROWS
        first = (tiles - 1) // TOGETHER * TOGETHER
        row = (first + piece % (tiles - first)) * ROWS
        quarter = (whole - first * COL_TILES) // (tiles - first) * 4 + piece // (tiles - first) * 3
        begin, part = quarter * (COLS // 4), 0
    elif REST:
        row, col = place_of(whole + piece * REST // 4, M, COL_TILES, GROUPS)
        begin, part = col * COLS + piece * REST % 4 * (COLS // 4), 0
    else:
        row, col = place_of(whole + piece // SPLIT, M, COL_TILES, GROUPS)
        begin, part = col * TILE_COLS, piece % SPLIT
    return row, begin, part


@gluon.jit
def new_ring(x_desc, w_desc, GROUPS: gl.constexpr, EIGHTHS: gl.constexpr, GATE: gl.constexpr):  # type: ignore[no-untyped-def]
    """(inputs of each group, weights in the boxes of w_desc, ready, free, lead): places, and barriers for each.

    All groups of multiplying warps free a place; the first lets the others start through `lead`.
    """
    STAGES: gl.constexpr = 3 if GROUPS == 3 and EIGHTHS == 8 else 4  # room for more is of no use
    BOX: gl.constexpr = w_desc.block_shape[0] * (16 if GATE else 1)  # columns
    BOXES: gl.constexpr = COLS * EIGHTHS // 8 // BOX
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOX, DEPTH], w_desc.dtype)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [GROUPS * STAGES, HEIGHT, DEPTH], x_desc.layout)
    w_boxes = gl.allocate_shared_memory(w_desc.dtype, [BOXES * STAGES, BOX, DEPTH], w_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    lead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(ready.index(place), count=1)
        mbarrier.init(free.index(place), count=GROUPS)
    mbarrier.init(lead, count=1)
    fence_async_shared()
    return x_tiles, w_boxes, ready, free, lead


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
    w_desc, ring, place, first, col, depth, live, WIDTH: gl.constexpr, GATE: gl.constexpr
):
    """Start the copies of one step's weights for WIDTH columns from `col` on; column 0 lies at `first` in w_desc."""
    _, w_boxes, ready, _, _ = ring
    BOXES: gl.constexpr = w_boxes.shape[0] // ready.shape[0]
    BOX: gl.constexpr = w_boxes.shape[1]
    for n in gl.static_range(WIDTH // BOX):
        slot = w_boxes.index(BOXES * place + n)
        if GATE:
            slot = slot._reinterpret(w_desc.dtype, w_desc.block_shape, w_desc.layout)
            corner = [first + col // 16 + n * (BOX // 16), 0, 0, depth]
        else:
            corner = [first + col + n * BOX, depth]
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
    EIGHTHS: gl.constexpr,
    REST: gl.constexpr,
):
    """The copying warp. The first weights are requested while the previous kernel is still running."""
    count, piece, whole, M = work
    x_desc, w_desc, residual_desc = matrices
    x_tiles, _, ready, free, _ = ring
    STAGES: gl.constexpr = ready.shape[0]
    GROUPS: gl.constexpr = x_tiles.shape[0] // STAGES
    TILE_COLS: gl.constexpr = COLS * EIGHTHS // 8
    PIECE_COLS: gl.constexpr = COLS * REST // 4 if REST else TILE_COLS
    BYTES: gl.constexpr = (GROUPS * HEIGHT + TILE_COLS) * DEPTH * 2
    PIECE_BYTES: gl.constexpr = (GROUPS * HEIGHT + PIECE_COLS) * DEPTH * 2
    _, first_col, _ = work_of(0, M, COL_TILES, SPLIT, GROUPS)
    has_tiles = count > 0
    for early in gl.static_range(STAGES):
        mbarrier.expect(ready.index(early), BYTES, has_tiles)
        request_weights(w_desc, ring, early, 0, first_col * TILE_COLS, early * DEPTH, has_tiles, TILE_COLS, GATE)
    if REST or PAIRS:
        last_row, last_col, last_part = piece_of(piece, whole, M, COL_TILES, GROUPS, TILE_COLS, SPLIT, REST)
        begin = last_part * STEPS
        is_all = (count == 0) & (piece >= 0)
        for early in gl.static_range(STAGES):
            mbarrier.expect(ready.index(early), PIECE_BYTES, is_all)
            request_weights(w_desc, ring, early, 0, last_col, (begin + early) * DEPTH, is_all, PIECE_COLS, GATE)
    gdc_wait()
    i = 0
    for local in range(count):
        row, col, part = work_of(local, M, COL_TILES, SPLIT, GROUPS)
        for step in range(STEPS):
            place = i % STAGES
            mbarrier.wait(free.index(place), ((i // STAGES) & 1) ^ 1)
            more = i >= STAGES
            mbarrier.expect(ready.index(place), BYTES, more)
            depth = (part * STEPS + step) * DEPTH
            request_inputs(x_desc, x_tiles, ready, place, row, depth, M)
            request_weights(w_desc, ring, place, 0, col * TILE_COLS, depth, more, TILE_COLS, GATE)
            i += 1
        if ADD and part == SPLIT - 1:
            request_residual(residual_desc, ring, i, row, col * TILE_COLS, M, TILE_COLS)
            i += GROUPS
    if (REST or PAIRS) and piece >= 0:
        for step in range(STEPS):
            here = i % STAGES
            mbarrier.wait(free.index(here), ((i // STAGES) & 1) ^ 1)
            later = i >= STAGES
            mbarrier.expect(ready.index(here), PIECE_BYTES, later)
            last_depth = (begin + step) * DEPTH
            request_inputs(x_desc, x_tiles, ready, here, last_row, last_depth, M)
            request_weights(w_desc, ring, here, 0, last_col, last_depth, later, PIECE_COLS, GATE)
            i += 1
        if ADD:
            HALF: gl.constexpr = TILE_COLS // 2
            request_residual(residual_desc, ring, i, last_row, last_col + last_part * HALF, M, HALF)


@gluon.jit
def request_residual(residual_desc, ring, i, row, col, M, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the copies of the residual, WIDTH columns from `col` on. It takes a place of the ring for each group."""
    x_tiles, w_boxes, ready, free, _ = ring
    STAGES: gl.constexpr = ready.shape[0]
    EACH: gl.constexpr = residual_desc.block_shape[1]
    for which in gl.static_range(x_tiles.shape[0] // STAGES):
        place = (i + which) % STAGES
        mbarrier.wait(free.index(place), (((i + which) // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(place), WIDTH * HEIGHT * 2)
        chunks = residual_chunks(w_boxes, place, ready, residual_desc)
        first, _ = rows_of(row, which, M)
        for c in gl.static_range(WIDTH // EACH):
            tma.async_copy_global_to_shared(residual_desc, [first, col + c * EACH], ready.index(place), chunks.index(c))


@gluon.jit
def residual_chunks(w_boxes, place, ready, residual_desc):  # type: ignore[no-untyped-def]
    """A place of the ring as chunks of the residual: as many columns as the weights there."""
    BOXES: gl.constexpr = w_boxes.shape[0] // ready.shape[0]
    WIDTH: gl.constexpr = residual_desc.block_shape[1]
    shape: gl.constexpr = [BOXES * w_boxes.shape[1] // WIDTH, HEIGHT, WIDTH]
    return w_boxes.index(BOXES * place)._reinterpret(residual_desc.dtype, shape, residual_desc.layout)


@gluon.jit
def columns(w_boxes, box, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """The weights [DEPTH, WIDTH] that begin in that box: boxes of a place lie one after the other."""
    tile = w_boxes.index(box)._reinterpret(w_boxes.dtype, [WIDTH, DEPTH], w_boxes.layout)
    return tile.permute((1, 0))


@gluon.jit
def multiply(  # type: ignore[no-untyped-def]
    ring, i, WHICH: gl.constexpr, STEPS: gl.constexpr, WIDTH: gl.constexpr, BESIDE: gl.constexpr
):
    """(sums of one part of a tile [HEIGHT, WIDTH], those of BESIDE columns beside them if any, steps done so far).

    A product has a power of two of columns, and three groups have too few registers for one product of all columns.
    """
    x_tiles, w_boxes, ready, free, lead = ring
    STAGES: gl.constexpr = ready.shape[0]
    GROUPS: gl.constexpr = x_tiles.shape[0] // STAGES
    BOXES: gl.constexpr = w_boxes.shape[0] // STAGES
    BOX: gl.constexpr = w_boxes.shape[1]
    # Steps by which the other groups are behind the first at least, so that some multiply while one finishes.
    LAG: gl.constexpr = STAGES - 2
    total = gl.zeros((HEIGHT, WIDTH), gl.float32, product_layout(WIDTH))
    beside = total
    if BESIDE:
        beside = gl.zeros((HEIGHT, BESIDE), gl.float32, product_layout(BESIDE))
    for step in range(STEPS):
        place = i % STAGES
        mbarrier.wait(ready.index(place), (i // STAGES) & 1)
        x_tile, box = x_tiles.index(GROUPS * place + WHICH), BOXES * place
        total = warpgroup_mma(x_tile, columns(w_boxes, box, WIDTH), total, is_async=True)
        if BESIDE:
            beside = warpgroup_mma(x_tile, columns(w_boxes, box + WIDTH // BOX, BESIDE), beside, is_async=True)
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


def weight_tiles(matrix: Tensor, gate: bool, experts: int = 1, box: int = tiles.LARGE_BOX) -> TensorDescriptor:
    """The TMA descriptor of a weight [experts * N, K] in boxes of so many columns.

    With `gate` it is [experts * 2 N, K], and a box has 8 gates, 8 ups and so on.
    """
    if not gate:
        return tiled(matrix, box, DEPTH.value)
    outputs, inputs = matrix.shape[0] // (2 * experts), matrix.shape[1]
    block = [box // 16, 2, 8, DEPTH.value]
    layout = tile_layout(tuple(block), matrix.dtype)
    shape, strides = [(2 * experts - 1) * outputs // 8, 2, 8, inputs], [8 * inputs, outputs * inputs, inputs, 1]
    return TensorDescriptor(matrix, shape, strides, block, layout)
