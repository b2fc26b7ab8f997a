"""What the multiplying warps of Hopper's latent attention do; another asks for keys, as in attention_hopper_blocks.py.

A block of keys lies in columns of 64 entries: those of the latent serve twice, for scores and for sums, the turned part
once. The arithmetic is that of `latent_tiles_gpu.py`, bit for bit; matrices lie on their side, keys by query rows.
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

from peregrine.kernels.attention_hopper_blocks import BLOCK, WIDTH, put_queries
from peregrine.kernels.attention_tiles_gpu import LOWEST
from peregrine.kernels.latent_tiles_gpu import latent_split_of_index, latent_start_of_split

split_of = gluon.jit(latent_split_of_index)
split_start = gluon.jit(latent_start_of_split)


@gluon.jit
def power_of_two(exponent):  # type: ignore[no-untyped-def]
    """As that of latent_tiles_gpu."""
    return ((gl.maximum(exponent, -127.0).to(gl.int32) + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def empty_sums(COLUMNS: gl.constexpr, ROWS: gl.constexpr, product: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of nothing, a tuple of columns."""
    sums = ()
    for _ in gl.static_range(COLUMNS):
        sums = sums + (gl.zeros([WIDTH, ROWS], gl.float32, product),)  # type: ignore[assignment]  # noqa: RUF005
    return sums


@gluon.jit
def add_block(  # type: ignore[no-untyped-def]
    tiles,
    place,
    q_tiles,
    p_tile,
    ones,
    limit,
    farthest,
    start,
    factor,
    top,
    mass,
    sums,
    COLUMNS: gl.constexpr,
    LATENT: gl.constexpr,
    product: gl.constexpr,
    flat: gl.constexpr,
):
    """A split's state after one more block."""
    ROWS: gl.constexpr = p_tile.shape[1]
    scores = gl.zeros([BLOCK, ROWS], gl.float32, product)
    for c in gl.static_range(COLUMNS):
        q_tile = q_tiles.index(c).permute((1, 0))
        scores = warpgroup_mma(tiles.index(place * COLUMNS + c), q_tile, scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,)) * factor  # [BLOCK, ROWS], as powers of 2
    index = start + gl.arange(0, BLOCK, gl.SliceLayout(1, product))
    scores = gl.where(index[:, None] < limit[None, :], scores, float("-inf"))
    new_top = gl.maximum(top, gl.ceil(gl.max(scores, axis=0)))
    p_tile.store(gl.exp2(scores - new_top[None, :]).to(p_tile.dtype))
    kept = power_of_two(top - new_top)[None, :]
    if start + BLOCK > farthest:  # what lies behind the last key may be anything, and 0 * NaN is NaN
        inside = start + gl.arange(0, BLOCK, gl.SliceLayout(1, flat)) < farthest
        for c in gl.static_range(LATENT):
            tile = tiles.index(place * COLUMNS + c)
            tile.store(gl.where(inside[:, None], tile.load(flat), 0.0))
    fence_async_shared()
    mass = warpgroup_mma(ones, p_tile, mass * kept, is_async=True)
    added = ()
    for c in gl.static_range(LATENT):
        tile = tiles.index(place * COLUMNS + c).permute((1, 0))
        added = added + (warpgroup_mma(tile, p_tile, sums[c] * kept, is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
    done = warpgroup_mma_wait(0, deps=(mass,) + added)  # noqa: RUF005
    return new_top, done[0], done[1:]


@gluon.jit
def attend_keys(  # type: ignore[no-untyped-def]
    q,
    out,
    held_sums,
    held_stats,
    limit,
    live,
    tokens,
    heads,
    place_of,
    farthest,
    run,
    run_end,
    factor,
    q_stride,
    tiles,
    ready,
    free,
    HEADS: gl.constexpr,
    COLUMNS: gl.constexpr,
    LATENT: gl.constexpr,
    ROWS: gl.constexpr,
    APART: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The multiplying warps: split by split, put aside if APART, else added to the whole."""
    RANK: gl.constexpr = LATENT * WIDTH
    NUMBER: gl.constexpr = q.dtype.element_ty
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 16, 16])
    in_rows: gl.constexpr = gl.SliceLayout(0, product)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    p_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ROWS, element_bitwidth=16, rank=2)
    q_tiles = gl.allocate_shared_memory(NUMBER, [COLUMNS, ROWS, WIDTH], tiles.layout)
    p_tile = gl.allocate_shared_memory(NUMBER, [BLOCK, ROWS], p_layout)
    ones = gl.allocate_shared_memory(NUMBER, [64, BLOCK], tiles.layout)
    ones.store(gl.full([64, BLOCK], 1.0, NUMBER, flat))
    gdc_wait()
    gdc_launch_dependents()
    put_queries(q, q_tiles, tokens, heads, live, q_stride, COLUMNS, flat)
    whole_top = gl.full([ROWS], LOWEST, gl.float32, in_rows)
    whole_mass = gl.zeros([ROWS], gl.float32, in_rows)
    whole = empty_sums(LATENT, ROWS, product)
    dims = gl.arange(0, WIDTH, gl.SliceLayout(1, product))
    i = 0
    for split in range(run, run_end):
        top = gl.full([ROWS], LOWEST, gl.float32, in_rows)
        mass = gl.zeros([64, ROWS], gl.float32, product)
        sums = empty_sums(LATENT, ROWS, product)
        stop = gl.minimum(split_start(split + 1), farthest)
        for start in range(split_start(split), stop, BLOCK):
            place = i % STAGES
            mbarrier.wait(ready.index(place), (i // STAGES) & 1)
            top, mass, sums = add_block(
                tiles,
                place,
                q_tiles,
                p_tile,
                ones,
                limit,
                farthest,
                start,
                factor,
                top,
                mass,
                sums,
                COLUMNS,
                LATENT,
                product,
                flat,
            )
            gl.thread_barrier()
            mbarrier.arrive(free.index(place), count=1)
            i += 1
        row_mass = gl.max(mass, axis=0)
        if APART:
            to = place_of + split * ROWS
            gl.store(held_stats + to * 2, top, mask=live)
            gl.store(held_stats + to * 2 + 1, row_mass, mask=live)
            for c in gl.static_range(LATENT):
                sums_to = held_sums + to[None, :] * RANK + c * WIDTH + dims[:, None]
                gl.store(sums_to, sums[c], mask=live[None, :])
        else:
            new_top = gl.maximum(whole_top, top)
            kept, added = power_of_two(whole_top - new_top), power_of_two(top - new_top)
            whole_mass = whole_mass * kept + row_mass * added
            whole_top = new_top
            merged = ()
            for c in gl.static_range(LATENT):
                merged = merged + (whole[c] * kept[None, :] + sums[c] * added[None, :],)  # type: ignore[assignment]  # noqa: RUF005
            whole = merged
    if not APART:
        divisor = gl.where(live, whole_mass, 1.0)[None, :]
        to = ((tokens.to(gl.int64) * HEADS + heads) * RANK)[None, :] + dims[:, None]
        for c in gl.static_range(LATENT):
            gl.store(out + to + c * WIDTH, (whole[c] / divisor).to(NUMBER), mask=live[None, :])
