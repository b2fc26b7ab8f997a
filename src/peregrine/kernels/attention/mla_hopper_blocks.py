"""What the warps of Hopper's latent attention do with keys: some weigh them, others add up their values.

A block of keys lies in columns of 64 entries: those of the latent serve twice, for scores and for sums, the turned part
once. While the values of one block are added up, the next is weighed. The arithmetic is that of `latent_tiles_gpu.py`,
bit for bit; matrices lie on their side, keys by query rows.
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

from peregrine.kernels.attention.blocks_triton import LOWEST
from peregrine.kernels.attention.hopper_blocks import BLOCK, WIDTH, put_queries
from peregrine.kernels.attention.mla_hopper_shares import key_limits, num_sides, rows_of_tile, share_of, width_of


@gluon.jit
def power_of_two(exponent):  # type: ignore[no-untyped-def]
    """As that of latent_tiles_gpu."""
    biased = gl.maximum(exponent, -127.0) + (2.0**23 + 127.0)
    return (biased.to(gl.int32, bitcast=True) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def rows_of_width(lines, width, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Which rows of the tile have splits of this width."""
    return width_of(lines.index(3).load(layout).to(gl.int32, bitcast=True)) == width


@gluon.jit
def weigh_keys(  # type: ignore[no-untyped-def]
    q,
    held_stats,
    positions,
    num_keys,
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
    HEADS: gl.constexpr,
    COLUMNS: gl.constexpr,
    APART: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Four warps: the scores of a block become weights in `p_tile`.

    `lines` have a number for each row: what is kept of the split's sums, and in the very end what the whole is divided
    by; at the end of a split what is kept of the whole, and what the split is scaled by; how many keys the row sees;
    the whole's top and mass.
    """
    ROWS: gl.constexpr = p_tile.shape[1]
    NUMBER: gl.constexpr = p_tile.dtype
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    in_rows: gl.constexpr = gl.SliceLayout(0, product)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tokens, heads, live = rows_of_tile(tile, q_start, q_len, HEADS, ROWS, gl.SliceLayout(1, flat))
    lines.index(3).store(key_limits(positions, tokens, live, num_keys).to(gl.float32, bitcast=True))
    ones = gl.full([64, 16], 1.0, NUMBER, gl.DotOperandLayout(operand_index=0, parent=product, k_width=2))
    gdc_wait()
    gdc_launch_dependents()
    put_queries(q, q_tiles, tokens, heads, live, q_stride, COLUMNS, flat)
    gl.thread_barrier()
    lines.index(4).store(gl.full([ROWS], LOWEST, gl.float32, in_rows))
    lines.index(5).store(gl.zeros([ROWS], gl.float32, in_rows))
    i = 0
    for side in range(num_sides(nearest, farthest)):
        run, run_end, width, seen = share_of(side, nearest, farthest, program, programs)
        for split in range(run, run_end):
            top = gl.full([ROWS], LOWEST, gl.float32, in_rows)
            mass = gl.zeros([64, ROWS], gl.float32, product)
            stop = gl.minimum((split + 1) * width, seen)
            for start in range(split * width, stop, BLOCK):
                place = i % STAGES
                mbarrier.wait(ready.index(place), (i // STAGES) & 1)
                scores = gl.zeros([BLOCK, ROWS], gl.float32, product)
                for c in gl.static_range(COLUMNS):
                    q_tile = q_tiles.index(c).permute((1, 0))
                    scores = warpgroup_mma(tiles.index(place * COLUMNS + c), q_tile, scores, is_async=True)
                scores = warpgroup_mma_wait(0, deps=(scores,)) * factor  # [BLOCK, ROWS], as powers of 2
                if start + BLOCK > nearest:  # not all rows see all keys
                    index = start + gl.arange(0, BLOCK, gl.SliceLayout(1, product))
                    limit = lines.index(3).load(in_rows).to(gl.int32, bitcast=True)
                    scores = gl.where(index[:, None] < limit[None, :], scores, float("-inf"))
                new_top = gl.maximum(top, gl.ceil(gl.max(scores, axis=0)))
                weights = gl.exp2(scores - new_top[None, :]).to(NUMBER)
                kept = power_of_two(top - new_top)
                top = new_top
                mbarrier.wait(p_free, (i & 1) ^ 1)
                p_tile.store(weights)
                lines.index(0).store(kept)
                if not APART:  # noqa: SIM102
                    if start + BLOCK >= stop:
                        whole_top = lines.index(4).load(in_rows)
                        new_whole = gl.maximum(whole_top, top)
                        lines.index(1).store(power_of_two(whole_top - new_whole))
                        lines.index(2).store(power_of_two(top - new_whole))
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(p_ready, count=1)
                mass = mass * kept[None, :]
                for k in gl.static_range(BLOCK // 16):
                    mass = warpgroup_mma(ones, p_tile.slice(k * 16, 16), mass, is_async=True)
                mass = warpgroup_mma_wait(0, deps=(mass,))
                i += 1
            row_mass = gl.max(mass, axis=0)
            mine = rows_of_width(lines, width, in_rows)
            if APART:
                stats_to = held_stats + (first_place + split * ROWS + gl.arange(0, ROWS, in_rows)) * 2
                gl.store(stats_to, top, mask=mine)
                gl.store(stats_to + 1, row_mass, mask=mine)
            else:
                whole_top, whole_mass = lines.index(4).load(in_rows), lines.index(5).load(in_rows)
                new_whole = gl.maximum(whole_top, top)
                kept, added = power_of_two(whole_top - new_whole), power_of_two(top - new_whole)
                lines.index(5).store(gl.where(mine, whole_mass * kept + row_mass * added, whole_mass))
                lines.index(4).store(gl.where(mine, new_whole, whole_top))
    if not APART:
        mbarrier.wait(p_free, (i & 1) ^ 1)
        lines.index(0).store(lines.index(5).load(in_rows))
        gl.thread_barrier()
        mbarrier.arrive(p_ready, count=1)


@gluon.jit
def add_values(  # type: ignore[no-untyped-def]
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
    COLUMNS: gl.constexpr,
    LATENT: gl.constexpr,
    APART: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The other warps: weighted latents are added up, split by split.

    A split's sums are put aside if APART, else added to the whole, which is held in memory: registers are full.
    """
    ROWS: gl.constexpr = p_tile.shape[1]
    RANK: gl.constexpr = LATENT * WIDTH
    TALL: gl.constexpr = 16 * WARPS  # entries of a latent that all warps together multiply
    summing: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    in_rows: gl.constexpr = gl.SliceLayout(0, summing)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    rows = gl.arange(0, ROWS, in_rows)[None, :]
    entries = gl.arange(0, TALL, gl.SliceLayout(1, summing))[:, None]
    held_sums += first_place * RANK
    out += first_place * RANK
    i = 0
    for side in range(num_sides(nearest, farthest)):
        run, run_end, width, seen = share_of(side, nearest, farthest, program, programs)
        for split in range(run, run_end):
            sums = ()
            for _ in gl.static_range(RANK // TALL):
                sums = sums + (gl.zeros([TALL, ROWS], gl.float32, summing),)  # type: ignore[assignment]  # noqa: RUF005
            stop = gl.minimum((split + 1) * width, seen)
            for start in range(split * width, stop, BLOCK):
                place = i % STAGES
                mbarrier.wait(ready.index(place), (i // STAGES) & 1)
                mbarrier.wait(p_ready, i & 1)
                # What lies behind the last key may be anything, and 0 * NaN is NaN.
                if start + BLOCK > farthest:
                    inside = start + gl.arange(0, BLOCK, gl.SliceLayout(1, flat)) < farthest
                    for c in gl.static_range(LATENT):
                        column = tiles.index(place * COLUMNS + c)
                        column.store(gl.where(inside[:, None], column.load(flat), 0.0))
                    fence_async_shared()
                kept = lines.index(0).load(in_rows)[None, :]
                added = ()
                for c in gl.static_range(len(sums)):
                    # Columns lie one after the other, so that two of them are a wider one.
                    column = tiles.index(place * COLUMNS + c * TALL // WIDTH)
                    column = column._reinterpret(column.dtype, [BLOCK, TALL], column.layout).permute((1, 0))
                    added = added + (warpgroup_mma(column, p_tile, sums[c] * kept, is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
                done = warpgroup_mma_wait(0, deps=added)
                sums = (done,) if len(added) == 1 else done  # one comes back as itself
                if not APART:  # noqa: SIM102
                    if start + BLOCK >= stop:
                        mine = rows_of_width(lines, width, in_rows)
                        for c in gl.static_range(len(sums)):  # a thread reads what it wrote itself
                            held = held_sums + rows * RANK + entries + c * TALL
                            before = gl.load(held, mask=mine[None, :] & (split > run), other=0.0)
                            before = before * lines.index(1).load(in_rows)[None, :]
                            whole = before + sums[c] * lines.index(2).load(in_rows)[None, :]
                            gl.store(held, whole, mask=mine[None, :])
                gl.thread_barrier()
                mbarrier.arrive(free.index(place), count=1)
                mbarrier.arrive(p_free, count=1)
                i += 1
            if APART:
                mine = rows_of_width(lines, width, in_rows)
                for c in gl.static_range(len(sums)):
                    held = held_sums + split * (ROWS * RANK) + rows * RANK + entries + c * TALL
                    gl.store(held, sums[c], mask=mine[None, :])
    if not APART:
        mbarrier.wait(p_ready, i & 1)
        divisor = lines.index(0).load(in_rows)[None, :]
        live = lines.index(3).load(in_rows).to(gl.int32, bitcast=True)[None, :] > 0
        for c in gl.static_range(RANK // TALL):
            at = rows * RANK + entries + c * TALL
            whole = gl.load(held_sums + at, mask=live, other=0.0)
            gl.store(out + at, (whole / divisor).to(out.dtype.element_ty), mask=live)
