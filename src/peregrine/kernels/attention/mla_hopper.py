"""Multi-head latent attention (MLA) for Hopper, in Gluon: the arithmetic of `mla_triton.py`, bit for bit.

A program has three kinds of warps: one copies its part of the keys by TMA, four turn scores into weights, four or eight
add weighted latents to acc. While the latents of one block are added, the next block is weighed. A block of keys lies
in columns of 64 entries; those of the latent serve twice, for scores and for acc, the rotated part once. A tile has 16
(query, head) pairs or 64: a larger acc would not fit into registers. Matrices are transposed, keys by query rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.attention import plan
from peregrine.kernels.attention.blocks import LOG2_E, LOWEST, find_tile_fn, power_of_two_fn
from peregrine.kernels.attention.hopper import BLOCK, WIDTH, load_queries, slots_of
from peregrine.kernels.runtime.layouts import product_layout

split_width = gluon.jit(plan.mla_split_width)
max_keys = gluon.jit(plan.mla_max_keys)
find_tile = gluon.jit(find_tile_fn)
power_of_two = gluon.jit(power_of_two_fn)

# Lines of `row_stats`, a number for each row of the tile, through which the weighing warps speak to those that add.
KEPT = gl.constexpr(0)  # factor of the split's acc before a block is added; at the very end l, which divides the total
TOTAL_KEPT = gl.constexpr(1)  # at the end of a split: factor of the total acc
TOTAL_ADDED = gl.constexpr(2)  # at the end of a split: factor of the split's acc
LIMIT = gl.constexpr(3)  # keys that the row sees, an int32
TOTAL_M = gl.constexpr(4)
TOTAL_L = gl.constexpr(5)


@gluon.jit
def rows_of_tile(  # type: ignore[no-untyped-def]
    tile, q_start, q_len, HEADS: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr
):
    """(token, head, whether there is such a pair) of each row of a tile."""
    HEADS_EACH: gl.constexpr = HEADS if HEADS < ROWS else ROWS
    QUERIES: gl.constexpr = ROWS // HEADS_EACH
    HEAD_TILES: gl.constexpr = (HEADS + HEADS_EACH - 1) // HEADS_EACH
    in_tile = gl.arange(0, ROWS, layout)
    query = tile // HEAD_TILES * QUERIES + in_tile // HEADS_EACH
    head = tile % HEAD_TILES * HEADS_EACH + in_tile % HEADS_EACH
    return q_start + query, head, (in_tile < QUERIES * HEADS_EACH) & (head < HEADS) & (query < q_len)


@gluon.jit
def key_limits(positions, tokens, live, num_keys):  # type: ignore[no-untyped-def]
    """How many keys each row sees; none if it is not live."""
    position = gl.load(positions + tokens, mask=live, other=0).to(gl.int32)
    return gl.where(live, gl.minimum(position + 1, num_keys), 0)


@gluon.jit
def num_sides(min_limit, max_limit):  # type: ignore[no-untyped-def]
    """2 if the rows of a tile, which see min_limit to max_limit keys, have splits of two widths, else 1."""
    return 1 + (max_limit > max_keys(split_width(min_limit))).to(gl.int32)


@gluon.jit
def program_splits(side, min_limit, max_limit, program, programs):  # type: ignore[no-untyped-def]
    """A program's part of the splits of one width: (first split, split after its last, their width, keys they hold)."""
    width = split_width(gl.where(side == 0, min_limit, max_limit))
    seen = gl.minimum(max_limit, max_keys(width))
    count = (seen + width - 1) // width
    return count * program // programs, count * (program + 1) // programs, width, seen


