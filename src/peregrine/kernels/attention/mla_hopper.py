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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.attention.blocks import LOG2_E, LOWEST
from peregrine.kernels.attention.hopper import BLOCK, WIDTH, load_queries
from peregrine.kernels.attention.mla_hopper_keys import (
    copy_keys,
    find_tile,
    key_limits,
    num_sides,
    power_of_two,
    program_splits,
    rows_of_tile,
)
from peregrine.kernels.attention.mla_hopper_values import (
    KEPT,
    LIMIT,
    TOTAL_ADDED,
    TOTAL_KEPT,
    TOTAL_L,
    TOTAL_M,
    add_values,
    rows_of_width,
)
from peregrine.kernels.runtime.layouts import product_layout


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
