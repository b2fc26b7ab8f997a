"""Attention over paged keys and values on a GPU: one kernel for short uniform windows, one for all windows.

`decode` cuts the keys of each tile into splits that many programs share, and `merge` puts together what they have
found. `context` gives a tile to one program, which walks the splits itself. Both read lengths on the device, so
that their grids depend on shapes alone, and both give a query the same bits. Their twin is `paged_attention_torch`.
"""

import triton
import triton.language as tl

from peregrine.kernels.attention.blocks_triton import (
    attend_run,
    first_state,
    load_queries,
    score_factor,
    sight,
    store_outputs,
)
from peregrine.kernels.attention.splits_triton import MAX_NODES, split_of, split_start, tile_rows
from peregrine.kernels.runtime.pdl import enter

NODES = tl.constexpr(MAX_NODES)
# Sizes that differ from call to call: no kernel is compiled again for a lucky value of them.
SIZES = ["window", "q_len", "num_rows", "num_pages", "max_splits"]


@triton.jit(do_not_specialize=SIZES)
def decode_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, Hq, D], tokens q_stride apart
    keys,  # [slots, Hkv, D]
    values,  # [slots, Hkv, D]
    k_scale,  # [] f32
    positions,  # [N]
    past_lens,  # [R]
    table,  # [R, num_pages]
    limits,  # [N] i32
    paths,  # [N, NODES]
    part_sums,  # [R * tiles, max_splits, ROWS, D_PAD] f32
    part_stats,  # [R * tiles, max_splits, ROWS, 2] f32: top, mass
    scale,
    window,
    q_len,
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
    """Grid (programs, tiles * KV heads, rows): the programs of one tile share its splits and put their states aside."""
    QUERIES: tl.constexpr = ROWS // GROUP if GROUP < ROWS else 1
    HEAD_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    STRIDE: tl.constexpr = KV_HEADS * D
    program, programs = tl.program_id(0), tl.num_programs(0)
    tile, kv_head, row = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS, tl.program_id(2)
    query, member, live = tile_rows(tile, GROUP, ROWS)
    live = live & (query < q_len)
    tokens, heads = row * q_len + query, kv_head * GROUP + member
    past = tl.load(past_lens + row).to(tl.int32)
    low, limit = sight(positions, limits, tokens, live, past, num_pages * PAGE, window, TREE, WINDOWED)
    lowest, farthest = tl.min(low), tl.max(limit)
    first, end = split_of(lowest), split_of(farthest - 1) + 1
    # In a tree, splits that reach past the root hold other keys for each query: each is work for one query alone.
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
    top, mass, sums = first_state(q, heads, live, D_PAD, False)  # nothing is merged here
    # Programs take runs of whole splits with about as many keys each.
    share = tl.maximum(tl.minimum(split_start(shared_end), farthest) - lowest, 0)
    run = tl.where(program == 0, first, split_of(lowest + share * program // programs))
    run_end = split_of(lowest + share * (program + 1) // programs)
    run_end = tl.where(program == programs - 1, shared_end, tl.minimum(run_end, shared_end))
    if run < run_end:
        begin = tl.maximum(split_start(run), lowest // BLOCK * BLOCK)
        stop = tl.minimum(split_start(run_end), farthest)
        attend_run(
            *(queries, keys, values, table, paths, past, low, limit, live, begin, stop, factor),
            *(top, mass, sums, part_sums, part_stats, place),
            *(D, STRIDE, PAGE, BLOCK, False, True, STAGES),
        )
    if TREE:
        lead = (tile // HEAD_TILES) * QUERIES  # the tile's first query
        count = tl.minimum(q_len - lead, QUERIES)
        for item in range(programs - 1 - program, (end - shared_end) * count, programs):
            split, node = shared_end + item // count, lead + item % count
            own = live & (query == node)
            own_limit = tl.where(own, limit, 0)
            begin = tl.maximum(split_start(split), lowest // BLOCK * BLOCK)
            stop = tl.minimum(split_start(split + 1), tl.max(own_limit))
            attend_run(
                *(queries, keys, values, table, paths + (row * q_len + node) * NODES, past),
                *(low, own_limit, own, begin, stop, factor),
                *(top, mass, sums, part_sums, part_stats, place),
                *(D, STRIDE, PAGE, BLOCK, True, True, STAGES),
            )


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
    """Grid (places for tiles, KV heads): row r's tiles begin at place q_starts[r] // QUERIES + r of each head tile."""
    QUERIES: tl.constexpr = ROWS // GROUP if GROUP < ROWS else 1
    HEAD_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    STRIDE: tl.constexpr = KV_HEADS * D
    # Long rows end late: their last tiles, which read the most keys, go first.
    place, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row, after = 0, num_rows
    enter()
    while after - row > 1:
        middle = (row + after) // 2
        starts_before = tl.load(q_starts + middle).to(tl.int32) // QUERIES + middle <= place // HEAD_TILES
        row = tl.where(starts_before, middle, row)
        after = tl.where(starts_before, after, middle)
    q_start = tl.load(q_starts + row).to(tl.int32)
    q_len = tl.load(q_starts + row + 1).to(tl.int32) - q_start
    tile = place - (q_start // QUERIES + row) * HEAD_TILES
    lead = tile // HEAD_TILES * QUERIES  # the tile's first query
    if lead < q_len:
        keys, values = keys + kv_head * D, values + kv_head * D
        table += tl.cast(row, tl.int64) * num_pages
        query, member, live = tile_rows(tile, GROUP, ROWS)
        live = live & (query < q_len)
        tokens, heads = q_start + query, kv_head * GROUP + member
        past = tl.load(past_lens + row).to(tl.int32)
        low, limit = sight(positions, limits, tokens, live, past, num_pages * PAGE, window, TREE, WINDOWED)
        lowest, farthest = tl.min(low), tl.max(limit)
        stop = farthest
        if TREE:
            stop = tl.minimum(split_start(split_of(past)), farthest)
        queries = load_queries(q, tokens, heads, live, q_stride, D, D_PAD)
        factor = score_factor(scale, k_scale, SCALED)
        top, mass, sums = first_state(sinks, heads, live, D_PAD, SINKS)
        top, mass, sums = attend_run(
            *(queries, keys, values, table, paths, past, low, limit, live, lowest // BLOCK * BLOCK, stop, factor),
            *(top, mass, sums, out, out, 0),
            *(D, STRIDE, PAGE, BLOCK, False, False, STAGES),
        )
        if TREE:
            for split in range(split_of(past), split_of(farthest - 1) + 1):
                for node in range(lead, tl.minimum(lead + QUERIES, q_len)):
                    own = live & (query == node)
                    own_limit = tl.where(own, limit, 0)
                    begin = tl.maximum(split_start(split), lowest // BLOCK * BLOCK)
                    own_stop = tl.minimum(split_start(split + 1), tl.max(own_limit))
                    # To a row that is not this query's the split is empty: its state stays as it was.
                    top, mass, sums = attend_run(
                        *(queries, keys, values, table, paths + (q_start + node) * NODES, past),
                        *(low, own_limit, own, begin, own_stop, factor, top, mass, sums, out, out, 0),
                        *(D, STRIDE, PAGE, BLOCK, True, False, STAGES),
                    )
        store_outputs(out, tokens, heads, live, mass, sums, v_scale, KV_HEADS * GROUP, D, SCALED)
