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
def empty_sums(COLUMNS: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of nothing, a tuple of columns that are as wide as all warps together multiply."""
    sums = ()
    for _ in gl.static_range(COLUMNS):
        sums = sums + (gl.zeros([16 * layout.warps_per_cta[0], ROWS], gl.float32, layout),)  # type: ignore[assignment]  # noqa: RUF005
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
    summing: gl.constexpr,
    flat: gl.constexpr,
):
    """A split's state after one more block."""
    ROWS: gl.constexpr = p_tile.shape[1]
    TALL: gl.constexpr = sums[0].shape[0]
    scores = gl.zeros([BLOCK, ROWS], gl.float32, product)
    for c in gl.static_range(COLUMNS):
        q_tile = q_tiles.index(c).permute((1, 0))
        scores = warpgroup_mma(tiles.index(place * COLUMNS + c), q_tile, scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,)) * factor  # [BLOCK, ROWS], as powers of 2
    index = start + gl.arange(0, BLOCK, gl.SliceLayout(1, product))
    scores = gl.where(index[:, None] < limit[None, :], scores, float("-inf"))
    new_top = gl.maximum(top, gl.ceil(gl.max(scores, axis=0)))
    p_tile.store(gl.exp2(scores - new_top[None, :]).to(p_tile.dtype))
    kept = power_of_two(top - new_top)
    kept_sums = gl.convert_layout(kept, gl.SliceLayout(0, summing))[None, :]
    if start + BLOCK > farthest:  # what lies behind the last key may be anything, and 0 * NaN is NaN
        inside = start + gl.arange(0, BLOCK, gl.SliceLayout(1, flat)) < farthest
        for c in gl.static_range(LATENT):
            tile = tiles.index(place * COLUMNS + c)
            tile.store(gl.where(inside[:, None], tile.load(flat), 0.0))
    fence_async_shared()
    mass = warpgroup_mma(ones, p_tile, mass * kept[None, :], is_async=True)
    added = ()
    for c in gl.static_range(len(sums)):
        # Columns lie one after the other, so that two of them are a wider one.
        tile = tiles.index(place * COLUMNS + c * (TALL // WIDTH))
        tile = tile._reinterpret(tile.dtype, [BLOCK, TALL], tile.layout).permute((1, 0))
        added = added + (warpgroup_mma(tile, p_tile, sums[c] * kept_sums, is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
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
    COLUMNS: gl.constexpr,
    LATENT: gl.constexpr,
    ROWS: gl.constexpr,
    APART: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The multiplying warps: split by split, each put aside if APART, else added to the whole, which is held there."""
    RANK: gl.constexpr = LATENT * WIDTH
    NUMBER: gl.constexpr = q.dtype.element_ty
    TALL: gl.constexpr = 16 * WARPS
    # Four warps are as high as a block. If there are eight, the others take half of the rows; of sums, half the height.
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, ROWS * 4 // WARPS, 16])
    summing: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    in_rows: gl.constexpr = gl.SliceLayout(0, product)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    p_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ROWS, element_bitwidth=16, rank=2)
    q_tiles = gl.allocate_shared_memory(NUMBER, [COLUMNS, ROWS, WIDTH], tiles.layout)
    p_tile = gl.allocate_shared_memory(NUMBER, [BLOCK, ROWS], p_layout)
    ones = gl.full([64, BLOCK], 1.0, NUMBER, gl.DotOperandLayout(operand_index=0, parent=product, k_width=2))
    gdc_wait()
    gdc_launch_dependents()
    put_queries(q, q_tiles, tokens, heads, live, q_stride, COLUMNS, flat)
    dims = gl.arange(0, TALL, gl.SliceLayout(1, summing))
    sums_place = gl.convert_layout(place_of, gl.SliceLayout(0, summing))
    sums_live = gl.convert_layout(live.to(gl.int32), gl.SliceLayout(0, summing)) != 0
    whole_top = gl.full([ROWS], LOWEST, gl.float32, in_rows)
    whole_mass = gl.zeros([ROWS], gl.float32, in_rows)
    i = 0
    for split in range(run, run_end):
        top = gl.full([ROWS], LOWEST, gl.float32, in_rows)
        mass = gl.zeros([64, ROWS], gl.float32, product)
        sums = empty_sums(RANK // TALL, ROWS, summing)
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
                summing,
                flat,
            )
            gl.thread_barrier()
            mbarrier.arrive(free.index(place), count=1)
            i += 1
        row_mass = gl.max(mass, axis=0)
        if APART:
            stats_to = held_stats + (place_of + split * ROWS) * 2
            gl.store(stats_to, top, mask=live)
            gl.store(stats_to + 1, row_mass, mask=live)
            sums_to = held_sums + (sums_place + split * ROWS)[None, :] * RANK + dims[:, None]
            for c in gl.static_range(RANK // TALL):
                gl.store(sums_to + c * TALL, sums[c], mask=sums_live[None, :])
        else:
            new_top = gl.maximum(whole_top, top)
            kept, added = power_of_two(whole_top - new_top), power_of_two(top - new_top)
            whole_mass = whole_mass * kept + row_mass * added
            whole_top = new_top
            kept = gl.convert_layout(kept, gl.SliceLayout(0, summing))[None, :]
            added = gl.convert_layout(added, gl.SliceLayout(0, summing))[None, :]
            held = held_sums + sums_place[None, :] * RANK + dims[:, None]
            for c in gl.static_range(RANK // TALL):  # a thread reads what it wrote itself
                before = gl.load(held + c * TALL, mask=(sums_live & (split > run))[None, :], other=0.0)
                gl.store(held + c * TALL, before * kept + sums[c] * added, mask=sums_live[None, :])
    if not APART:
        divisor = gl.convert_layout(gl.where(live, whole_mass, 1.0), gl.SliceLayout(0, summing))[None, :]
        at = sums_place[None, :] * RANK + dims[:, None]
        for c in gl.static_range(RANK // TALL):
            whole = gl.load(held_sums + at + c * TALL, mask=sums_live[None, :], other=0.0)
            gl.store(out + at + c * TALL, (whole / divisor).to(NUMBER), mask=sums_live[None, :])
