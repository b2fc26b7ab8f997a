"""The two halves of Hopper's attention: one warp asks for blocks of keys and values, four multiply them.

Matrices lie on their side, keys by query rows: matrix instructions are 64 high, and a block has always 64 keys, but a
tile seldom 64 rows. The arithmetic is that of `attention_tiles_gpu.py`, bit for bit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.attention.blocks_triton import LOWEST
from peregrine.kernels.attention.splits_triton import split_of_index, start_of_split

COLUMN = 64  # dims of one column of a tile: what the copy engine and the matrix unit take side by side
WIDTH = gl.constexpr(COLUMN)
BLOCK = gl.constexpr(64)  # as that of attention_borders_gpu

split_of = gluon.jit(split_of_index)
split_start = gluon.jit(start_of_split)


@gluon.jit
def ask_for_blocks(  # type: ignore[no-untyped-def]
    keys,
    values,
    table,
    past,
    farthest,
    begin,
    count,
    column,
    k_tiles,
    v_tiles,
    ready,
    free,
    PAGE: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The asking warp: block by block, as places become free."""
    PIECE: gl.constexpr = PAGE if PAGE < BLOCK else BLOCK
    slots = slots_of(table, begin, farthest, PAGE, PIECE)
    for i in range(count):
        place = i % STAGES
        start = begin + i * BLOCK
        next_slots = slots_of(table, start + BLOCK, farthest, PAGE, PIECE)  # known before they are needed
        mbarrier.wait(free.index(place), ((i // STAGES) & 1) ^ 1)
        if start + BLOCK > past:  # holds keys of this forward
            gdc_wait()
        mbarrier.expect(ready.index(place), 4 * BLOCK * COLUMNS * WIDTH)
        for piece in gl.static_range(BLOCK // PIECE):
            for c in gl.static_range(COLUMNS):
                at = [slots[piece], column + c * WIDTH]
                k_tile = k_tiles.index(place * COLUMNS + c).slice(piece * PIECE, PIECE)
                v_tile = v_tiles.index(place * COLUMNS + c).slice(piece * PIECE, PIECE)
                tma.async_copy_global_to_shared(keys, at, ready.index(place), k_tile)
                tma.async_copy_global_to_shared(values, at, ready.index(place), v_tile)
        slots = next_slots


@gluon.jit
def slots_of(table, start, farthest, PAGE: gl.constexpr, PIECE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where the pieces of a block lie, a tuple; the scratch page for those behind the last key."""
    slots = ()
    for piece in gl.static_range(BLOCK // PIECE):
        index = start + piece * PIECE
        page = gl.load(table + index // PAGE, mask=index < farthest, other=0).to(gl.int32)
        slots = slots + (page * PAGE + index % PAGE,)  # type: ignore[assignment]  # noqa: RUF005
    return slots


@gluon.jit
def merge(top, mass, sums, next_top, next_mass, next_sums):  # type: ignore[no-untyped-def]
    """As that of attention_tiles_gpu, on its side."""
    new_top = gl.maximum(top, next_top)
    kept, added = gl.exp2(top - new_top), gl.exp2(next_top - new_top)
    return new_top, mass * kept + next_mass * added, sums * kept[None, :] + next_sums * added[None, :]


@gluon.jit
def put_queries(  # type: ignore[no-untyped-def]
    q, q_tiles, tokens, heads, live, q_stride, COLUMNS: gl.constexpr, flat: gl.constexpr
):
    """A tile's queries, in columns; zeros where there is none."""
    tokens = gl.convert_layout(tokens, gl.SliceLayout(1, flat))
    heads = gl.convert_layout(heads, gl.SliceLayout(1, flat))
    live = gl.convert_layout(live.to(gl.int32), gl.SliceLayout(1, flat)) != 0
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, flat))
    at = (tokens.to(gl.int64) * q_stride + heads * (COLUMNS * WIDTH))[:, None] + dim[None, :]
    for first in gl.static_range(0, COLUMNS, 3):  # some are asked for before the first of them is stored
        columns = ()
        for c in gl.static_range(first, min(first + 3, COLUMNS)):
            columns = columns + (gl.load(q + at + c * WIDTH, mask=live[:, None], other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
        for c in gl.static_range(len(columns)):
            q_tiles.index(first + c).store(columns[c])
    fence_async_shared()


@gluon.jit
def attend_blocks(  # type: ignore[no-untyped-def]
    q,
    out,
    limit,
    live,
    tokens,
    heads,
    farthest,
    count,
    factor,
    q_stride,
    k_tiles,
    v_tiles,
    ready,
    free,
    HEADS: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The multiplying warps: a block's scores, weights and sums, split by split, and the splits in order."""
    D: gl.constexpr = COLUMNS * WIDTH
    NUMBER: gl.constexpr = q.dtype.element_ty
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    in_rows: gl.constexpr = gl.SliceLayout(0, product)
    in_keys: gl.constexpr = gl.SliceLayout(1, product)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    p_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ROWS, element_bitwidth=16, rank=2)
    q_tiles = gl.allocate_shared_memory(NUMBER, [COLUMNS, ROWS, WIDTH], k_tiles.layout)
    p_tile = gl.allocate_shared_memory(NUMBER, [BLOCK, ROWS], p_layout)
    ones = gl.allocate_shared_memory(NUMBER, [64, BLOCK], k_tiles.layout)
    ones.store(gl.full([64, BLOCK], 1.0, NUMBER, flat))
    gdc_wait()
    gdc_launch_dependents()
    put_queries(q, q_tiles, tokens, heads, live, q_stride, COLUMNS, flat)
    top = gl.full([ROWS], LOWEST, gl.float32, in_rows)
    mass = gl.zeros([64, ROWS], gl.float32, product)
    first = gl.zeros([WIDTH, ROWS], gl.float32, product)
    second = gl.zeros([WIDTH, ROWS], gl.float32, product)
    whole_top = gl.full([ROWS], LOWEST, gl.float32, in_rows)
    whole_mass = gl.zeros([ROWS], gl.float32, in_rows)
    whole_first = gl.zeros([WIDTH, ROWS], gl.float32, product)
    whole_second = gl.zeros([WIDTH, ROWS], gl.float32, product)
    zero = gl.zeros([64, ROWS], gl.float32, product)
    dims = gl.arange(0, WIDTH, in_keys)
    for i in range(count):
        place = i % STAGES
        start = i * BLOCK
        mbarrier.wait(ready.index(place), (i // STAGES) & 1)
        scores = warpgroup_mma(k_tiles.index(place * COLUMNS), q_tiles.index(0).permute((1, 0)), zero, is_async=True)
        if COLUMNS == 2:
            k_tile = k_tiles.index(place * COLUMNS + 1)
            scores = warpgroup_mma(k_tile, q_tiles.index(1).permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,)) * factor  # [BLOCK, ROWS], as powers of 2
        index = start + gl.arange(0, BLOCK, in_keys)
        scores = gl.where(index[:, None] < limit[None, :], scores, float("-inf"))
        split = split_of(start)
        begins = start == split_start(split)
        top = gl.where(begins, LOWEST, top)
        new_top = gl.maximum(top, gl.max(scores, axis=0))
        weights = gl.exp2(scores - new_top[None, :]).to(NUMBER)
        kept = gl.where(begins, 0.0, gl.exp2(top - new_top))[None, :]
        top = new_top
        p_tile.store(weights)
        if start + BLOCK > farthest:  # what lies behind the last key may be anything, and 0 * NaN is NaN
            inside = start + gl.arange(0, BLOCK, gl.SliceLayout(1, flat)) < farthest
            for c in gl.static_range(COLUMNS):
                v_tile = v_tiles.index(place * COLUMNS + c)
                v_tile.store(gl.where(inside[:, None], v_tile.load(flat), 0.0))
        fence_async_shared()
        mass = warpgroup_mma(ones, p_tile, mass * kept, is_async=True)
        first = warpgroup_mma(v_tiles.index(place * COLUMNS).permute((1, 0)), p_tile, first * kept, is_async=True)
        if COLUMNS == 2:
            v_tile = v_tiles.index(place * COLUMNS + 1).permute((1, 0))
            second = warpgroup_mma(v_tile, p_tile, second * kept, is_async=True)
        mass, first, second = warpgroup_mma_wait(0, deps=(mass, first, second))
        gl.thread_barrier()
        mbarrier.arrive(free.index(place), count=1)
        if (start + BLOCK == split_start(split + 1)) | (start + BLOCK >= farthest):
            row_mass = gl.max(mass, axis=0)
            old_top, old_mass = whole_top, whole_mass
            whole_top, whole_mass, whole_first = merge(old_top, old_mass, whole_first, top, row_mass, first)
            if COLUMNS == 2:
                whole_top, whole_mass, whole_second = merge(old_top, old_mass, whole_second, top, row_mass, second)
    divisor = gl.where(live, whole_mass, 1.0)[None, :]
    to = ((tokens.to(gl.int64) * HEADS + heads) * D)[None, :] + dims[:, None]
    gl.store(out + to, (whole_first / divisor).to(NUMBER), mask=live[None, :])
    if COLUMNS == 2:
        gl.store(out + to + WIDTH, (whole_second / divisor).to(NUMBER), mask=live[None, :])
