"""Latent attention (MLA) for Hopper, in Gluon: the arithmetic of `latent_tiles_gpu.py`, bit for bit.

A program has three kinds of warps: one asks for its share of the keys (latent_hopper_shares.py), four weigh them, four
or eight add them up (latent_hopper_blocks.py). A tile has 16 (query, head) pairs or 64: more sums would not fit into
registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from peregrine.kernels.attention.blocks_triton import LOG2_E
from peregrine.kernels.attention.hopper_blocks import BLOCK, WIDTH
from peregrine.kernels.attention.mla_hopper_blocks import add_values, weigh_keys
from peregrine.kernels.attention.mla_hopper_shares import ask_for_latents, key_limits, rows_of_tile


@gluon.jit
def tile_of_place(place, q_starts, num_rows, QUERIES: gl.constexpr, HEAD_TILES: gl.constexpr):  # type: ignore[no-untyped-def]
    """As that of latent_attention_gpu."""
    row, after = 0, num_rows
    while after - row > 1:
        middle = (row + after) // 2
        starts_before = gl.load(q_starts + middle).to(gl.int32) // QUERIES + middle <= place // HEAD_TILES
        row = gl.where(starts_before, middle, row)
        after = gl.where(starts_before, after, middle)
    q_start = gl.load(q_starts + row).to(gl.int32)
    q_len = gl.load(q_starts + row + 1).to(gl.int32) - q_start
    return row, q_start, q_len, place - (q_start // QUERIES + row) * HEAD_TILES


@gluon.jit(do_not_specialize=["q_len", "num_rows", "num_pages", "max_splits"])
def hopper_latent_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, HEADS, RANK + ROPE], tokens q_stride apart
    out,  # [N, HEADS, RANK]
    keys,  # [slots, RANK + ROPE] in pages by columns
    positions,  # [N]
    q_starts,  # [R + 1]
    past_lens,  # [R]
    table,  # [R, num_pages]
    held_sums,  # f32 if APART [R * tiles, max_splits, ROWS, RANK], else [N, HEADS, RANK]
    held_stats,  # [R * tiles, max_splits, ROWS, 2] f32: top, mass
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
    APART: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid if APART (programs, tiles, rows), else (places for tiles,), as `latent_kernel`."""
    LATENT: gl.constexpr = RANK // WIDTH
    COLUMNS: gl.constexpr = (RANK + ROPE) // WIDTH
    HEADS_EACH: gl.constexpr = HEADS if HEADS < ROWS else ROWS
    QUERIES: gl.constexpr = ROWS // HEADS_EACH
    HEAD_TILES: gl.constexpr = (HEADS + HEADS_EACH - 1) // HEADS_EACH
    if APART:
        program, programs = gl.program_id(0), gl.num_programs(0)
        tile, row = gl.program_id(1), gl.program_id(2)
        q_start = row * q_len
    else:
        program, programs = 0, 1
        last_first = gl.num_programs(0) - 1 - gl.program_id(0)
        row, q_start, q_len, tile = tile_of_place(last_first, q_starts, num_rows, QUERIES, HEAD_TILES)
    p_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ROWS, element_bitwidth=16, rank=2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(keys.dtype, [STAGES * COLUMNS, BLOCK, WIDTH], keys.layout)
    q_tiles = gl.allocate_shared_memory(keys.dtype, [COLUMNS, ROWS, WIDTH], keys.layout)
    p_tile = gl.allocate_shared_memory(keys.dtype, [BLOCK, ROWS], p_layout)
    lines = gl.allocate_shared_memory(gl.float32, [6, ROWS], line)
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
    farthest = gl.max(limit, axis=0)
    nearest = gl.min(gl.where(live, limit, farthest), axis=0)
    # The rows of a tile are held side by side, the live ones first.
    if APART:
        first_place = (row * gl.num_programs(1) + tile).to(gl.int64) * max_splits * ROWS
    else:
        first_token = q_start + tile // HEAD_TILES * QUERIES
        first_place = first_token.to(gl.int64) * HEADS + tile % HEAD_TILES * HEADS_EACH
    row_table = table + row.to(gl.int64) * num_pages
    factor = scale * LOG2_E
    gl.warp_specialize(
        [
            (
                add_values,
                (
                    out,
                    held_sums,
                    first_place,
                    nearest,
                    farthest,
                    program,
                    programs,
                    tiles,
                    p_tile,
                    lines,
                    ready,
                    free,
                    p_ready,
                    p_free,
                    COLUMNS,
                    LATENT,
                    APART,
                    STAGES,
                    num_warps,
                ),
            ),
            (
                weigh_keys,
                (
                    q,
                    held_stats,
                    positions,
                    num_pages * PAGE,
                    tile,
                    q_start,
                    q_len,
                    first_place,
                    nearest,
                    farthest,
                    program,
                    programs,
                    factor,
                    q_stride,
                    tiles,
                    q_tiles,
                    p_tile,
                    lines,
                    ready,
                    p_ready,
                    p_free,
                    HEADS,
                    COLUMNS,
                    APART,
                    STAGES,
                ),
            ),
            (
                ask_for_latents,
                (
                    keys,
                    row_table,
                    past,
                    nearest,
                    farthest,
                    program,
                    programs,
                    tiles,
                    ready,
                    free,
                    PAGE,
                    COLUMNS,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [160, 24],  # registers of a thread; those that add have the rest
    )
