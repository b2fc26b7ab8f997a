"""How Hopper's kernels for many rows finish the sums of a tile, in Gluon: in chunks of CHUNK outputs.

A chunk is divided by the norm, gated or added to the residual stream, as `epilogue.py` says, and leaves through shared
memory. Tiles of odd eighths have chunks of half as many outputs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from peregrine.kernels.linear.epilogue import gated, reset_squares
from peregrine.kernels.linear.hopper_ring import CHUNK, HEIGHT
from peregrine.kernels.residual.reference import MAX_SQUARE, SQUARE_UNIT
from peregrine.kernels.residual.triton import counted_square, fine_square, is_small, root_mean_square, weighted
from peregrine.kernels.runtime.layouts import product_layout
from peregrine.kernels.runtime.rounding import rounded

SQUARE_ROOT_OF_UNIT = gl.constexpr(SQUARE_UNIT**0.5)
MAX_UNITS = gl.constexpr(MAX_SQUARE * SQUARE_UNIT)


@gluon.jit
def halves(total):  # type: ignore[no-untyped-def]
    """Left and right half of the columns."""
    WIDTH: gl.constexpr = total.shape[1] // 2
    product: gl.constexpr = product_layout(WIDTH)
    left, right = gl.split(gl.permute(gl.reshape(total, [HEIGHT, 2, WIDTH]), [0, 2, 1]))
    return gl.convert_layout(left, product, assert_trivial=True), gl.convert_layout(right, product, assert_trivial=True)


@gluon.jit
def cut(total, EACH: gl.constexpr):  # type: ignore[no-untyped-def]
    """Columns in chunks of EACH; fewer are one."""
    if total.shape[1] <= EACH:
        chunks = (total,)
    else:
        left, right = halves(total)
        if total.shape[1] == 2 * EACH:  # noqa: SIM108
            chunks = (left, right)  # type: ignore[assignment]
        else:
            chunks = halves(left) + halves(right)
    return chunks


@gluon.jit
def in_chunks(total, GATE: gl.constexpr, EACH: gl.constexpr = CHUNK):  # type: ignore[no-untyped-def]
    """Columns of a tile in chunks: (sums, or gates; ups)."""
    if GATE:
        WIDTH: gl.constexpr = total.shape[1] // 2
        product: gl.constexpr = product_layout(WIDTH)
        gate, up = gl.split(gl.permute(gl.reshape(total, [HEIGHT, WIDTH // 8, 2, 8]), [0, 1, 3, 2]))
        gate = gl.convert_layout(gl.reshape(gate, [HEIGHT, WIDTH]), product, assert_trivial=True)
        up = gl.convert_layout(gl.reshape(up, [HEIGHT, WIDTH]), product, assert_trivial=True)
        chunks, ups = cut(gate, EACH), cut(up, EACH)
    else:
        chunks = cut(total, EACH)
        ups = chunks
    return chunks, ups


@gluon.jit
def all_chunks(total, beside, BESIDE: gl.constexpr, GATE: gl.constexpr, EACH: gl.constexpr):  # type: ignore[no-untyped-def]
    """`in_chunks` of what `multiply` returns, whose second sums count with BESIDE only."""
    chunks, ups = in_chunks(total, GATE, EACH)
    if BESIDE:
        more_chunks, more_ups = in_chunks(beside, GATE, EACH)
        chunks, ups = chunks + more_chunks, ups + more_ups
    return chunks, ups


@gluon.jit
def pick(chunks, c):  # type: ignore[no-untyped-def]
    """The chunk of a number that is known at run time: code that is repeated would not fit the instruction cache."""
    if len(chunks) == 3:
        chunk = gl.where(c == 0, chunks[0], gl.where(c == 1, chunks[1], chunks[2]))
    elif len(chunks) == 4:
        chunk = gl.where(c < 2, gl.where(c == 0, chunks[0], chunks[1]), gl.where(c == 2, chunks[2], chunks[3]))
    elif len(chunks) == 5:
        chunk = gl.where(c == 4, chunks[4], pick(chunks[:4], c))
    elif len(chunks) == 2:
        chunk = gl.where(c == 0, chunks[0], chunks[1])
    else:
        chunk = chunks[0]
    return chunk


@gluon.jit
def added(kept, chunks):  # type: ignore[no-untyped-def]
    """The chunks of one part of the inputs added to those of the parts before."""
    sums = (kept[0] + chunks[0],)
    for c in gl.static_range(1, len(chunks)):
        sums = sums + (kept[c] + chunks[c],)  # type: ignore[assignment]  # noqa: RUF005 - Gluon unpacks no tuples
    return sums


@gluon.jit
def column_values(vector, col, chunk, N: gl.constexpr):  # type: ignore[no-untyped-def]
    """The values of a vector [N] for the columns of a chunk; past the last column they are those of others."""
    cols = gl.arange(0, chunk.shape[1], gl.SliceLayout(0, chunk.type.layout))
    # Most weights need one remainder for the whole chunk.
    return gl.load(vector + (col + cols) % N) if N % chunk.shape[1] else gl.load(vector + col % N + cols)


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
        factor = gl.convert_layout(factor, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
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
def finish_part(  # type: ignore[no-untyped-def]
    total, buffer, col, ends, N: gl.constexpr, SCALE: gl.constexpr, BIAS: gl.constexpr, GATE: gl.constexpr
):
    """Finish some columns of a piece, from that buffer on.

    A quarter of gates and ups has half a chunk of outputs, which leaves through tiles of that width (half_desc).
    """
    factor, row, bias, out_desc, half_desc, buffers = ends
    chunks, ups = in_chunks(total, GATE)
    for n in range(len(chunks)):
        chunk, up, place = pick(chunks, n), pick(ups, n), buffers.index((buffer + n) % 2)
        at = col + n * CHUNK
        if chunks[0].shape[1] == CHUNK:
            finish_chunk(chunk, up, factor, row, at, bias, out_desc, place, N, SCALE, BIAS, GATE)
        else:
            half = place._reinterpret(out_desc.dtype, [2, HEIGHT, CHUNK // 2], half_desc.layout).index(0)
            finish_chunk(chunk, up, factor, row, at, bias, half_desc, half, N, SCALE, BIAS, GATE)


@gluon.jit
def column_sums(values):  # type: ignore[no-untyped-def]
    """[HEIGHT, columns of a chunk] -> [HEIGHT, 8], the sums of those that are 8 apart: each thread has all of them."""
    return gl.sum(gl.reshape(values, [HEIGHT, values.shape[1] // 8, 8]), axis=1)


@gluon.jit
def add_chunk(  # type: ignore[no-untyped-def]
    total,
    residual,
    weights,
    bias,
    row,
    col,
    out_desc,
    scaled_desc,
    buffer,
    N: gl.constexpr,
    TILE: gl.constexpr,
    BIAS: gl.constexpr,
):
    """`finish_outputs` with a residual for one chunk of a tile of TILE columns: the sum leaves in place of the
    residual, the sum scaled through a buffer.

    Returns `column_sums` of the squares in units, as whole numbers and as they are. Threads wait for each other here as
    little as can be; whether all squares can be counted and no row is small, which is nearly always so, is asked once a
    tile (`finish_squares`).
    """
    layout: gl.constexpr = total.type.layout
    if BIAS:
        total += column_values(bias, col, total, N).to(gl.float32)[None, :]
    result = rounded(total + residual.load(layout).to(gl.float32), out_desc.dtype, True)
    value = counted(result, col, N, TILE)
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
def counted(values, col, N: gl.constexpr, TILE: gl.constexpr):  # type: ignore[no-untyped-def]
    """The values of a chunk in float32; 0 in columns past the last, where whole chunks of a tile may lie."""
    values = values.to(gl.float32)
    if N % TILE:
        cols = col + gl.arange(0, values.shape[1], gl.SliceLayout(0, values.type.layout))
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
    TILE: gl.constexpr,
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
        WIDTH: gl.constexpr = scaled_desc.block_shape[1]
        layout: gl.constexpr = product_layout(WIDTH)
        coarse, fine = coarse * 0, coarse * 0
        rows = when_written(rows)
        for n in range(CHUNKS):
            at = col + n * WIDTH
            again = counted(residual.index(n).load(layout), at, N, TILE)
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
