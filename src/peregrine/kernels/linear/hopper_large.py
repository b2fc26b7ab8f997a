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
    column_sums,
    column_values,
    finish_chunk,
    finish_squares,
    in_chunks,
    pick,
    places,
    row_factors,
)
from peregrine.kernels.linear.hopper_ring import (
    CHUNK,
    COLS,
    DEPTH,
    HEIGHT,
    copy_tiles,
    multiply,
    new_ring,
    place_of,
    residual_chunks,
    rows_of,
    work_of,
)
from peregrine.kernels.runtime.layouts import product_layout


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
