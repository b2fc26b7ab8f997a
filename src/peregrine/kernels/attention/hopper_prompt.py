"""Dense attention of prompts for Hopper, in Gluon: the arithmetic of `blocks.py`, bit for bit.

A program has a tile of 128 query rows at a time and reads all their keys. One of its warps copies blocks of keys and
values by TMA into a ring of STAGES places. Two groups of four warps multiply them, each for half of the rows. The
matrix unit computes the scores of the next block while a group rescales or merges its state, and adds a block's values
while the next scores become weights. The queries of the next tile are copied while this one is computed. Positions of a
row's queries must not descend: the first of a tile says which blocks need no mask, the last which are read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.attention import plan
from peregrine.kernels.attention.blocks import LOG2_E, LOWEST, find_tile_fn
from peregrine.kernels.attention.hopper import BLOCK, WIDTH, copy_blocks, split_start
from peregrine.kernels.attention.hopper_blocks import HALF, add_split, add_values, rescaled, scores_of, weigh
from peregrine.kernels.runtime.layouts import product_layout

ROWS = gl.constexpr(plan.PROMPT_TILE)
STAGES = gl.constexpr(4)

find_tile = gluon.jit(find_tile_fn)


@gluon.jit
def tile_of(work, turn, QUERIES: gl.constexpr):  # type: ignore[no-untyped-def]
    """(row, its first token, its queries, tile, KV head, keys its last query sees, blocks) of a program's n-th turn.

    The last tiles of long rows read the most keys: they go first. Every other turn goes through the programs backwards,
    so that all have about as much to read. Where there is no tile left there are no queries and no keys.
    """
    q_starts, num_rows, places, kv_heads, positions, num_keys = work
    programs, mine = gl.num_programs(0), gl.program_id(0)
    item = turn * programs + gl.where(turn % 2 == 0, mine, programs - 1 - mine)
    row, q_start, q_len, tile = find_tile(gl.maximum(places - 1 - item // kv_heads, 0), q_starts, num_rows, QUERIES, 1)
    q_len = gl.where(item < places * kv_heads, q_len, 0)
    last = gl.minimum(tile * QUERIES + QUERIES, q_len) - 1
    position = gl.load(positions + q_start + last, mask=tile * QUERIES < q_len, other=-1).to(gl.int32)
    max_limit = gl.minimum(position + 1, num_keys)
    return row, q_start, q_len, tile, item % kv_heads, max_limit, (max_limit + BLOCK - 1) // BLOCK


@gluon.jit
def rows_of_group(  # type: ignore[no-untyped-def]
    q_start, q_len, tile, FIRST: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr
):
    """(token, head of its group, whether there is such a query) of half of a tile's rows, those from FIRST on."""
    QUERIES: gl.constexpr = ROWS // GROUP
    place = FIRST + gl.arange(0, HALF, layout)
    query = tile * QUERIES + place // GROUP
    return q_start + query, place % GROUP, (place < QUERIES * GROUP) & (query < q_len)


@gluon.jit
def limits_of(  # type: ignore[no-untyped-def]
    work, q_start, q_len, tile, FIRST: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr
):
    """(keys that each row sees, keys that all of them see)."""
    _, _, _, _, positions, num_keys = work
    tokens, _, live = rows_of_group(q_start, q_len, tile, FIRST, GROUP, layout)
    position = gl.load(positions + tokens, mask=live, other=0).to(gl.int32)
    limit = gl.where(live, gl.minimum(position + 1, num_keys), 0)
    first = tile * (ROWS // GROUP) + FIRST // GROUP
    least = gl.load(positions + q_start + first, mask=first < q_len, other=-1).to(gl.int32)
    return limit, gl.minimum(least + 1, num_keys)


@gluon.jit
def request_queries(  # type: ignore[no-untyped-def]
    q, q_tiles, buffer, tokens, heads, live, q_stride, COLUMNS: gl.constexpr, flat: gl.constexpr
):
    """Start the copy of a tile's queries, by columns; rows that are not live keep what they hold."""
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, flat))
    at = (tokens.to(gl.int64) * q_stride + heads * (COLUMNS * WIDTH))[:, None] + dim[None, :]
    for c in gl.static_range(COLUMNS):
        to = q_tiles.index(buffer * COLUMNS + c)
        async_copy.async_copy_global_to_shared(to, q + at + c * WIDTH, mask=live[:, None])
    async_copy.commit_group()


