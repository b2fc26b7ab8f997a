"""The linear kernel for Hopper and many rows, in Gluon: the arithmetic of `hopper.py`, bit for bit.

There are as many programs as multiprocessors, and each takes tile after tile: some tokens by COLS rows of the weight.
One warp of a program copies steps of DEPTH inputs by TMA into a ring of places. Two or three groups of four warps
multiply them, each for HEIGHT tokens, and finish their outputs while the copies for the next tile are under way. Three
groups read a weight once for 192 tokens; they have registers for no residual, and places for three steps only. NARROW
tiles have three quarters of the columns, where these fill the device and whole tiles do not.

Same bits: a matrix instruction adds the products of 16 inputs to a sum, in ascending order and whatever the tile, so an
output is the same chain as in the other kernels. A weight whose inputs are split (`pick_split`) has a chain for each
part, added in order. A tile's sums fill half of all registers, so those of one part cannot all stay there until the
next part is done.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.linear import tiles
from peregrine.kernels.linear.epilogue import gated, reset_squares
from peregrine.kernels.linear.hopper import tile_layout, tiled
from peregrine.kernels.residual.reference import MAX_SQUARE, SQUARE_UNIT
from peregrine.kernels.residual.triton import counted_square, fine_square, is_small, root_mean_square, weighted
from peregrine.kernels.runtime.layouts import product_layout

HEIGHT = gl.constexpr(tiles.LARGE_HEIGHT)
COLS = gl.constexpr(tiles.LARGE_COLS)
DEPTH = gl.constexpr(tiles.LARGE_DEPTH)
MANY_COL_TILES = gl.constexpr(64)  # of a weight that is far larger than L2: it is read half as often
CHUNK = gl.constexpr(64)  # outputs that are finished at a time
SQUARE_ROOT_OF_UNIT = gl.constexpr(SQUARE_UNIT**0.5)
MAX_UNITS = gl.constexpr(MAX_SQUARE * SQUARE_UNIT)


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


@gluon.jit
def halves(total):  # type: ignore[no-untyped-def]
    """Left and right half of the columns."""
    WIDTH: gl.constexpr = total.shape[1] // 2
    product: gl.constexpr = product_layout(WIDTH)
    left, right = gl.split(gl.permute(gl.reshape(total, [HEIGHT, 2, WIDTH]), [0, 2, 1]))
    return gl.convert_layout(left, product, assert_trivial=True), gl.convert_layout(right, product, assert_trivial=True)


@gluon.jit
def cut(total):  # type: ignore[no-untyped-def]
    """Columns in chunks."""
    if total.shape[1] == CHUNK:
        chunks = (total,)
    else:
        left, right = halves(total)
        if total.shape[1] == 2 * CHUNK:  # noqa: SIM108
            chunks = (left, right)  # type: ignore[assignment]
        else:
            chunks = halves(left) + halves(right)
    return chunks


@gluon.jit
def in_chunks(total, GATE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Columns of a tile in chunks: (sums, or gates; ups)."""
    if GATE:
        WIDTH: gl.constexpr = total.shape[1] // 2
        product: gl.constexpr = product_layout(WIDTH)
        gate, up = gl.split(gl.permute(gl.reshape(total, [HEIGHT, WIDTH // 8, 2, 8]), [0, 1, 3, 2]))
        gate = gl.convert_layout(gl.reshape(gate, [HEIGHT, WIDTH]), product, assert_trivial=True)
        up = gl.convert_layout(gl.reshape(up, [HEIGHT, WIDTH]), product, assert_trivial=True)
        chunks, ups = cut(gate), cut(up)
    else:
        chunks = cut(total)
        ups = chunks
    return chunks, ups


@gluon.jit
def pick(chunks, c):  # type: ignore[no-untyped-def]
    """The chunk of a number that is known at run time: code that is repeated would not fit the instruction cache."""
    if len(chunks) == 3:
        chunk = gl.where(c == 0, chunks[0], gl.where(c == 1, chunks[1], chunks[2]))
    elif len(chunks) == 4:
        chunk = gl.where(c < 2, gl.where(c == 0, chunks[0], chunks[1]), gl.where(c == 2, chunks[2], chunks[3]))
    elif len(chunks) == 2:
        chunk = gl.where(c == 0, chunks[0], chunks[1])
    else:
        chunk = chunks[0]
    return chunk


@gluon.jit
def places(base, chunk):  # type: ignore[no-untyped-def]
    """Pointers to the elements of a chunk that lies at `base` in blocks of 8 by 8, each of them what a warp holds."""
    layout: gl.constexpr = chunk.type.layout
    rows, cols = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout)), gl.arange(0, CHUNK, gl.SliceLayout(0, layout))
    return base + ((rows // 8 * (8 * CHUNK) + rows % 8 * 8)[:, None] + (cols // 8 * 64 + cols % 8)[None, :])


@gluon.jit
def rounded(values, NUMBER: gl.constexpr):  # type: ignore[no-untyped-def]
    """`values.to(NUMBER)`, two at a time: of values that are needed again the compiler would convert one at a time."""
    if gl.bfloat16 == NUMBER:
        both = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [values], gl.bfloat16, True, 2)
    else:
        both = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [values], gl.float16, True, 2)
    return both


@gluon.jit
def column_values(vector, col, chunk, N: gl.constexpr):  # type: ignore[no-untyped-def]
    """The values of a vector [N] for the columns of a chunk; past the last column they are those of others."""
    cols = gl.arange(0, CHUNK, gl.SliceLayout(0, chunk.type.layout))
    # Most weights need one remainder for the whole chunk.
    return gl.load(vector + (col + cols) % N) if N % CHUNK else gl.load(vector + col % N + cols)


@gluon.jit
def row_factors(squares, row, eps, K: gl.constexpr, SCALE: gl.constexpr):  # type: ignore[no-untyped-def]
    """What HEIGHT rows are multiplied with: the second half of their norm."""
    rows = row + gl.arange(0, HEIGHT, gl.SliceLayout(1, product_layout(CHUNK)))
    if SCALE:
        coarse = gl.load(squares + 2 * rows)
        fine = gl.load(squares + 2 * rows + 1)
        factors = 1.0 / root_mean_square(coarse, fine, eps, K)
    else:
        factors = rows.to(gl.float32)
    return factors


@gluon.jit
def store_chunk(values, row, col, out_desc, buffer):  # type: ignore[no-untyped-def]
    """One chunk [HEIGHT, CHUNK] leaves through one of two buffers in shared memory, which take turns."""
    tma.store_wait(1)
    gl.thread_barrier()
    buffer.store(values.to(out_desc.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, [row, col], buffer)


@gluon.jit
def finish_chunk(  # type: ignore[no-untyped-def]
    total,
    up,
    factor,
    row,
    col,
    bias,
    out_desc,
    buffer,
    N: gl.constexpr,
    SCALE: gl.constexpr,
    BIAS: gl.constexpr,
    GATE: gl.constexpr,
):
    """`finish_outputs` without a residual for one chunk [HEIGHT, CHUNK], which leaves through shared memory."""
    if SCALE:
        total = total * factor[:, None]
    if BIAS:
        total += column_values(bias, col, total, N).to(gl.float32)[None, :]
    if GATE:
        if SCALE:
            up = up * factor[:, None]
        if BIAS:
            up += column_values(bias + N, col, up, N).to(gl.float32)[None, :]
        total = gated(total, up)
    store_chunk(total, row, col, out_desc, buffer)


@gluon.jit
def column_sums(values):  # type: ignore[no-untyped-def]
    """[HEIGHT, CHUNK] -> [HEIGHT, 8], the sums of columns that are 8 apart: each thread has all of them."""
    return gl.sum(gl.reshape(values, [HEIGHT, CHUNK // 8, 8]), axis=1)


@gluon.jit
def add_chunk(  # type: ignore[no-untyped-def]
    total, residual, weights, bias, row, col, out_desc, scaled_desc, buffer, N: gl.constexpr, BIAS: gl.constexpr
):
    """`finish_outputs` with a residual for one chunk [HEIGHT, CHUNK]: the sum leaves in place of the residual, the sum
    scaled through a buffer.

    Returns `column_sums` of the squares in units, as whole numbers and as they are. Threads wait for each other here as
    little as can be; whether all squares can be counted and no row is small, which is nearly always so, is asked once a
    tile (`finish_squares`).
    """
    layout: gl.constexpr = total.type.layout
    if BIAS:
        total += column_values(bias, col, total, N).to(gl.float32)[None, :]
    result = rounded(total + residual.load(layout).to(gl.float32), out_desc.dtype)
    value = counted(result, col, N)
    units = value * SQUARE_ROOT_OF_UNIT
    units = units * units
    prepared = (value * weights.to(gl.float32)[None, :]).to(out_desc.dtype)
    tma.store_wait(2)  # what the chunk before last has left in this buffer is on its way
    gl.thread_barrier()
    residual.store(result)
    buffer.store(prepared)
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, [row, col], residual)
    tma.async_copy_shared_to_global(scaled_desc, [row, col], buffer)
    return column_sums(units.to(gl.int64)), column_sums(units)


@gluon.jit
def counted(values, col, N: gl.constexpr):  # type: ignore[no-untyped-def]
    """The values of a chunk in float32; 0 in columns past the last."""
    values = values.to(gl.float32)
    if N % CHUNK:
        cols = col + gl.arange(0, CHUNK, gl.SliceLayout(0, values.type.layout))
        values = gl.where((cols < N)[None, :], values, 0.0)
    return values


@gluon.jit
def when_written(rows):  # type: ignore[no-untyped-def]
    """`rows`, once all TMA stores so far are in memory: `tma.store_wait` returns when shared memory has been read."""
    wait: gl.constexpr = "cp.async.bulk.wait_group 0; mov.b32 $0, $1;"
    return gl.inline_asm_elementwise(wait, "=r,r", [rows], gl.int32, False, 1)


@gluon.jit
def finish_squares(  # type: ignore[no-untyped-def]
    whole,
    units,
    residual,
    norm,
    row,
    own,
    col,
    squares,
    stale_squares,
    M,
    scaled_desc,
    buffer,
    CHUNKS: gl.constexpr,
    N: gl.constexpr,
):
    """Add the sums of squares of a tile's rows in memory, from `column_sums` of all its chunks.

    Where the sum of a row's squares is within bounds, so are all values. Where it is not, the values are read again
    from shared memory: the path is seldom taken and must not hold registers that the other one needs.
    """
    coarse = gl.sum(whole, axis=1)
    rows = row + gl.arange(0, HEIGHT, coarse.type.layout)
    is_odd = (rows >= own) & is_small(coarse, N) | ~(gl.sum(units, axis=1) <= MAX_UNITS)
    if gl.max(is_odd.to(gl.int32), axis=0) > 0:
        layout: gl.constexpr = product_layout(CHUNK)
        coarse, fine = coarse * 0, coarse * 0
        rows = when_written(rows)
        for n in range(CHUNKS):
            at = col + n * CHUNK
            again = counted(residual.index(n).load(layout), at, N)
            weight = column_values(norm, at, again, N).to(gl.float32)[None, :]
            tma.store_wait(0)
            gl.thread_barrier()
            buffer.store(weighted(again, weight).to(scaled_desc.dtype))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(scaled_desc, [row, at], buffer)
            coarse += gl.convert_layout(gl.sum(counted_square(again), axis=1), coarse.type.layout)
            fine += gl.convert_layout(gl.sum(fine_square(again), axis=1), coarse.type.layout)
        is_fine = (rows >= own) & is_small(coarse, N)
        gl.atomic_add(squares + 2 * rows + 1, fine, mask=is_fine, sem="relaxed")
    gl.atomic_add(squares + 2 * rows, coarse, mask=rows >= own, sem="relaxed")
    if col == 0:
        reset_squares(stale_squares, rows, M)


@gluon.jit
def finish_tiles(  # type: ignore[no-untyped-def]
    WHICH: gl.constexpr,
    buffers,
    known,
    STEPS: gl.constexpr,
    SPLIT: gl.constexpr,
    COL_TILES: gl.constexpr,
    PAIRS: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    SCALE: gl.constexpr,
    BIAS: gl.constexpr,
    GATE: gl.constexpr,
    ADD: gl.constexpr,
    NARROW: gl.constexpr,
):
    """Four warps that multiply and finish some of every tile's tokens."""
    work, ring, pointers, outputs, scratch, eps = known
    count, half_tile, M = work
    x_tiles, w_tiles, w_halves, w_quarters, ready, free, lead = ring
    bias, norm, next_squares, stale_squares = pointers
    out_desc, scaled_desc, residual_desc = outputs
    partial, arrived, squares = scratch
    STAGES: gl.constexpr = ready.shape[0]
    GROUPS: gl.constexpr = x_tiles.shape[0] // STAGES
    OUT_COLS: gl.constexpr = COLS // 2 if GATE else COLS * 3 // 4 if NARROW else COLS
    gdc_launch_dependents()
    gdc_wait()
    if WHICH > 0:
        mbarrier.wait(lead, 0, pred=(count > 0) | (half_tile >= 0))
    i = 0
    parked = buffers._reinterpret(gl.float32, [HEIGHT, CHUNK], gl.NVMMASharedLayout(128, 32))
    nothing = gl.zeros((HEIGHT, CHUNK), gl.float32, product_layout(CHUNK))
    kept, kept_too = nothing, nothing
    for local in range(count):
        tile, row, col, part = work_of(local, M, COL_TILES, SPLIT, PAIRS, GROUPS)
        row, own = rows_of(row, WHICH, M)
        col = col * OUT_COLS
        if GROUPS == 2 and not NARROW:
            total, _, i = multiply(x_tiles, w_tiles, w_tiles, ready, free, lead, i, WHICH, STEPS, False)
            chunks, ups = in_chunks(total, GATE)
        else:
            if NARROW:
                left, right, i = multiply(x_tiles, w_halves, w_quarters, ready, free, lead, i, WHICH, STEPS, True)
            else:
                left, right, i = multiply(x_tiles, w_halves, w_halves, ready, free, lead, i, WHICH, STEPS, True)
            left_chunks, left_ups = in_chunks(left, GATE)
            right_chunks, right_ups = in_chunks(right, GATE)
            chunks, ups = left_chunks + right_chunks, left_ups + right_ups
        factor = row_factors(squares, row, eps, K, SCALE)
        is_last = True
        if PAIRS:
            # Two programs have one part each: a program sends half of its columns to the other and finishes the rest.
            sent = (gl.where(part == 0, chunks[2], chunks[0]), gl.where(part == 0, chunks[3], chunks[1]))
            chunks = (gl.where(part == 0, chunks[0], chunks[2]), gl.where(part == 0, chunks[1], chunks[3]))
            slot = (tile * 2 + WHICH) * 2
            col += part * (COLS // 2)
            for c in gl.static_range(2):
                gl.store(places(partial + ((slot + part) * 2 + c) * (HEIGHT * CHUNK), sent[c]), sent[c])
            gl.thread_barrier()
            gl.atomic_add(arrived + slot + part, 1, sem="release")
            while gl.atomic_cas(arrived + slot + 1 - part, 1, 0, sem="acquire") == 0:
                pass
            gl.thread_barrier()
            others = partial + (slot + 1 - part) * (2 * HEIGHT * CHUNK)
            first = gl.load(places(others, chunks[0]), cache_modifier=".cg")
            second = gl.load(places(others + HEIGHT * CHUNK, chunks[1]), cache_modifier=".cg")
            chunks = (first + chunks[0], second + chunks[1])
        elif SPLIT > 1:
            # Of a part's sums two chunks wait for the next part in registers, one in shared memory, one in L2.
            in_l2 = places(partial + (gl.program_id(0) * 2 + WHICH) * (HEIGHT * CHUNK), nothing)
            is_last = part == SPLIT - 1
            is_later = part > 0
            if is_later:
                last = gl.load(in_l2)
                chunks = (
                    kept + chunks[0],
                    kept_too + chunks[1],
                    parked.load(nothing.type.layout) + chunks[2],
                    last + chunks[3],
                )
            if part < SPLIT - 1:
                tma.store_wait(0)
                gl.thread_barrier()
                parked.store(chunks[2])
                gl.store(in_l2, chunks[3])
            kept, kept_too = chunks[0], chunks[1]
        if is_last:
            if ADD:
                weights = column_values(norm, col, chunks[0], N)
                mine, theirs = (i + WHICH) % STAGES, (i + 1 - WHICH) % STAGES
                mbarrier.wait(ready.index(theirs), ((i + 1 - WHICH) // STAGES) & 1)
                gl.thread_barrier()
                mbarrier.arrive(free.index(theirs), count=1)
                mbarrier.wait(ready.index(mine), ((i + WHICH) // STAGES) & 1)
                residual = residual_chunks(w_tiles, mine, residual_desc)
                whole, units = column_sums(nothing.to(gl.int64)), column_sums(nothing)
            for n in range(len(chunks)):
                at = col + n * CHUNK
                if ADD:
                    now = weights
                    weights = column_values(norm, at + CHUNK, chunks[0], N)  # a chunk ahead
                    more_whole, more_units = add_chunk(
                        *(pick(chunks, n), residual.index(n), now, bias, row, at),
                        *(out_desc, scaled_desc, buffers.index(n % 2), N, BIAS),
                    )
                    whole, units = whole + more_whole, units + more_units
                else:
                    finish_chunk(
                        *(pick(chunks, n), pick(ups, n), factor, row, at, bias, out_desc, buffers.index(n % 2)),
                        *(N, SCALE, BIAS, GATE),
                    )
            if ADD:
                finish_squares(
                    *(whole, units, residual, norm, row, own, col, next_squares, stale_squares, M),
                    *(scaled_desc, buffers.index(0), len(chunks), N),
                )
                tma.store_wait(1)  # the sums have left this place
                gl.thread_barrier()
                mbarrier.arrive(free.index(mine), count=1)
                i += 2
            if SPLIT > 1:
                kept, kept_too = nothing, nothing
    if SPLIT == 1 and not ADD and not NARROW and half_tile >= 0:
        last_row, last_col = place_of(half_tile // 2, M, COL_TILES, GROUPS)
        top, _ = rows_of(last_row, WHICH, M)
        first_col = (2 * last_col + half_tile % 2) * (OUT_COLS // 2)
        half_total, _, i = multiply(x_tiles, w_halves, w_halves, ready, free, lead, i, WHICH, STEPS, False)
        few, few_ups = in_chunks(half_total, GATE)
        last_factor = row_factors(squares, top, eps, K, SCALE)
        for n in range(len(few)):
            at = first_col + n * CHUNK
            finish_chunk(
                *(pick(few, n), pick(few_ups, n), last_factor, top, at, bias, out_desc, buffers.index(n % 2)),
                *(N, SCALE, BIAS, GATE),
            )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def large_kernel(  # type: ignore[no-untyped-def]
    x_desc,  # [M, K] in tiles of HEIGHT x DEPTH
    w_desc,  # [N, K] in tiles of COLS x DEPTH, or with GATE [2 N, K] in tiles of gates and ups
    out_desc,  # [M, N] in tiles of HEIGHT x CHUNK
    scaled_desc,  # likewise, with ADD
    residual_desc,  # likewise
    bias,
    squares,
    norm,
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
    PAIRS: gl.constexpr,
    GROUPS: gl.constexpr,
    NARROW: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Further arguments are those of `linear_kernel`. With PAIRS two programs have one part of a tile each.

    GROUPS: of four warps, each with HEIGHT rows of a tile; three for linears without split inputs or a residual.
    NARROW: tiles have three quarters of the columns, of two groups, for linears with neither of them nor a gate; then
    w_desc has tiles of a quarter.
    """
    STEPS: gl.constexpr = K // SPLIT // DEPTH
    OUT_COLS: gl.constexpr = COLS // 2 if GATE else COLS * 3 // 4 if NARROW else COLS
    COL_TILES: gl.constexpr = (N + OUT_COLS - 1) // OUT_COLS
    ROWS: gl.constexpr = GROUPS * HEIGHT
    ring = new_ring(x_desc, w_desc, GROUPS)
    first = gl.allocate_shared_memory(out_desc.dtype, [2, HEIGHT, CHUNK], out_desc.layout)
    second = gl.allocate_shared_memory(out_desc.dtype, [2, HEIGHT, CHUNK], out_desc.layout)
    program, programs = gl.program_id(0), gl.num_programs(0)
    items = (M + ROWS - 1) // ROWS * COL_TILES * (SPLIT if PAIRS else 1)
    count = (items - program + programs - 1) // programs * (1 if PAIRS else SPLIT)
    half_tile = -1
    if SPLIT == 1 and not ADD and not NARROW:
        # Tiles that would keep only half of the programs busy at the end are halved.
        left = items % programs
        halved = 2 * left <= programs
        count = gl.where(halved, items // programs, count)
        half_tile = gl.where(halved & (program < 2 * left), 2 * (items - left) + program, -1)
    work = (count, half_tile, M)
    pointers = (bias, norm, next_squares, stale_squares)
    known = (work, ring, pointers, (out_desc, scaled_desc, residual_desc), (partial, arrived, squares), eps)
    matrices = (x_desc, w_desc, residual_desc)
    # Lists of registers per thread are those of all groups but the first, which has the rest: as many, or eight more.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (finish_tiles, (0, first, known, STEPS, SPLIT, COL_TILES, PAIRS, N, K, SCALE, BIAS, GATE, ADD, NARROW)),
                (
                    finish_tiles,
                    (1, second, known, STEPS, SPLIT, COL_TILES, PAIRS, N, K, SCALE, BIAS, GATE, ADD, NARROW),
                ),
                (copy_tiles, (matrices, work, ring, STEPS, SPLIT, COL_TILES, PAIRS, GATE, ADD, NARROW)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        third = gl.allocate_shared_memory(out_desc.dtype, [2, HEIGHT, CHUNK], out_desc.layout)
        gl.warp_specialize(
            [
                (finish_tiles, (0, first, known, STEPS, SPLIT, COL_TILES, PAIRS, N, K, SCALE, BIAS, GATE, ADD, NARROW)),
                (
                    finish_tiles,
                    (1, second, known, STEPS, SPLIT, COL_TILES, PAIRS, N, K, SCALE, BIAS, GATE, ADD, NARROW),
                ),
                (finish_tiles, (2, third, known, STEPS, SPLIT, COL_TILES, PAIRS, N, K, SCALE, BIAS, GATE, ADD, NARROW)),
                (copy_tiles, (matrices, work, ring, STEPS, SPLIT, COL_TILES, PAIRS, GATE, ADD, NARROW)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


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
