"""Latent attention (MLA) over paged keys on a GPU: one kernel for all windows, and the merge of what it puts aside.

A tile is some queries of a row with all their heads, or some heads of one query: all of them read the same keys. In
short uniform windows the splits of a tile's keys are shared out among programs, which put their states aside (APART);
else one program reads all keys of a tile. Lengths are read on the device, so that grids depend on shapes alone, and
either way gives a query the same bits. The twin is `paged_attention_torch`.
"""

import triton
import triton.language as tl

from peregrine.kernels.attention.blocks_triton import LOG2_E, LOWEST, sight
from peregrine.kernels.attention.mla_blocks_triton import (
    load_latent_queries,
    power_of_two,
    reach_of,
    read_splits,
    width_of,
)
from peregrine.kernels.attention.splits_triton import MAX_NODES, tile_rows
from peregrine.kernels.runtime.pdl import enter

NODES = tl.constexpr(MAX_NODES)
# Sizes that differ from call to call: no kernel is compiled again for a lucky value of them.
SIZES = ["q_len", "num_rows", "num_pages", "max_splits"]
MERGE_SIZES = ["q_len", "num_pages", "max_splits", "tiles"]


@triton.jit
def tile_of_place(place, q_starts, num_rows, QUERIES: tl.constexpr, HEAD_TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row, first token, queries of the row, tile) of a place: row r's begin at place q_starts[r] // QUERIES + r."""
    row, after = 0, num_rows
    while after - row > 1:
        middle = (row + after) // 2
        starts_before = tl.load(q_starts + middle).to(tl.int32) // QUERIES + middle <= place // HEAD_TILES
        row = tl.where(starts_before, middle, row)
        after = tl.where(starts_before, after, middle)
    q_start = tl.load(q_starts + row).to(tl.int32)
    q_len = tl.load(q_starts + row + 1).to(tl.int32) - q_start
    return row, q_start, q_len, place - (q_start // QUERIES + row) * HEAD_TILES


@triton.jit(do_not_specialize=SIZES)
def latent_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, HEADS, RANK + ROPE], tokens q_stride apart
    out,  # [N, HEADS, RANK]
    keys,  # [slots, RANK + ROPE]
    positions,  # [N]
    q_starts,  # [R + 1]
    past_lens,  # [R]
    table,  # [R, num_pages]
    limits,  # [N] i32
    paths,  # [N, NODES]
    held_sums,  # f32 if APART [R * tiles, max_splits, ROWS, RANK_PAD], else [N, HEADS, RANK_PAD]
    held_stats,  # [R * tiles, max_splits, ROWS, 2] f32: top, mass
    scale,
    q_len,
    q_stride,
    num_rows,
    num_pages,
    max_splits,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE: tl.constexpr,
    APART: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid if APART (programs, tiles, rows): the programs of one tile share its splits; else (places for tiles,)."""
    QUERIES: tl.constexpr = ROWS // HEADS if HEADS < ROWS else 1
    HEAD_TILES: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    enter()
    program, programs = 0, 1
    if APART:
        program, programs = tl.program_id(0), tl.num_programs(0)
        row, tile = tl.program_id(2), tl.program_id(1)
        q_start = row * q_len
    else:
        # Long rows end late: their last tiles, which read the most keys, go first.
        last_first = tl.num_programs(0) - 1 - tl.program_id(0)
        row, q_start, q_len, tile = tile_of_place(last_first, q_starts, num_rows, QUERIES, HEAD_TILES)
    lead = tile // HEAD_TILES * QUERIES  # the tile's first query
    if lead < q_len:
        query, head, live = tile_rows(tile, HEADS, ROWS)
        live = live & (query < q_len)
        tokens = q_start + query
        past = tl.load(past_lens + row).to(tl.int32)
        _, limit = sight(positions, limits, tokens, live, past, num_pages * PAGE, 0, TREE, False)
        table += tl.cast(row, tl.int64) * num_pages
        at = tokens.to(tl.int64) * q_stride + head * (RANK + ROPE)
        q_latent = load_latent_queries(q, at, live, 0, RANK, RANK_PAD)
        q_rope = load_latent_queries(q, at, live, RANK, ROPE, ROPE_PAD)
        factor = scale * LOG2_E
        if APART:
            place = (row * tl.num_programs(1) + tile).to(tl.int64) * max_splits * ROWS + tl.arange(0, ROWS)
        else:
            place = tokens.to(tl.int64) * HEADS + head
        top = tl.full([ROWS], LOWEST, tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        farthest, nearest = tl.max(limit), tl.min(tl.where(live, limit, tl.max(limit)))
        reach = reach_of(width_of(nearest))  # rows that see more are on another side, with wider splits
        for side in range(0, 1 + (farthest > reach).to(tl.int32)):
            here = live & ((limit > reach) == (side == 1))
            sees = tl.where(here, limit, 0)
            width = width_of(tl.max(sees))
            end = tl.cdiv(tl.max(sees), width)
            # In a tree, splits that reach past the root hold other keys for each query: each is work for one query.
            shared_end = end
            if TREE:
                shared_end = tl.minimum(past // width, end)
            run, run_end = shared_end * program // programs, shared_end * (program + 1) // programs
            top, mass = read_splits(
                *(q_latent, q_rope, keys, table, paths, past, sees, here, run, run_end, width, factor),
                *(top, mass, held_sums, held_stats, place),
                *(RANK, ROPE, PAGE, BLOCK, False, APART, STAGES),
            )
            if TREE:
                count = tl.minimum(q_len - lead, QUERIES)
                for item in range(programs - 1 - program, (end - shared_end) * count, programs):
                    split, node = shared_end + item // count, lead + item % count
                    own = here & (query == node)
                    own_sees = tl.where(own, limit, 0)
                    top, mass = read_splits(
                        *(q_latent, q_rope, keys, table, paths + (q_start + node) * NODES, past),
                        *(own_sees, own, split, split + 1, width, factor, top, mass, held_sums, held_stats),
                        *(place, RANK, ROPE, PAGE, BLOCK, True, APART, STAGES),
                    )
        if not APART:
            dim = tl.arange(0, RANK_PAD)
            tl.debug_barrier()  # other threads wrote what this one reads
            held = held_sums + place[:, None] * RANK_PAD + dim[None, :]
            sums = tl.load(held, mask=live[:, None], other=0.0)
            outputs = (sums / tl.where(live, mass, 1.0)[:, None]).to(out.dtype.element_ty)
            inside = live[:, None] & (dim < RANK)[None, :]
            tl.store(out + place[:, None] * RANK + dim[None, :], outputs, mask=inside)


@triton.jit(do_not_specialize=MERGE_SIZES)
def latent_merge_kernel(  # type: ignore[no-untyped-def]
    out,  # [N, HEADS, RANK]
    positions,  # [N]
    limits,  # [N] i32
    held_sums,  # [R * tiles, max_splits, ROWS, RANK_PAD] f32
    held_stats,  # [R * tiles, max_splits, ROWS, 2] f32: top, mass
    q_len,
    num_pages,
    max_splits,
    tiles,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TREE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Grid (RANK_PAD / COLUMNS, HEADS, tokens): some columns of one head's answer, from its splits in order."""
    HEADS_EACH: tl.constexpr = HEADS if HEADS < ROWS else ROWS
    QUERIES: tl.constexpr = ROWS // HEADS_EACH
    HEAD_TILES: tl.constexpr = (HEADS + HEADS_EACH - 1) // HEADS_EACH
    enter()
    head, token = tl.program_id(1), tl.program_id(2)
    row, query = token // q_len, token % q_len
    limit = tl.load(limits + token) if TREE else tl.load(positions + token).to(tl.int32) + 1
    limit = tl.minimum(limit, num_pages * PAGE)
    end = tl.cdiv(limit, width_of(limit))
    tile = query // QUERIES * HEAD_TILES + head // HEADS_EACH
    place = (row * tiles + tile).to(tl.int64) * max_splits * ROWS
    place += query % QUERIES * HEADS_EACH + head % HEADS_EACH
    top = tl.full([], LOWEST, tl.float32)
    for first in range(0, end, CHUNK):
        split = first + tl.arange(0, CHUNK)
        top = tl.maximum(top, tl.max(tl.load(held_stats + (place + split * ROWS) * 2, mask=split < end, other=LOWEST)))
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mass = tl.zeros([], tl.float32)
    sums = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, end, BATCH):
        for i in tl.static_range(BATCH):  # all are on their way before the first is there
            at = place + (first + i) * ROWS
            added = power_of_two(tl.load(held_stats + at * 2, mask=first + i < end, other=LOWEST) - top)
            mass += tl.load(held_stats + at * 2 + 1, mask=first + i < end, other=0.0) * added
            sums += tl.load(held_sums + at * RANK_PAD + column, mask=first + i < end, other=0.0) * added
    outputs = (sums / mass).to(out.dtype.element_ty)
    tl.store(out + (token.to(tl.int64) * HEADS + head) * RANK + column, outputs, mask=column < RANK)
