"""The linear kernel for Hopper and many rows, in Gluon: the arithmetic of `hopper.py`, bit for bit.

Some warps copy tiles and others multiply them (`hopper_ring.py`), and these finish their outputs (`hopper_chunks.py`)
while the copies for the next tile are under way.

Same bits: a matrix instruction adds the products of 16 inputs to a sum, in ascending order and whatever the tile, so an
output is the same chain as in the other kernels. A weight whose inputs are split (`pick_split`) has a chain for each
part, added in order. A tile's sums fill half of all registers, so those of one part cannot all stay there until the
next part is done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.linear.hopper_chunks import (
    add_chunk,
    added,
    all_chunks,
    column_sums,
    column_values,
    finish_chunk,
    finish_part,
    finish_squares,
    pick,
    row_factors,
)
from peregrine.kernels.linear.hopper_pairs import exchanged, places
from peregrine.kernels.linear.hopper_ring import (
    CHUNK,
    COLS,
    DEPTH,
    HEIGHT,
    copy_tiles,
    multiply,
    new_ring,
    piece_of,
    residual_chunks,
    rows_of,
    work_of,
)
from peregrine.kernels.runtime.layouts import product_layout


@gluon.jit
def finish_sums(  # type: ignore[no-untyped-def]
    sums,
    buffers,
    known,
    WHICH: gl.constexpr,
    TILE: gl.constexpr,
    N: gl.constexpr,
    SCALE: gl.constexpr,
    BIAS: gl.constexpr,
    GATE: gl.constexpr,
    ADD: gl.constexpr,
):
    """Finish the chunks of a tile of TILE columns, or of half of one. Returns the steps done so far."""
    chunks, ups, factor, i, row, own, col = sums
    work, ring, pointers, outputs, _, _ = known
    _, _, _, M = work
    x_tiles, w_boxes, ready, free, _ = ring
    bias, norm, next_squares, stale_squares = pointers
    out_desc, scaled_desc, residual_desc = outputs
    STAGES: gl.constexpr = ready.shape[0]
    GROUPS: gl.constexpr = x_tiles.shape[0] // STAGES
    EACH: gl.constexpr = out_desc.block_shape[1]
    if ADD:
        weights = column_values(norm, col, chunks[0], N)
        for other in gl.static_range(GROUPS):
            if other != WHICH:
                theirs = i + other
                mbarrier.wait(ready.index(theirs % STAGES), (theirs // STAGES) & 1)
                gl.thread_barrier()
                mbarrier.arrive(free.index(theirs % STAGES), count=1)
        mine = (i + WHICH) % STAGES
        mbarrier.wait(ready.index(mine), ((i + WHICH) // STAGES) & 1)
        residual = residual_chunks(w_boxes, mine, ready, residual_desc)
        nothing = gl.zeros((HEIGHT, EACH), gl.float32, product_layout(EACH))
        whole, units = column_sums(nothing.to(gl.int64)), column_sums(nothing)
    for n in range(len(chunks)):
        at = col + n * EACH
        if ADD:
            now = weights
            weights = column_values(norm, at + EACH, chunks[0], N)  # a chunk ahead
            more_whole, more_units = add_chunk(
                *(pick(chunks, n), residual.index(n), now, bias, row, at),
                *(out_desc, scaled_desc, buffers.index(n % 2), N, TILE, BIAS),
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
            *(scaled_desc, buffers.index(0), len(chunks), TILE, N),
        )
        tma.store_wait(1)  # the sums have left this place
        gl.thread_barrier()
        mbarrier.arrive(free.index(mine), count=1)
        i += GROUPS
    return i


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
    EIGHTHS: gl.constexpr,
    REST: gl.constexpr,
):
    """Four warps that multiply and finish some of every tile's tokens."""
    work, ring, pointers, outputs, scratch, eps = known
    count, piece, cut_from, M = work
    x_tiles, ready, lead = ring[0], ring[2], ring[4]
    out_desc, scaled_desc = outputs[0], outputs[1]
    partial, arrived, squares = scratch
    STAGES: gl.constexpr = ready.shape[0]
    GROUPS: gl.constexpr = x_tiles.shape[0] // STAGES
    TILE: gl.constexpr = COLS * EIGHTHS // 8
    OUT_COLS: gl.constexpr = TILE // (2 if GATE else 1)
    EACH: gl.constexpr = out_desc.block_shape[1]  # outputs of a chunk
    # Columns of a tile's first product, which has a power of two of them; three groups have few registers.
    WIDTH: gl.constexpr = COLS if GROUPS == 2 and EIGHTHS == 8 else COLS // 2
    gdc_launch_dependents()
    gdc_wait()
    if WHICH > 0:
        mbarrier.wait(lead, 0, pred=(count > 0) | (piece >= 0))
    i = 0
    nothing = gl.zeros((HEIGHT, EACH), gl.float32, product_layout(EACH))
    none_kept = (nothing, nothing, nothing, nothing, nothing)[: TILE // EACH if EIGHTHS < 8 else 2]
    kept = none_kept
    for local in range(count):
        row, col, part = work_of(local, M, COL_TILES, SPLIT, GROUPS)
        row, own = rows_of(row, WHICH, M)
        col = col * OUT_COLS
        total, beside, i = multiply(ring, i, WHICH, STEPS, WIDTH, TILE - WIDTH)
        chunks, ups = all_chunks(total, beside, TILE > WIDTH, GATE, EACH)
        factor = row_factors(squares, row, eps, K, SCALE)
        is_last = True
        if SPLIT > 1:
            # Sums of a part wait for the next part in registers; of whole tiles a chunk in shared memory and one in L2.
            is_last = part == SPLIT - 1
            is_later = part > 0
            if EIGHTHS < 8:
                if is_later:
                    chunks = added(kept, chunks)
                kept = chunks
            else:
                parked = buffers._reinterpret(gl.float32, [HEIGHT, CHUNK], gl.NVMMASharedLayout(128, 32))
                in_l2 = places(partial + (gl.program_id(0) * 2 + WHICH) * (HEIGHT * CHUNK), nothing)
                if is_later:
                    last = gl.load(in_l2)
                    chunks = added(kept + (parked.load(nothing.type.layout), last), chunks)  # noqa: RUF005
                if part < SPLIT - 1:
                    tma.store_wait(0)
                    gl.thread_barrier()
                    parked.store(chunks[2])
                    gl.store(in_l2, chunks[3])
                kept = chunks[:2]
        if is_last:
            sums = (chunks, ups, factor, i, row, own, col)
            i = finish_sums(sums, buffers, known, WHICH, TILE, N, SCALE, BIAS, GATE, ADD)
            if SPLIT > 1:
                kept = none_kept
    if PAIRS and piece >= 0:
        last_row, last_col, last_part = piece_of(piece, cut_from, M, COL_TILES, GROUPS, TILE, SPLIT, REST)
        top, last_own = rows_of(last_row, WHICH, M)
        last, last_beside, i = multiply(ring, i, WHICH, STEPS, WIDTH, TILE - WIDTH)
        last_chunks, _same = all_chunks(last, last_beside, TILE > WIDTH, GATE, EACH)
        last_factor = row_factors(squares, top, eps, K, SCALE)
        # Behind the sums that wait for the next part.
        slots = partial + gl.num_programs(0) * 2 * (HEIGHT * CHUNK)
        mine = exchanged(last_chunks, last_part, (piece // SPLIT * GROUPS + WHICH) * 2, slots, arrived)
        last_sums = (mine, mine, last_factor, i, top, last_own, last_col + last_part * (TILE // 2))
        finish_sums(last_sums, buffers, known, WHICH, TILE, N, SCALE, BIAS, GATE, ADD)
    if REST and piece >= 0:
        last_row, last_col, _part = piece_of(piece, cut_from, M, COL_TILES, GROUPS, TILE, SPLIT, REST)
        top, _own = rows_of(last_row, WHICH, M)
        last_col = last_col // 2 if GATE else last_col
        last_factor = row_factors(squares, top, eps, K, SCALE)
        ends = (last_factor, top, pointers[0], out_desc, scaled_desc, buffers)
        QUARTER: gl.constexpr = COLS // 4
        BEGIN: gl.constexpr = QUARTER if REST == 1 else 2 * QUARTER
        begin, end, i = multiply(ring, i, WHICH, STEPS, BEGIN, REST * QUARTER - BEGIN)
        finish_part(begin, 0, last_col, ends, N, SCALE, BIAS, GATE)
        if REST == 3:  # the buffers go on taking turns
            finish_part(end, 1 if GATE else 2, last_col + COLS // (4 if GATE else 2), ends, N, SCALE, BIAS, GATE)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "tiles", "pieces"])
def large_kernel(  # type: ignore[no-untyped-def]
    x_desc,  # [M, K] in tiles of HEIGHT x DEPTH
    w_desc,  # [N, K] in boxes of columns x DEPTH, or with GATE [2 N, K] in boxes of gates and ups: see `LargePlan.box`
    out_desc,  # [M, N] in tiles of HEIGHT x CHUNK, with odd EIGHTHS of half as many columns
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
    tiles,  # that are not cut
    pieces,
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
    EIGHTHS: gl.constexpr,
    REST: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Further arguments are those of `linear_kernel`. With PAIRS a piece is one of two parts of a tile's inputs.

    GROUPS: of four warps, each with HEIGHT rows of a tile; three only if tiles have half of the columns, or without
    split inputs and a residual.
    EIGHTHS: of COLS in a tile: 8; with split inputs or a residual also 4, and with two groups 5.
    REST: quarters in the pieces that the last tiles are cut into, of linears without either; 0: they are not. If it is
    odd, w_desc has boxes of a quarter, and with GATE scaled_desc has tiles of half a chunk.
    """
    STEPS: gl.constexpr = K // SPLIT // DEPTH
    OUT_COLS: gl.constexpr = COLS * EIGHTHS // (16 if GATE else 8)
    COL_TILES: gl.constexpr = (N + OUT_COLS - 1) // OUT_COLS
    EACH: gl.constexpr = out_desc.block_shape[1]
    ring = new_ring(x_desc, w_desc, GROUPS, EIGHTHS, GATE)
    first = gl.allocate_shared_memory(out_desc.dtype, [2, HEIGHT, EACH], out_desc.layout)
    second = gl.allocate_shared_memory(out_desc.dtype, [2, HEIGHT, EACH], out_desc.layout)
    program, programs = gl.program_id(0), gl.num_programs(0)
    count = (tiles - program + programs - 1) // programs * SPLIT
    work = (count, gl.where(program < pieces, program, -1), tiles, M)
    pointers = (bias, norm, next_squares, stale_squares)
    known = (work, ring, pointers, (out_desc, scaled_desc, residual_desc), (partial, arrived, squares), eps)
    matrices = (x_desc, w_desc, residual_desc)
    # Lists of registers per thread are those of all groups but the first, which has the rest: as many, or eight more.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    finish_tiles,
                    (0, first, known, STEPS, SPLIT, COL_TILES, PAIRS, N, K, SCALE, BIAS, GATE, ADD, EIGHTHS, REST),
                ),
                (
                    finish_tiles,
                    (1, second, known, STEPS, SPLIT, COL_TILES, PAIRS, N, K, SCALE, BIAS, GATE, ADD, EIGHTHS, REST),
                ),
                (copy_tiles, (matrices, work, ring, STEPS, SPLIT, COL_TILES, PAIRS, GATE, ADD, EIGHTHS, REST)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        third = gl.allocate_shared_memory(out_desc.dtype, [2, HEIGHT, EACH], out_desc.layout)
        gl.warp_specialize(
            [
                (
                    finish_tiles,
                    (0, first, known, STEPS, SPLIT, COL_TILES, PAIRS, N, K, SCALE, BIAS, GATE, ADD, EIGHTHS, REST),
                ),
                (
                    finish_tiles,
                    (1, second, known, STEPS, SPLIT, COL_TILES, PAIRS, N, K, SCALE, BIAS, GATE, ADD, EIGHTHS, REST),
                ),
                (
                    finish_tiles,
                    (2, third, known, STEPS, SPLIT, COL_TILES, PAIRS, N, K, SCALE, BIAS, GATE, ADD, EIGHTHS, REST),
                ),
                (copy_tiles, (matrices, work, ring, STEPS, SPLIT, COL_TILES, PAIRS, GATE, ADD, EIGHTHS, REST)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