@gluon.jit
def copy_keys(  # type: ignore[no-untyped-def]
    keys, table, past, part, ring, PAGE: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr
):
    """One warp: copy block after block as places of the ring become free.

    Keys from before this forward are copied while the previous kernel is still running.
    """
    min_limit, max_limit, program, programs = part
    tiles, ready, free = ring
    PIECE: gl.constexpr = PAGE if PAGE < BLOCK else BLOCK
    i = 0
    for side in range(num_sides(min_limit, max_limit)):
        run, run_end, width, seen = program_splits(side, min_limit, max_limit, program, programs)
        begin, stop = run * width, gl.minimum(run_end * width, seen)
        slots = slots_of(table, begin, max_limit, PAGE, PIECE)
        next_slots = slots_of(table, begin + BLOCK, max_limit, PAGE, PIECE)
        for start in range(begin, stop, BLOCK):
            # Loaded two blocks ahead: behind copies of keys in flight a load takes as long as they do.
            far_slots = slots_of(table, start + 2 * BLOCK, max_limit, PAGE, PIECE)
            place = i % STAGES
            mbarrier.wait(free.index(place), ((i // STAGES) & 1) ^ 1)
            if start + BLOCK > past:  # holds keys of this forward
                gdc_wait()
            mbarrier.expect(ready.index(place), 2 * BLOCK * COLUMNS * WIDTH)
            for piece in gl.static_range(BLOCK // PIECE):
                for c in gl.static_range(COLUMNS):
                    column = tiles.index(place * COLUMNS + c).slice(piece * PIECE, PIECE)
                    tma.async_copy_global_to_shared(keys, [slots[piece], c * WIDTH], ready.index(place), column)
            slots, next_slots = next_slots, far_slots
            i += 1


@gluon.jit
def rows_of_width(row_stats, width, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Which rows of the tile have splits of this width."""
    return split_width(row_stats.index(LIMIT).load(layout).to(gl.int32, bitcast=True)) == width


@gluon.jit
def weigh_keys(  # type: ignore[no-untyped-def]
    queries,
    partial_ml,
    first_place,
    part,
    ring,
    q_tiles,
    weights,
    HEADS: gl.constexpr,
    COLUMNS: gl.constexpr,
    SPLIT_KV: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Four warps: the scores of a block become weights in `p_tile`, and l their sum."""
    q, q_stride, factor, positions, num_keys, tile, q_start, q_len = queries
    min_limit, max_limit, program, programs = part
    tiles, ready, _ = ring
    p_tile, row_stats, p_ready, p_free = weights
    ROWS: gl.constexpr = p_tile.shape[1]
    NUMBER: gl.constexpr = p_tile.dtype
    product: gl.constexpr = product_layout(ROWS)
    in_rows: gl.constexpr = gl.SliceLayout(0, product)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tokens, heads, live = rows_of_tile(tile, q_start, q_len, HEADS, ROWS, gl.SliceLayout(1, flat))
    row_stats.index(LIMIT).store(key_limits(positions, tokens, live, num_keys).to(gl.float32, bitcast=True))
    ones = gl.full([64, 16], 1.0, NUMBER, gl.DotOperandLayout(operand_index=0, parent=product, k_width=2))
    gdc_wait()
    gdc_launch_dependents()
    load_queries(q, q_tiles, tokens, heads, live, q_stride, COLUMNS, flat)
    gl.thread_barrier()
    row_stats.index(TOTAL_M).store(gl.full([ROWS], LOWEST, gl.float32, in_rows))
    row_stats.index(TOTAL_L).store(gl.zeros([ROWS], gl.float32, in_rows))
    i = 0
    for side in range(num_sides(min_limit, max_limit)):
        run, run_end, width, seen = program_splits(side, min_limit, max_limit, program, programs)
        for split in range(run, run_end):
            m_i = gl.full([ROWS], LOWEST, gl.float32, in_rows)
            l_i = gl.zeros([64, ROWS], gl.float32, product)
            stop = gl.minimum((split + 1) * width, seen)
            for start in range(split * width, stop, BLOCK):
                place = i % STAGES
                mbarrier.wait(ready.index(place), (i // STAGES) & 1)
                scores = gl.zeros([BLOCK, ROWS], gl.float32, product)
                for c in gl.static_range(COLUMNS):
                    q_tile = q_tiles.index(c).permute((1, 0))
                    scores = warpgroup_mma(tiles.index(place * COLUMNS + c), q_tile, scores, is_async=True)
                scores = warpgroup_mma_wait(0, deps=(scores,)) * factor  # [BLOCK, ROWS]
                if start + BLOCK > min_limit:  # some rows do not see some keys
                    index = start + gl.arange(0, BLOCK, gl.SliceLayout(1, product))
                    limit = row_stats.index(LIMIT).load(in_rows).to(gl.int32, bitcast=True)
                    scores = gl.where(index[:, None] < limit[None, :], scores, float("-inf"))
                new_m = gl.maximum(m_i, gl.ceil(gl.max(scores, axis=0)))
                p = gl.exp2(scores - new_m[None, :]).to(NUMBER)
                kept = power_of_two(m_i - new_m)
                m_i = new_m
                mbarrier.wait(p_free, (i & 1) ^ 1)
                p_tile.store(p)
                row_stats.index(KEPT).store(kept)
                if not SPLIT_KV:  # noqa: SIM102
                    if start + BLOCK >= stop:
                        total_m = row_stats.index(TOTAL_M).load(in_rows)
                        new_total = gl.maximum(total_m, m_i)
                        row_stats.index(TOTAL_KEPT).store(power_of_two(total_m - new_total))
                        row_stats.index(TOTAL_ADDED).store(power_of_two(m_i - new_total))
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(p_ready, count=1)
                l_i = l_i * kept[None, :]
                for k in gl.static_range(BLOCK // 16):
                    l_i = warpgroup_mma(ones, p_tile.slice(k * 16, 16), l_i, is_async=True)
                l_i = warpgroup_mma_wait(0, deps=(l_i,))
                i += 1
            row_l = gl.max(l_i, axis=0)
            mine = rows_of_width(row_stats, width, in_rows)
            if SPLIT_KV:
                stats_to = partial_ml + (first_place + split * ROWS + gl.arange(0, ROWS, in_rows)) * 2
                gl.store(stats_to, m_i, mask=mine)
                gl.store(stats_to + 1, row_l, mask=mine)
            else:
                total_m, total_l = row_stats.index(TOTAL_M).load(in_rows), row_stats.index(TOTAL_L).load(in_rows)
                new_total = gl.maximum(total_m, m_i)
                kept, added = power_of_two(total_m - new_total), power_of_two(m_i - new_total)
                row_stats.index(TOTAL_L).store(gl.where(mine, total_l * kept + row_l * added, total_l))
                row_stats.index(TOTAL_M).store(gl.where(mine, new_total, total_m))
    if not SPLIT_KV:
        mbarrier.wait(p_free, (i & 1) ^ 1)
        row_stats.index(KEPT).store(row_stats.index(TOTAL_L).load(in_rows))
        gl.thread_barrier()
        mbarrier.arrive(p_ready, count=1)


@gluon.jit
def add_values(  # type: ignore[no-untyped-def]
    out,
    partial_acc,
    first_place,
    part,
    ring,
    weights,
    COLUMNS: gl.constexpr,
    LATENT: gl.constexpr,
    SPLIT_KV: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The other warps: add weighted latents to acc, split by split.

    The acc of a split is stored if SPLIT_KV, else added to the total, which is in memory: registers are full.
    """
    min_limit, max_limit, program, programs = part
    tiles, ready, free = ring
    p_tile, row_stats, p_ready, p_free = weights
    ROWS: gl.constexpr = p_tile.shape[1]
    RANK: gl.constexpr = LATENT * WIDTH
    TALL: gl.constexpr = 16 * WARPS  # entries of a latent that all warps together multiply
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    in_rows: gl.constexpr = gl.SliceLayout(0, acc_layout)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    rows = gl.arange(0, ROWS, in_rows)[None, :]
    entries = gl.arange(0, TALL, gl.SliceLayout(1, acc_layout))[:, None]
    partial_acc += first_place * RANK
    out += first_place * RANK
    i = 0
    for side in range(num_sides(min_limit, max_limit)):
        run, run_end, width, seen = program_splits(side, min_limit, max_limit, program, programs)
        for split in range(run, run_end):
            acc = ()
            for _ in gl.static_range(RANK // TALL):
                acc = acc + (gl.zeros([TALL, ROWS], gl.float32, acc_layout),)  # type: ignore[assignment]  # noqa: RUF005
            stop = gl.minimum((split + 1) * width, seen)
            for start in range(split * width, stop, BLOCK):
                place = i % STAGES
                mbarrier.wait(ready.index(place), (i // STAGES) & 1)
                mbarrier.wait(p_ready, i & 1)
                # What follows the last key may be NaN, and so is 0 * NaN.
                if start + BLOCK > max_limit:
                    inside = start + gl.arange(0, BLOCK, gl.SliceLayout(1, flat)) < max_limit
                    for c in gl.static_range(LATENT):
                        column = tiles.index(place * COLUMNS + c)
                        column.store(gl.where(inside[:, None], column.load(flat), 0.0))
                    fence_async_shared()
                kept = row_stats.index(KEPT).load(in_rows)[None, :]
                added = ()
                for c in gl.static_range(len(acc)):
                    # Columns are adjacent in memory: two of them are one wider tile.
                    column = tiles.index(place * COLUMNS + c * TALL // WIDTH)
                    column = column._reinterpret(column.dtype, [BLOCK, TALL], column.layout).permute((1, 0))
                    added = added + (warpgroup_mma(column, p_tile, acc[c] * kept, is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
                done = warpgroup_mma_wait(0, deps=added)
                acc = (done,) if len(added) == 1 else done  # a single one is not returned as a tuple
                if not SPLIT_KV:  # noqa: SIM102
                    if start + BLOCK >= stop:
                        mine = rows_of_width(row_stats, width, in_rows)
                        for c in gl.static_range(len(acc)):  # a thread reads what it wrote itself
                            held = partial_acc + rows * RANK + entries + c * TALL
                            before = gl.load(held, mask=mine[None, :] & (split > run), other=0.0)
                            before = before * row_stats.index(TOTAL_KEPT).load(in_rows)[None, :]
                            whole = before + acc[c] * row_stats.index(TOTAL_ADDED).load(in_rows)[None, :]
                            gl.store(held, whole, mask=mine[None, :])
                gl.thread_barrier()
                mbarrier.arrive(free.index(place), count=1)
                mbarrier.arrive(p_free, count=1)
                i += 1
            if SPLIT_KV:
                mine = rows_of_width(row_stats, width, in_rows)
                for c in gl.static_range(len(acc)):
                    held = partial_acc + split * (ROWS * RANK) + rows * RANK + entries + c * TALL
                    gl.store(held, acc[c], mask=mine[None, :])
    if not SPLIT_KV:
        mbarrier.wait(p_ready, i & 1)
        divisor = row_stats.index(KEPT).load(in_rows)[None, :]
        live = row_stats.index(LIMIT).load(in_rows).to(gl.int32, bitcast=True)[None, :] > 0
        for c in gl.static_range(RANK // TALL):
            at = rows * RANK + entries + c * TALL
            whole = gl.load(partial_acc + at, mask=live, other=0.0)
            gl.store(out + at, (whole / divisor).to(out.dtype.element_ty), mask=live)


@gluon.jit(do_not_specialize=["q_len", "num_rows", "num_pages", "max_splits"])
def mla_hopper_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, HEADS, RANK + ROPE], tokens q_stride apart
    out,  # [N, HEADS, RANK]
    keys,  # [slots, RANK + ROPE] in pages by columns
    positions,  # [N]
    q_starts,  # [R + 1]
    past_lens,  # [R]
    table,  # [R, num_pages]
    partial_acc,  # f32 if SPLIT_KV [R * tiles, max_splits, ROWS, RANK], else [N, HEADS, RANK]
    partial_ml,  # [R * tiles, max_splits, ROWS, 2] f32
    scale,
    q_len,
    q_stride,
    num_rows,
    num_pages,
    max_splits,
    HEADS: gl.constexpr,
    RANK: gl.constexpr,
    ROPE: gl.constexpr,
    PAGE: gl.constexpr,
    ROWS: gl.constexpr,
    SPLIT_KV: gl.constexpr,
    STAGES: gl.constexpr,
    ABOVE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid if SPLIT_KV (programs, tiles, rows), else (places for tiles,), as `mla_kernel`.

    Tiles whose queries see ABOVE keys or fewer are left out.
    """
    LATENT: gl.constexpr = RANK // WIDTH
    COLUMNS: gl.constexpr = (RANK + ROPE) // WIDTH
    HEADS_EACH: gl.constexpr = HEADS if HEADS < ROWS else ROWS
    QUERIES: gl.constexpr = ROWS // HEADS_EACH
    HEAD_TILES: gl.constexpr = (HEADS + HEADS_EACH - 1) // HEADS_EACH
    if SPLIT_KV:
        program, programs = gl.program_id(0), gl.num_programs(0)
        tile, row = gl.program_id(1), gl.program_id(2)
        q_start = row * q_len
    else:
        program, programs = 0, 1
        last_first = gl.num_programs(0) - 1 - gl.program_id(0)
        row, q_start, q_len, tile = find_tile(last_first, q_starts, num_rows, QUERIES, HEAD_TILES)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ROWS, element_bitwidth=16, rank=2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(keys.dtype, [STAGES * COLUMNS, BLOCK, WIDTH], keys.layout)
    q_tiles = gl.allocate_shared_memory(keys.dtype, [COLUMNS, ROWS, WIDTH], keys.layout)
    p_tile = gl.allocate_shared_memory(keys.dtype, [BLOCK, ROWS], p_layout)
    row_stats = gl.allocate_shared_memory(gl.float32, [6, ROWS], line)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(ready.index(place), count=1)
        mbarrier.init(free.index(place), count=1)
    mbarrier.init(p_ready, count=1)
    mbarrier.init(p_free, count=1)
    fence_async_shared()
    past = gl.load(past_lens + row).to(gl.int32)
    spread: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    tokens, _, live = rows_of_tile(tile, q_start, q_len, HEADS, ROWS, spread)
    limit = key_limits(positions, tokens, live, num_pages * PAGE)
    max_limit = gl.max(limit, axis=0)
    min_limit = gl.min(gl.where(live, limit, max_limit), axis=0)
    if ABOVE > 0:
        is_left_out = max_limit <= ABOVE
        q_len = gl.where(is_left_out, 0, q_len)
        min_limit, max_limit = gl.where(is_left_out, 0, min_limit), gl.where(is_left_out, 0, max_limit)
    # The outputs of a tile's live rows are adjacent, and these rows come first.
    if SPLIT_KV:
        first_place = (row * gl.num_programs(1) + tile).to(gl.int64) * max_splits * ROWS
    else:
        first_token = q_start + tile // HEAD_TILES * QUERIES
        first_place = first_token.to(gl.int64) * HEADS + tile % HEAD_TILES * HEADS_EACH
    row_table = table + row.to(gl.int64) * num_pages
    factor = scale * LOG2_E
    part = (min_limit, max_limit, program, programs)
    weights = (p_tile, row_stats, p_ready, p_free)
    ring = (tiles, ready, free)
    queries = (q, q_stride, factor, positions, num_pages * PAGE, tile, q_start, q_len)
    gl.warp_specialize(
        [
            (
                add_values,
                (out, partial_acc, first_place, part, ring, weights, COLUMNS, LATENT, SPLIT_KV, STAGES, num_warps),
            ),
            (
                weigh_keys,
                (queries, partial_ml, first_place, part, ring, q_tiles, weights, HEADS, COLUMNS, SPLIT_KV, STAGES),
            ),
            (copy_keys, (keys, row_table, past, part, ring, PAGE, COLUMNS, STAGES)),
        ],
        [4, 1],
        [160, 24],  # registers per thread of the last two kinds; the first has the rest
    )
