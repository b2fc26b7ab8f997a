"""The Triton kernels of dense attention: split-KV decode with its merge, and one kernel for all windows.

In `decode_kernel` several programs share the keys of a tile of queries; each stores the state of its splits, and
`merge_kernel` merges them. In `context_kernel` one program reads all keys of a tile. Lengths are read on the device, so
grids depend on shapes alone. Every kernel gives a query the same bits. `triton.py` launches them.
"""

import triton
import triton.language as tl

from peregrine.kernels.attention.blocks import (
    LOWEST,
    NODES,
    attend_keys,
    find_tile,
    initial_state,
    load_queries,
    merge,
    row_of_tile,
    row_queries,
    score_factor,
    split_of,
    split_start,
    store_outputs,
    tile_rows,
    visible_range,
)
from peregrine.kernels.runtime.pdl import enter, release, wait

# Sizes that differ from call to call: kernels are not compiled again for special values of them.
SIZES = ["window", "num_rows", "num_pages", "max_splits"]


@triton.jit(do_not_specialize=SIZES)
def decode_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, Hq, D], tokens q_stride apart
    keys,  # [slots, Hkv, D]
    values,  # [slots, Hkv, D]
    k_scale,  # [] f32
    positions,  # [N]
    q_starts,  # [R + 1]
    past_lens,  # [R]
    table,  # [R, num_pages]
    limits,  # [N] i32
    paths,  # [N, NODES]
    partial_acc,  # [R * tiles, max_splits, ROWS, D_PAD] f32
    partial_ml,  # [R * tiles, max_splits, ROWS, 2] f32
    scale,
    window,
    q_stride,
    num_pages,
    max_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (programs, tiles * KV heads, rows): the programs of one tile share its splits and store their states."""
    QUERIES: tl.constexpr = ROWS // GROUP if GROUP < ROWS else 1
    HEAD_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    STRIDE: tl.constexpr = KV_HEADS * D
    program, programs = tl.program_id(0), tl.num_programs(0)
    tile, kv_head, row = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS, tl.program_id(2)
    q_start, q_len = row_queries(q_starts, row)
    query, member, live = tile_rows(tile, GROUP, ROWS)
    live = live & (query < q_len)
    tokens, heads = q_start + query, kv_head * GROUP + member
    past = tl.load(past_lens + row).to(tl.int32)
    low, limit = visible_range(positions, limits, tokens, live, past, num_pages * PAGE, window, TREE, WINDOWED)
    min_low, max_limit = tl.min(low), tl.max(limit)
    first, end = split_of(min_low), split_of(max_limit - 1) + 1
    # In a tree, splits that end after `past` hold other keys for each query: each is read for one query alone.
    shared_end = end
    if TREE:
        shared_end = tl.minimum(split_of(past), end)
    keys, values = keys + kv_head * D, values + kv_head * D
    table += tl.cast(row, tl.int64) * num_pages
    enter()
    queries = load_queries(q, tokens, heads, live, q_stride, D, D_PAD)
    factor = score_factor(scale, k_scale, SCALED)
    place = row * tl.num_programs(1) + tl.program_id(1)
    place = place.to(tl.int64) * max_splits * ROWS + tl.arange(0, ROWS)
    m_i, l_i, acc = initial_state(q, heads, live, D_PAD, False)  # nothing is merged here
    # Programs take runs of whole splits with about as many keys each.
    shared_keys = tl.maximum(tl.minimum(split_start(shared_end), max_limit) - min_low, 0)
    run = tl.where(program == 0, first, split_of(min_low + shared_keys * program // programs))
    run_end = split_of(min_low + shared_keys * (program + 1) // programs)
    run_end = tl.where(program == programs - 1, shared_end, tl.minimum(run_end, shared_end))
    if run < run_end:
        begin = tl.maximum(split_start(run), min_low // BLOCK * BLOCK)
        stop = tl.minimum(split_start(run_end), max_limit)
        attend_keys(
            *(queries, keys, values, table, paths, past, low, limit, live, begin, stop, factor),
            *(m_i, l_i, acc, partial_acc, partial_ml, place),
            *(D, STRIDE, PAGE, BLOCK, False, True, STAGES),
        )
    if TREE:
        lead = (tile // HEAD_TILES) * QUERIES  # the tile's first query
        count = tl.minimum(q_len - lead, QUERIES)
        for item in range(programs - 1 - program, (end - shared_end) * count, programs):
            split, node = shared_end + item // count, lead + item % count
            own = live & (query == node)
            own_limit = tl.where(own, limit, 0)
            begin = tl.maximum(split_start(split), min_low // BLOCK * BLOCK)
            stop = tl.minimum(split_start(split + 1), tl.max(own_limit))
            attend_keys(
                *(queries, keys, values, table, paths + (q_start + node) * NODES, past),
                *(low, own_limit, own, begin, stop, factor),
                *(m_i, l_i, acc, partial_acc, partial_ml, place),
                *(D, STRIDE, PAGE, BLOCK, True, True, STAGES),
            )


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(  # type: ignore[no-untyped-def]
    out,
    v_scale,
    sinks,
    positions,
    q_starts,
    past_lens,
    limits,
    partial_acc,
    partial_ml,
    window,
    num_pages,
    max_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Grid (ROWS / MERGED, tiles * KV heads, rows): merge the states that `decode_kernel` stored, in order."""
    release()
    tile, kv_head, row = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS, tl.program_id(2)
    q_start, q_len = row_queries(q_starts, row)
    query, member, live = tile_rows(tile, GROUP, ROWS)
    live = live & (query < q_len)
    past = tl.load(past_lens + row).to(tl.int32)
    tokens = q_start + query
    low, limit = visible_range(positions, limits, tokens, live, past, num_pages * PAGE, window, TREE, WINDOWED)
    first, end = split_of(tl.min(low)), split_of(tl.max(limit) - 1) + 1  # the splits that the tile's programs have read
    mine = tl.program_id(0) * MERGED + tl.arange(0, MERGED)
    query, member, live = row_of_tile(tile, mine, GROUP, ROWS)
    live = live & (query < q_len)
    heads = kv_head * GROUP + member
    m_i, l_i, acc = initial_state(sinks, heads, live, D_PAD, SINKS)
    place = (row * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * max_splits * ROWS + mine
    dim = tl.arange(0, D_PAD)
    wait()
    # Unrolled, not staged: a ring in shared memory would take the room of programs that run at the same time.
    for split in tl.range(first, end, loop_unroll_factor=16):
        at = place + split * ROWS
        next_m = tl.load(partial_ml + at * 2, mask=live, other=LOWEST)
        next_l = tl.load(partial_ml + at * 2 + 1, mask=live, other=0.0)
        next_acc = tl.load(partial_acc + at[:, None] * D_PAD + dim[None, :], mask=live[:, None], other=0.0)
        m_i, l_i, acc = merge(m_i, l_i, acc, next_m, next_l, next_acc)
    tokens = q_start + query
    store_outputs(out, tokens, heads, live, l_i, acc, v_scale, KV_HEADS * GROUP, D, SCALED)


@triton.jit(do_not_specialize=SIZES)
def context_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, Hq, D], tokens q_stride apart
    out,  # [N, Hq, D]
    keys,  # [slots, Hkv, D]
    values,  # [slots, Hkv, D]
    k_scale,  # [] f32
    v_scale,  # [] f32
    sinks,  # [Hq]
    positions,  # [N]
    q_starts,  # [R + 1]
    past_lens,  # [R]
    table,  # [R, num_pages]
    limits,  # [N] i32
    paths,  # [N, NODES]
    scale,
    window,
    num_rows,
    q_stride,
    num_pages,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (places for tiles, KV heads): see `find_tile`."""
    QUERIES: tl.constexpr = ROWS // GROUP if GROUP < ROWS else 1
    HEAD_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    STRIDE: tl.constexpr = KV_HEADS * D
    # The last tiles of long rows read the most keys: they go first.
    last_first, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    enter()
    row, q_start, q_len, tile = find_tile(last_first, q_starts, num_rows, QUERIES, HEAD_TILES)
    lead = tile // HEAD_TILES * QUERIES  # the tile's first query
    if lead < q_len:
        keys, values = keys + kv_head * D, values + kv_head * D
        table += tl.cast(row, tl.int64) * num_pages
        query, member, live = tile_rows(tile, GROUP, ROWS)
        live = live & (query < q_len)
        tokens, heads = q_start + query, kv_head * GROUP + member
        past = tl.load(past_lens + row).to(tl.int32)
        low, limit = visible_range(positions, limits, tokens, live, past, num_pages * PAGE, window, TREE, WINDOWED)
        min_low, max_limit = tl.min(low), tl.max(limit)
        stop = max_limit
        if TREE:
            stop = tl.minimum(split_start(split_of(past)), max_limit)
        queries = load_queries(q, tokens, heads, live, q_stride, D, D_PAD)
        factor = score_factor(scale, k_scale, SCALED)
        m_i, l_i, acc = initial_state(sinks, heads, live, D_PAD, SINKS)
        m_i, l_i, acc = attend_keys(
            *(queries, keys, values, table, paths, past, low, limit, live, min_low // BLOCK * BLOCK, stop, factor),
            *(m_i, l_i, acc, out, out, 0),
            *(D, STRIDE, PAGE, BLOCK, False, False, STAGES),
        )
        if TREE:
            for split in range(split_of(past), split_of(max_limit - 1) + 1):
                for node in range(lead, tl.minimum(lead + QUERIES, q_len)):
                    own = live & (query == node)
                    own_limit = tl.where(own, limit, 0)
                    begin = tl.maximum(split_start(split), min_low // BLOCK * BLOCK)
                    own_stop = tl.minimum(split_start(split + 1), tl.max(own_limit))
                    # For rows of other queries the split is empty: their state stays as it was.
                    m_i, l_i, acc = attend_keys(
                        *(queries, keys, values, table, paths + (q_start + node) * NODES, past),
                        *(low, own_limit, own, begin, own_stop, factor, m_i, l_i, acc, out, out, 0),
                        *(D, STRIDE, PAGE, BLOCK, True, False, STAGES),
                    )
        store_outputs(out, tokens, heads, live, l_i, acc, v_scale, KV_HEADS * GROUP, D, SCALED)