@gluon.jit
def copy_tiles(  # type: ignore[no-untyped-def]
    keys,
    values,
    table,
    past_lens,
    num_pages,
    work,
    turns,
    ring,
    QUERIES: gl.constexpr,
    PAGE: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """The copying warp: the blocks of tile after tile."""
    gdc_wait()
    done = 0
    for turn in range(turns):
        row, _, _, _, kv_head, max_limit, count = tile_of(work, turn, QUERIES)
        row_table = table + row.to(gl.int64) * num_pages
        past = gl.load(past_lens + row).to(gl.int32)
        blocks, column = (max_limit, count), kv_head * (COLUMNS * WIDTH)
        copy_blocks(keys, values, row_table, past, blocks, column, ring, done, PAGE, COLUMNS, STAGES)
        done += count


@gluon.jit
def clear_after(v_tiles, place, start, max_limit, COLUMNS: gl.constexpr, flat: gl.constexpr):  # type: ignore[no-untyped-def]
    """What follows the last key may be NaN, and so is 0 * NaN: zeros are stored there."""
    if start + BLOCK > max_limit:
        inside = start + gl.arange(0, BLOCK, gl.SliceLayout(1, flat)) < max_limit
        for c in gl.static_range(COLUMNS):
            v_half = v_tiles.index(place * COLUMNS + c)
            v_half.store(gl.where(inside[:, None], v_half.load(flat), 0.0))
        fence_async_shared()
        gl.thread_barrier()


@gluon.jit
def attend_tiles(  # type: ignore[no-untyped-def]
    FIRST: gl.constexpr,
    q,
    q_stride,
    out,
    work,
    turns,
    factor,
    ring,
    shared,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """The multiplying warps: the outputs of their rows, those from FIRST on, of tile after tile."""
    k_tiles, v_tiles, ready, free = ring
    q_tiles, ones = shared
    D: gl.constexpr = COLUMNS * WIDTH
    QUERIES: gl.constexpr = ROWS // GROUP
    NUMBER: gl.constexpr = q.dtype.element_ty
    s_layout: gl.constexpr = product_layout(BLOCK)
    acc_layout: gl.constexpr = product_layout(D)
    l_layout: gl.constexpr = product_layout(8)
    in_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    acc_rows: gl.constexpr = gl.SliceLayout(1, acc_layout)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    flat_rows: gl.constexpr = gl.SliceLayout(1, flat)
    gdc_wait()
    gdc_launch_dependents()
    done = 0  # blocks
    _, next_start, next_len, next_tile, next_head, next_max, next_count = tile_of(work, 0, QUERIES)
    next_limit, next_min = limits_of(work, next_start, next_len, next_tile, FIRST, GROUP, in_rows)
    tokens, heads, live = rows_of_group(next_start, next_len, next_tile, FIRST, GROUP, flat_rows)
    request_queries(q, q_tiles, 0, tokens, next_head * GROUP + heads, live, q_stride, COLUMNS, flat)
    for turn in range(turns):
        q_start, q_len, tile, kv_head = next_start, next_len, next_tile, next_head
        max_limit, count, limit, min_limit = next_max, next_count, next_limit, next_min
        buffer = turn % 2
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        # The next tile is found and its queries are copied while this one is computed.
        _, next_start, next_len, next_tile, next_head, next_max, next_count = tile_of(work, turn + 1, QUERIES)
        next_limit, next_min = limits_of(work, next_start, next_len, next_tile, FIRST, GROUP, in_rows)
        tokens, heads, live = rows_of_group(next_start, next_len, next_tile, FIRST, GROUP, flat_rows)
        request_queries(q, q_tiles, 1 - buffer, tokens, next_head * GROUP + heads, live, q_stride, COLUMNS, flat)
        q_tile = q_tiles.index(buffer * COLUMNS)._reinterpret(NUMBER, [HALF, D], q_tiles.layout)
        m_i = gl.full([HALF], LOWEST, gl.float32, in_rows)
        l_i = gl.zeros([HALF, 8], gl.float32, l_layout)
        acc = gl.zeros([HALF, D], gl.float32, acc_layout)
        total_m = gl.full([HALF], LOWEST, gl.float32, in_rows)
        total_l = gl.zeros([HALF, 8], gl.float32, l_layout)
        total = gl.zeros([HALF, D], gl.float32, acc_layout)
        zero = gl.zeros([HALF, BLOCK], gl.float32, s_layout)
        split, split_end, begins, split_m = 0, split_start(1), True, m_i
        mbarrier.wait(ready.index(done % STAGES), (done // STAGES) & 1, count > 0)
        scores = warpgroup_mma_wait(0, deps=(scores_of(q_tile, k_tiles, done % STAGES, zero, COLUMNS),))
        p, m_i, kept = weigh(scores, m_i, 0, limit, min_limit, True, factor, NUMBER)
        for i in range(count - 1):
            place, after = (done + i) % STAGES, done + i + 1
            start = i * BLOCK
            mbarrier.wait(ready.index(after % STAGES), (after // STAGES) & 1)
            scores = scores_of(q_tile, k_tiles, after % STAGES, zero, COLUMNS)
            if begins:  # the split before is complete; before the first one it is empty
                total_m, total_l, total = add_split(total_m, total_l, total, split_m, l_i, acc)
            else:
                acc, l_i = rescaled(acc, kept), rescaled(l_i, kept)
            # Warps wait for each other while the product runs, not before it is started.
            gl.thread_barrier()
            mbarrier.arrive(free.index((done + i + STAGES - 1) % STAGES), count=1, pred=i > 0)
            l_i, acc = add_values(p, v_tiles, place, ones, l_i, acc, begins, COLUMNS)
            split_m, begins = m_i, start + BLOCK == split_end
            scores = warpgroup_mma_wait(2, deps=(scores,))
            p, m_i, kept = weigh(scores, m_i, start + BLOCK, limit, min_limit, begins, factor, NUMBER)
            # Without a branch here the compiler would move the wait below up, before the weights are computed.
            if begins:
                split += 1
                split_end = split_start(split + 1)
            l_i, acc = warpgroup_mma_wait(0, deps=(l_i, acc))
        # After the last block there is nothing to score, and values past the last key are cleared.
        last = (done + count + STAGES - 1) % STAGES
        clear_after(v_tiles, last, (count - 1) * BLOCK, max_limit, COLUMNS, flat)
        if begins:
            total_m, total_l, total = add_split(total_m, total_l, total, split_m, l_i, acc)
        else:
            acc, l_i = rescaled(acc, kept), rescaled(l_i, kept)
        l_i, acc = warpgroup_mma_wait(0, deps=add_values(p, v_tiles, last, ones, l_i, acc, begins, COLUMNS))
        split_m = m_i
        gl.thread_barrier()
        mbarrier.arrive(free.index((last + STAGES - 1) % STAGES), count=1, pred=count > 1)
        mbarrier.arrive(free.index(last), count=1, pred=count > 0)
        done += count
        total_m, total_l, total = add_split(total_m, total_l, total, split_m, l_i, acc)
        # Outputs leave through the memory of the queries, as whole vectors.
        divisor = gl.convert_layout(gl.max(total_l, axis=1), acc_rows, assert_trivial=True)
        is_live = gl.convert_layout(limit, acc_rows, assert_trivial=True) > 0
        q_tile.store((total / gl.where(is_live, divisor, 1.0)[:, None]).to(NUMBER))
        tokens, heads, live = rows_of_group(q_start, q_len, tile, FIRST, GROUP, flat_rows)
        to = ((tokens.to(gl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + heads) * D)[:, None]
        to += gl.arange(0, WIDTH, gl.SliceLayout(0, flat))[None, :]
        gl.thread_barrier()
        for c in gl.static_range(COLUMNS):
            gl.store(out + to + c * WIDTH, q_tiles.index(buffer * COLUMNS + c).load(flat), mask=live[:, None])


@gluon.jit(do_not_specialize=["num_rows", "num_pages", "places"])
def hopper_prompt_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, Hq, D], tokens q_stride apart
    out,  # [N, Hq, D]
    keys,  # [slots, Hkv * D] in pages by columns
    values,
    positions,  # [N]
    q_starts,  # [R + 1]
    past_lens,  # [R]
    table,  # [R, num_pages]
    scale,
    num_rows,
    q_stride,
    num_pages,
    places,  # for tiles, see `find_tile`
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (programs,): they share the tiles of all KV heads."""
    COLUMNS: gl.constexpr = D // WIDTH
    QUERIES: gl.constexpr = ROWS // GROUP
    k_tiles = gl.allocate_shared_memory(keys.dtype, [STAGES * COLUMNS, BLOCK, WIDTH], keys.layout)
    v_tiles = gl.allocate_shared_memory(keys.dtype, [STAGES * COLUMNS, BLOCK, WIDTH], keys.layout)
    first_q = gl.allocate_shared_memory(keys.dtype, [2 * COLUMNS, HALF, WIDTH], keys.layout)
    second_q = gl.allocate_shared_memory(keys.dtype, [2 * COLUMNS, HALF, WIDTH], keys.layout)
    ones = gl.allocate_shared_memory(keys.dtype, [8, BLOCK], keys.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(ready.index(place), count=1)
        mbarrier.init(free.index(place), count=2)
    ones.store(gl.full([8, BLOCK], 1.0, keys.dtype, gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])))
    fence_async_shared()
    work = (q_starts, num_rows, places, KV_HEADS, positions, num_pages * PAGE)
    turns = (places * KV_HEADS + gl.num_programs(0) - 1) // gl.num_programs(0)
    ring = (k_tiles, v_tiles, ready, free)
    first, second = (first_q, ones), (second_q, ones)
    factor = scale * LOG2_E
    gl.warp_specialize(
        [
            (attend_tiles, (0, q, q_stride, out, work, turns, factor, ring, first, KV_HEADS, GROUP, COLUMNS)),
            (attend_tiles, (HALF, q, q_stride, out, work, turns, factor, ring, second, KV_HEADS, GROUP, COLUMNS)),
            (copy_tiles, (keys, values, table, past_lens, num_pages, work, turns, ring, QUERIES, PAGE, COLUMNS)),
        ],
        [4, 1],
        [232, 40],  # registers per thread of the last two kinds; the first has the rest, 232 too
    )
