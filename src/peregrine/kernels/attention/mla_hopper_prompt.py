"""MLA of prompts for Hopper, in Gluon: the arithmetic of `mla_triton.py`, bit for bit.

A program has a tile of 64 (query, head) pairs and loops over their keys, one split of two blocks at a time. Its warps:

- Two groups of four warps. Group g computes the scores and softmax weights of block g, then adds the latents of both
  blocks, weighted, to columns of half g of the output, one chunk of PAIR columns after the other. So only the
  output's total stays in registers; a split's own acc exists one chunk at a time.
- Two warps that copy the next split's blocks by TMA, each chunk of columns as soon as its memory is free.

A group has its own block's weights in registers. It writes them for the other group over the block's rotated (rope)
part in shared memory, which is not needed after the scores.

This kernel serves tiles with at most NARROW keys, whose splits are all two blocks wide; `mla_hopper.py` serves others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.attention import plan
from peregrine.kernels.attention.blocks import LOG2_E, LOWEST
from peregrine.kernels.attention.hopper import BLOCK, WIDTH, slots_of
from peregrine.kernels.attention.mla_hopper_keys import find_tile, key_limits, power_of_two, rows_of_tile
from peregrine.kernels.runtime.layouts import product_layout
from peregrine.kernels.runtime.rounding import rounded

ROWS = gl.constexpr(plan.TALL_TILE)
PAIR = gl.constexpr(2 * plan.HOPPER_COLUMN)  # columns of a latent that are copied and added at a time
NARROW = gl.constexpr(plan.mla_max_keys(2 * plan.BLOCK))  # the most keys for which splits have two blocks

# Lines of `row_stats`, one number for each row of the tile.
FIRST_M = gl.constexpr(0)  # the largest score of a split's first block, rounded up
SPLIT_M = gl.constexpr(1)  # the same of both blocks
KEPT = gl.constexpr(2)  # factor for the first block's l and acc: 2 ** (FIRST_M - SPLIT_M)
TOTAL_L = gl.constexpr(3)  # sum of weights over all splits


@gluon.jit
def copy_blocks(  # type: ignore[no-untyped-def]
    OWN: gl.constexpr, keys, table, max_limit, count, ring, PAGE: gl.constexpr, PAIRS: gl.constexpr
):
    """One warp: copy block OWN of every split, PAIR columns as soon as their memory is free."""
    tiles, ready, free = ring
    PIECE: gl.constexpr = PAGE if PAGE < BLOCK else BLOCK
    COLUMNS: gl.constexpr = 2 * PAIRS + 1
    gdc_wait()
    slots = slots_of(table, OWN * BLOCK, max_limit, PAGE, PIECE)
    for split in range(count):
        next_slots = slots_of(table, (2 * split + 2 + OWN) * BLOCK, max_limit, PAGE, PIECE)  # loaded a split ahead
        for step in gl.static_range(PAIRS + 1):
            mbarrier.wait(free.index(step if step < PAIRS else PAIRS + OWN), (split & 1) ^ 1)
            arrived = ready.index(OWN * (PAIRS + 1) + step)
            mbarrier.expect(arrived, 2 * BLOCK * WIDTH * min(2, COLUMNS - 2 * step))
            for piece in gl.static_range(BLOCK // PIECE):
                for c in gl.static_range(2 * step, min(2 * step + 2, COLUMNS)):
                    column = tiles.index(OWN * COLUMNS + c).slice(piece * PIECE, PIECE)
                    tma.async_copy_global_to_shared(keys, [slots[piece], c * WIDTH], arrived, column)
        slots = next_slots


@gluon.jit
def pair_of(tiles, first, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Tiles number `first` and `first + 1`, which are adjacent in memory, as one tile of PAIR columns."""
    return tiles.index(first)._reinterpret(tiles.dtype, [tiles.shape[1], PAIR], layout)


@gluon.jit
def sum_here(a, b):  # type: ignore[no-untyped-def]
    """a + b in assembly: the compiler would move it behind later products, for which registers do not suffice."""
    return gl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], gl.float32, False, 1)


