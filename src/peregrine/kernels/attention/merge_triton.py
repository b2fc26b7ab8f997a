"""The second half of decode attention on a GPU: what the programs of a tile have put aside becomes its answer."""

import triton
import triton.language as tl

from peregrine.kernels.attention.blocks_triton import LOWEST, first_state, merge, sight, store_outputs
from peregrine.kernels.attention.splits_triton import row_of_tile, split_of, tile_rows
from peregrine.kernels.runtime.pdl import release, wait

SIZES = ["window", "q_len", "num_pages", "max_splits"]


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(  # type: ignore[no-untyped-def]
    out,
    v_scale,
    sinks,
    positions,
    past_lens,
    limits,
    part_sums,
    part_stats,
    window,
    q_len,
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
    """Grid (ROWS / MERGED, tiles * KV heads, rows): the states `decode` put aside for some rows, merged in order."""
    release()
    tile, kv_head, row = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS, tl.program_id(2)
    query, member, live = tile_rows(tile, GROUP, ROWS)
    live = live & (query < q_len)
    past = tl.load(past_lens + row).to(tl.int32)
    low, limit = sight(positions, limits, row * q_len + query, live, past, num_pages * PAGE, window, TREE, WINDOWED)
    first, end = split_of(tl.min(low)), split_of(tl.max(limit) - 1) + 1  # what the tile's programs have read
    mine = tl.program_id(0) * MERGED + tl.arange(0, MERGED)
    query, member, live = row_of_tile(tile, mine, GROUP, ROWS)
    live = live & (query < q_len)
    heads = kv_head * GROUP + member
    top, mass, sums = first_state(sinks, heads, live, D_PAD, SINKS)
    place = (row * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * max_splits * ROWS + mine
    dim = tl.arange(0, D_PAD)
    wait()
    # Unrolled, not staged: a ring in shared memory would take the room of programs that overlap with these.
    for split in tl.range(first, end, loop_unroll_factor=16):
        at = place + split * ROWS
        next_top = tl.load(part_stats + at * 2, mask=live, other=LOWEST)
        next_mass = tl.load(part_stats + at * 2 + 1, mask=live, other=0.0)
        next_sums = tl.load(part_sums + at[:, None] * D_PAD + dim[None, :], mask=live[:, None], other=0.0)
        top, mass, sums = merge(top, mass, sums, next_top, next_mass, next_sums)
    tokens = row * q_len + query
    store_outputs(out, tokens, heads, live, mass, sums, v_scale, KV_HEADS * GROUP, D, SCALED)
