"""The warps of `mla_hopper.py` that add weighted latents to acc, and how the weighing warps speak to them, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from peregrine.kernels.attention.hopper import BLOCK, WIDTH
from peregrine.kernels.attention.mla_hopper_keys import num_sides, program_splits, split_width

# Lines of `row_stats`, a number for each row of the tile, through which the weighing warps speak to those that add.
KEPT = gl.constexpr(0)  # factor of the split's acc before a block is added; at the very end l, which divides the total
TOTAL_KEPT = gl.constexpr(1)  # at the end of a split: factor of the total acc
TOTAL_ADDED = gl.constexpr(2)  # at the end of a split: factor of the split's acc
LIMIT = gl.constexpr(3)  # keys that the row sees, an int32
TOTAL_M = gl.constexpr(4)
TOTAL_L = gl.constexpr(5)


@gluon.jit
def rows_of_width(row_stats, width, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Which rows of the tile have splits of this width."""
    return split_width(row_stats.index(LIMIT).load(layout).to(gl.int32, bitcast=True)) == width


@gluon.jit
def add_values(  # type: ignore[no-untyped-def]
    out,
    partial_acc,
    first_place,
    part,
    ring,
    weights,
    COLUMNS: gl.constexpr,
    LATENT: gl.constexpr,
    SPLIT_KV: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The other warps: add weighted latents to acc, split by split.

    The acc of a split is stored if SPLIT_KV, else added to the total, which is in memory: registers are full.
    """
    min_limit, max_limit, program, programs = part
    tiles, ready, free = ring
    p_tile, row_stats, p_ready, p_free = weights
    ROWS: gl.constexpr = p_tile.shape[1]
    RANK: gl.constexpr = LATENT * WIDTH
    TALL: gl.constexpr = 16 * WARPS  # entries of a latent that all warps together multiply
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    in_rows: gl.constexpr = gl.SliceLayout(0, acc_layout)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    rows = gl.arange(0, ROWS, in_rows)[None, :]
    entries = gl.arange(0, TALL, gl.SliceLayout(1, acc_layout))[:, None]
    partial_acc += first_place * RANK
    out += first_place * RANK
    i = 0
    for side in range(num_sides(min_limit, max_limit)):
        run, run_end, width, seen = program_splits(side, min_limit, max_limit, program, programs)
        for split in range(run, run_end):
            acc = ()
            for _ in gl.static_range(RANK // TALL):
                acc = acc + (gl.zeros([TALL, ROWS], gl.float32, acc_layout),)  # type: ignore[assignment]  # noqa: RUF005
            stop = gl.minimum((split + 1) * width, seen)
            for start in range(split * width, stop, BLOCK):
                place = i % STAGES
                mbarrier.wait(ready.index(place), (i // STAGES) & 1)
                mbarrier.wait(p_ready, i & 1)
                # What follows the last key may be NaN, and so is 0 * NaN.
                if start + BLOCK > max_limit:
                    inside = start + gl.arange(0, BLOCK, gl.SliceLayout(1, flat)) < max_limit
                    for c in gl.static_range(LATENT):
                        column = tiles.index(place * COLUMNS + c)
                        column.store(gl.where(inside[:, None], column.load(flat), 0.0))
                    fence_async_shared()
                kept = row_stats.index(KEPT).load(in_rows)[None, :]
                added = ()
                for c in gl.static_range(len(acc)):
                    # Columns are adjacent in memory: two of them are one wider tile.
                    column = tiles.index(place * COLUMNS + c * TALL // WIDTH)
                    column = column._reinterpret(column.dtype, [BLOCK, TALL], column.layout).permute((1, 0))
                    added = added + (warpgroup_mma(column, p_tile, acc[c] * kept, is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
                done = warpgroup_mma_wait(0, deps=added)
                acc = (done,) if len(added) == 1 else done  # a single one is not returned as a tuple
                if not SPLIT_KV:  # noqa: SIM102
                    if start + BLOCK >= stop:
                        mine = rows_of_width(row_stats, width, in_rows)
                        for c in gl.static_range(len(acc)):  # a thread reads what it wrote itself
                            held = partial_acc + rows * RANK + entries + c * TALL
                            before = gl.load(held, mask=mine[None, :] & (split > run), other=0.0)
                            before = before * row_stats.index(TOTAL_KEPT).load(in_rows)[None, :]
                            whole = before + acc[c] * row_stats.index(TOTAL_ADDED).load(in_rows)[None, :]
                            gl.store(held, whole, mask=mine[None, :])
                gl.thread_barrier()
                mbarrier.arrive(free.index(place), count=1)
                mbarrier.arrive(p_free, count=1)
                i += 1
            if SPLIT_KV:
                mine = rows_of_width(row_stats, width, in_rows)
                for c in gl.static_range(len(acc)):
                    held = partial_acc + split * (ROWS * RANK) + rows * RANK + entries + c * TALL
                    gl.store(held, acc[c], mask=mine[None, :])
    if not SPLIT_KV:
        mbarrier.wait(p_ready, i & 1)
        divisor = row_stats.index(KEPT).load(in_rows)[None, :]
        live = row_stats.index(LIMIT).load(in_rows).to(gl.int32, bitcast=True)[None, :] > 0
        for c in gl.static_range(RANK // TALL):
            at = rows * RANK + entries + c * TALL
            whole = gl.load(partial_acc + at, mask=live, other=0.0)
            gl.store(out + at, (whole / divisor).to(out.dtype.element_ty), mask=live)