@gluon.jit
def first_values(weights, values, COLUMNS: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the matrix product weights @ values, without waiting for it."""
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    return warpgroup_mma(weights, values, zero, use_acc=False, is_async=True)


@gluon.jit
def attend_splits(  # type: ignore[no-untyped-def]
    OWN: gl.constexpr, q, out, q_stride, rows, limits, factor, ring, shared, HEADS: gl.constexpr, PAIRS: gl.constexpr
):
    """Four warps: scores and weights of block OWN of every split; half OWN of the output's columns."""
    tile, q_start, q_len, first_place = rows
    positions, num_keys, min_limit, max_limit, count = limits
    tiles, ready, free = ring
    q_tiles, ones, row_stats, q_ready, p_ready, l_ready = shared
    COLUMNS: gl.constexpr = 2 * PAIRS + 1
    STEPS: gl.constexpr = PAIRS + 1
    CHUNKS: gl.constexpr = PAIRS // 2
    layout: gl.constexpr = tiles.layout
    NUMBER: gl.constexpr = q.dtype.element_ty
    s_layout: gl.constexpr = product_layout(BLOCK)
    acc_layout: gl.constexpr = product_layout(PAIR)
    l_layout: gl.constexpr = product_layout(8)
    in_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    l_rows: gl.constexpr = gl.SliceLayout(1, l_layout)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    flat_rows: gl.constexpr = gl.SliceLayout(1, flat)
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, flat))
    tokens, heads, live = rows_of_tile(tile, q_start, q_len, HEADS, ROWS, flat_rows)
    gdc_wait()
    gdc_launch_dependents()
    at = (tokens.to(gl.int64) * q_stride + heads * (COLUMNS * WIDTH))[:, None] + dim[None, :]
    for c in gl.static_range(OWN * PAIRS, PAIRS + OWN * STEPS):
        async_copy.async_copy_global_to_shared(q_tiles.index(c), q + at + c * WIDTH, mask=live[:, None])
    async_copy.commit_group()
    tokens, heads, live = rows_of_tile(tile, q_start, q_len, HEADS, ROWS, in_rows)
    limit = key_limits(positions, tokens, live, num_keys)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(q_ready, count=1)
    mbarrier.wait(q_ready, 0)
    total = ()
    for _ in gl.static_range(CHUNKS):
        total = total + (gl.zeros([ROWS, PAIR], gl.float32, acc_layout),)  # type: ignore[assignment]  # noqa: RUF005
    total_m = gl.full([ROWS], LOWEST, gl.float32, in_rows)
    total_l = gl.zeros([ROWS], gl.float32, l_rows)
    for split in range(count):
        phase = split & 1
        # Always 0; keeps the compiler from computing all addresses before the loop, for which registers do not suffice.
        none = split >> 24
        own_p = tiles.index(none + OWN * COLUMNS + 2 * PAIRS)
        other_p = tiles.index(none + (1 - OWN) * COLUMNS + 2 * PAIRS)
        start = (2 * split + OWN) * BLOCK
        if start + BLOCK > max_limit:  # values after the last key may be NaN, and 0 * NaN is NaN
            inside = start + gl.arange(0, BLOCK, flat_rows) < max_limit
            for step in gl.static_range(PAIRS):
                mbarrier.wait(ready.index(OWN * STEPS + step), phase)
            for c in gl.static_range(2 * PAIRS):
                column = tiles.index(none + OWN * COLUMNS + c)
                column.store(gl.where(inside[:, None], column.load(flat), 0.0))
            fence_async_shared()
            gl.thread_barrier()
        scores = gl.zeros([ROWS, BLOCK], gl.float32, s_layout)
        for step in gl.static_range(PAIRS):
            mbarrier.wait(ready.index(OWN * STEPS + step), phase)
            k_pair = pair_of(tiles, none + OWN * COLUMNS + 2 * step, layout).permute((1, 0))
            scores = warpgroup_mma(
                pair_of(q_tiles, none + 2 * step, layout), k_pair, scores, use_acc=step > 0, is_async=True
            )
        mbarrier.wait(ready.index(OWN * STEPS + PAIRS), phase)
        scores = warpgroup_mma(q_tiles.index(none + 2 * PAIRS), own_p.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,)) * factor
        gl.thread_barrier()  # all warps have read the rotated part, which the weights overwrite
        if start + BLOCK > min_limit:  # some rows do not see some keys
            index = start + gl.arange(0, BLOCK, gl.SliceLayout(0, s_layout))
            scores = gl.where(index[None, :] < limit[:, None], scores, float("-inf"))
        largest = gl.ceil(gl.max(scores, axis=1))
        if OWN == 0:
            own_m = gl.maximum(largest, LOWEST)
            row_stats.index(FIRST_M).store(own_m)
        else:
            mbarrier.wait(p_ready.index(0), phase)
            first_m = row_stats.index(FIRST_M).load(in_rows)
            own_m = gl.maximum(first_m, largest)
            row_stats.index(SPLIT_M).store(own_m)
            row_stats.index(KEPT).store(power_of_two(first_m - own_m))
        p = rounded(gl.exp2(scores - own_m[:, None]), NUMBER, False)
        own_p.store(p)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(p_ready.index(OWN), count=1)
        p_acc = gl.convert_layout(p, gl.DotOperandLayout(0, acc_layout, 2), assert_trivial=True)
        first_p, second_p = (p_acc, other_p) if OWN == 0 else (other_p, p_acc)
        acc = first_values(first_p, pair_of(tiles, none + OWN * PAIRS, layout), PAIR, acc_layout)
        if OWN == 0:
            p_l = gl.convert_layout(p, gl.DotOperandLayout(0, l_layout, 2), assert_trivial=True)
            l_i = first_values(p_l, ones.permute((1, 0)), 8, l_layout)
        mbarrier.wait(p_ready.index(1), phase)
        split_m = row_stats.index(SPLIT_M).load(in_rows)
        new_m = gl.maximum(total_m, split_m)
        total_kept, added = power_of_two(total_m - new_m), power_of_two(split_m - new_m)
        total_m = new_m
        kept = row_stats.index(KEPT).load(acc_rows)[:, None]
        acc_kept = gl.convert_layout(total_kept, acc_rows, assert_trivial=True)[:, None]
        acc_added = gl.convert_layout(added, acc_rows, assert_trivial=True)[:, None]
        next_total = ()
        for c in gl.static_range(CHUNKS):
            v_pair = pair_of(tiles, none + COLUMNS + OWN * PAIRS + 2 * c, layout)
            if c > 0:
                acc = first_values(first_p, pair_of(tiles, none + OWN * PAIRS + 2 * c, layout), PAIR, acc_layout)
            if c == 0 and OWN == 0:
                acc, l_i = warpgroup_mma_wait(0, deps=(acc, l_i))
                acc = warpgroup_mma(second_p, v_pair, acc * kept, is_async=True)
                l_i = l_i * row_stats.index(KEPT).load(l_rows)[:, None]
                l_i = warpgroup_mma(second_p, ones.permute((1, 0)), l_i, is_async=True)
                acc, l_i = warpgroup_mma_wait(0, deps=(acc, l_i))
            else:
                acc = warpgroup_mma_wait(0, deps=(acc,)) * kept
                acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(second_p, v_pair, acc, is_async=True),))
            gl.thread_barrier()
            mbarrier.arrive(free.index(OWN * CHUNKS + c), count=1)
            next_total = next_total + (sum_here(total[c] * acc_kept, acc * acc_added),)  # type: ignore[assignment]  # noqa: RUF005
        total = next_total
        mbarrier.arrive(free.index(PAIRS + 1 - OWN), count=1)
        if OWN == 0:
            l_kept = gl.convert_layout(total_kept, l_rows, assert_trivial=True)
            total_l = total_l * l_kept + gl.max(l_i, axis=1) * gl.convert_layout(added, l_rows, assert_trivial=True)
    if OWN == 0:
        row_stats.index(TOTAL_L).store(total_l)
        gl.thread_barrier()
        mbarrier.arrive(l_ready, count=1)
    else:
        mbarrier.wait(l_ready, 0)
    divisor = row_stats.index(TOTAL_L).load(acc_rows)
    is_live = gl.convert_layout(limit, acc_rows, assert_trivial=True) > 0
    divisor = gl.where(is_live, divisor, 1.0)[:, None]
    # Outputs are stored through the queries' shared memory, as whole vectors. The live rows of a tile come first.
    place = gl.arange(0, ROWS, flat_rows)
    _, _, live = rows_of_tile(tile, q_start, q_len, HEADS, ROWS, flat_rows)
    to = ((first_place + place) * (2 * PAIRS * WIDTH))[:, None] + dim[None, :]
    for c in gl.static_range(CHUNKS):
        pair_of(q_tiles, OWN * PAIRS + 2 * c, layout).store((total[c] / divisor).to(NUMBER))
    gl.thread_barrier()
    for c in gl.static_range(OWN * PAIRS, OWN * PAIRS + PAIRS):
        gl.store(out + to + c * WIDTH, q_tiles.index(c).load(flat), mask=live[:, None])


@gluon.jit(do_not_specialize=["num_rows", "num_pages"])
def mla_hopper_prompt_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, HEADS, RANK + WIDTH], tokens q_stride apart
    out,  # [N, HEADS, RANK]
    keys,  # [slots, RANK + WIDTH] in pages by columns
    positions,  # [N]
    q_starts,  # [R + 1]
    table,  # [R, num_pages]
    scale,
    q_stride,
    num_rows,
    num_pages,
    HEADS: gl.constexpr,
    RANK: gl.constexpr,
    PAGE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (places for tiles,), as `mla_kernel`."""
    PAIRS: gl.constexpr = RANK // PAIR
    COLUMNS: gl.constexpr = 2 * PAIRS + 1
    HEADS_EACH: gl.constexpr = HEADS if HEADS < ROWS else ROWS
    QUERIES: gl.constexpr = ROWS // HEADS_EACH
    HEAD_TILES: gl.constexpr = (HEADS + HEADS_EACH - 1) // HEADS_EACH
    last_first = gl.num_programs(0) - 1 - gl.program_id(0)
    row, q_start, q_len, tile = find_tile(last_first, q_starts, num_rows, QUERIES, HEAD_TILES)
    tiles = gl.allocate_shared_memory(keys.dtype, [2 * COLUMNS, BLOCK, WIDTH], keys.layout)
    q_tiles = gl.allocate_shared_memory(keys.dtype, [COLUMNS, ROWS, WIDTH], keys.layout)
    ones = gl.allocate_shared_memory(keys.dtype, [8, BLOCK], keys.layout)
    row_stats = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [2 * (PAIRS + 1), 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PAIRS + 2, 1], mbarrier.MBarrierLayout())
    p_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    l_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * (PAIRS + 1)):
        mbarrier.init(ready.index(i), count=1)
    for i in gl.static_range(PAIRS + 2):
        mbarrier.init(free.index(i), count=1)
    mbarrier.init(p_ready.index(0), count=1)
    mbarrier.init(p_ready.index(1), count=1)
    mbarrier.init(q_ready, count=2)
    mbarrier.init(l_ready, count=1)
    ones.store(gl.full([8, BLOCK], 1.0, keys.dtype, gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])))
    fence_async_shared()
    spread: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    tokens, _, live = rows_of_tile(tile, q_start, q_len, HEADS, ROWS, spread)
    limit = key_limits(positions, tokens, live, num_pages * PAGE)
    max_limit = gl.max(limit, axis=0)
    min_limit = gl.min(gl.where(live, limit, max_limit), axis=0)
    is_narrow = max_limit <= NARROW
    count = gl.where(is_narrow, (max_limit + (2 * BLOCK - 1)) // (2 * BLOCK), 0)
    q_len = gl.where(is_narrow, q_len, 0)
    first_token = q_start + tile // HEAD_TILES * QUERIES
    first_place = first_token.to(gl.int64) * HEADS + tile % HEAD_TILES * HEADS_EACH
    row_table = table + row.to(gl.int64) * num_pages
    factor = scale * LOG2_E
    rows = (tile, q_start, q_len, first_place)
    limits = (positions, num_pages * PAGE, min_limit, max_limit, count)
    ring = (tiles, ready, free)
    shared = (q_tiles, ones, row_stats, q_ready, p_ready, l_ready)
    gl.warp_specialize(
        [
            (attend_splits, (0, q, out, q_stride, rows, limits, factor, ring, shared, HEADS, PAIRS)),
            (attend_splits, (1, q, out, q_stride, rows, limits, factor, ring, shared, HEADS, PAIRS)),
            (copy_blocks, (0, keys, row_table, max_limit, count, ring, PAGE, PAIRS)),
            (copy_blocks, (1, keys, row_table, max_limit, count, ring, PAGE, PAIRS)),
        ],
        [4, 1, 1],
        [240, 24, 24],  # registers per thread of all but the first, which gets the rest, 240 as well
    )
