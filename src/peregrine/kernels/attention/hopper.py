"""Dense decode attention for Hopper, in Gluon: the arithmetic of `blocks.py`, bit for bit.

It serves windows whose tiles alone fill the device: one program reads all keys of its tile. One of its warps only
copies: blocks of keys and values go by TMA into a ring of STAGES places, ahead of the four warps that multiply them.
Keys from before this forward are copied while the previous kernel is still running.

Matrices are transposed, keys by query rows: matrix instructions are 64 high, and a block always has 64 keys, but a tile
seldom 64 rows.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peregrine.kernels.attention import plan
from peregrine.kernels.attention.blocks import LOG2_E, LOWEST, next_top_fn, row_queries_fn
from peregrine.kernels.runtime.layouts import product_layout

WIDTH = gl.constexpr(plan.HOPPER_COLUMN)
BLOCK = gl.constexpr(plan.BLOCK)

split_of = gluon.jit(plan.split_of_index)
split_start = gluon.jit(plan.start_of_split)
row_queries = gluon.jit(row_queries_fn)
next_top = gluon.jit(next_top_fn)


def paged(store: Tensor, page_size: int) -> TensorDescriptor:
    """TMA descriptor of one layer's keys or values [slots, Hkv, D]: boxes of one page by one column."""
    number = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[store.dtype]
    shape = [min(page_size, BLOCK.value), WIDTH.value]
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK.value, WIDTH.value], number)
    return TensorDescriptor.from_tensor(store.flatten(1), shape, layout)


@gluon.jit
def copy_blocks(  # type: ignore[no-untyped-def]
    keys,
    values,
    table,
    past,
    blocks,
    column,
    ring,
    done,
    PAGE: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The copying warp: bring block after block as places of the ring become free; `done` were brought before."""
    max_limit, count = blocks
    k_tiles, v_tiles, ready, free = ring
    PIECE: gl.constexpr = PAGE if PAGE < BLOCK else BLOCK
    slots = slots_of(table, 0, max_limit, PAGE, PIECE)
    for i in range(count):
        place = (done + i) % STAGES
        start = i * BLOCK
        next_slots = slots_of(table, start + BLOCK, max_limit, PAGE, PIECE)  # loaded a block ahead
        mbarrier.wait(free.index(place), (((done + i) // STAGES) & 1) ^ 1)
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
def slots_of(table, start, max_limit, PAGE: gl.constexpr, PIECE: gl.constexpr):  # type: ignore[no-untyped-def]
    """First slots of the pieces of a block, as a tuple; pieces after the last key are on the scratch page."""
    slots = ()
    for piece in gl.static_range(BLOCK // PIECE):
        index = start + piece * PIECE
        page = gl.load(table + index // PAGE, mask=index < max_limit, other=0).to(gl.int32)
        slots = slots + (page * PAGE + index % PAGE,)  # type: ignore[assignment]  # noqa: RUF005
    return slots


@gluon.jit
def merge(m_i, l_i, acc, next_m, next_l, next_acc):  # type: ignore[no-untyped-def]
    """`blocks.merge`, transposed: the state of two runs of keys, the second read after the first."""
    new_m = next_top(m_i, next_m)
    kept, added = gl.exp2(m_i - new_m), gl.exp2(next_m - new_m)
    return new_m, gl.fma(next_l, added, l_i * kept), gl.fma(next_acc, added[None, :], acc * kept[None, :])


@gluon.jit
def load_queries(  # type: ignore[no-untyped-def]
    q, q_tiles, tokens, heads, live, q_stride, COLUMNS: gl.constexpr, flat: gl.constexpr
):
    """A tile's queries go to shared memory, by columns; zeros in rows that are not live."""
    tokens = gl.convert_layout(tokens, gl.SliceLayout(1, flat))
    heads = gl.convert_layout(heads, gl.SliceLayout(1, flat))
    live = gl.convert_layout(live.to(gl.int32), gl.SliceLayout(1, flat)) != 0
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, flat))
    at = (tokens.to(gl.int64) * q_stride + heads * (COLUMNS * WIDTH))[:, None] + dim[None, :]
    for first in gl.static_range(0, COLUMNS, 3):  # three loads are in flight at a time
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
    rows,
    blocks,
    factor,
    q_stride,
    ring,
    HEADS: gl.constexpr,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The multiplying warps: blocks are added to the state of their split, splits are merged in order."""
    limit, live, tokens, heads = rows
    max_limit, count = blocks
    k_tiles, v_tiles, ready, free = ring
    D: gl.constexpr = COLUMNS * WIDTH
    NUMBER: gl.constexpr = q.dtype.element_ty
    product: gl.constexpr = product_layout(ROWS)
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
    load_queries(q, q_tiles, tokens, heads, live, q_stride, COLUMNS, flat)
    m_i = gl.full([ROWS], LOWEST, gl.float32, in_rows)
    l_i = gl.zeros([64, ROWS], gl.float32, product)
    first = gl.zeros([WIDTH, ROWS], gl.float32, product)
    second = gl.zeros([WIDTH, ROWS], gl.float32, product)
    total_m = gl.full([ROWS], LOWEST, gl.float32, in_rows)
    total_l = gl.zeros([ROWS], gl.float32, in_rows)
    total_first = gl.zeros([WIDTH, ROWS], gl.float32, product)
    total_second = gl.zeros([WIDTH, ROWS], gl.float32, product)
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
        scores = warpgroup_mma_wait(0, deps=(scores,))  # [BLOCK, ROWS], not yet times factor
        index = start + gl.arange(0, BLOCK, in_keys)
        scores = gl.where(index[:, None] < limit[None, :], scores, float("-inf"))
        split = split_of(start)
        begins = start == split_start(split)
        m_i = gl.where(begins, LOWEST, m_i)
        new_m = next_top(m_i, gl.max(scores, axis=0) * factor)
        weights = gl.exp2(gl.fma(scores, factor, -new_m[None, :])).to(NUMBER)
        kept = gl.where(begins, 0.0, gl.exp2(m_i - new_m))[None, :]
        m_i = new_m
        p_tile.store(weights)
        if start + BLOCK > max_limit:  # what follows the last key may be NaN, and so is 0 * NaN
            inside = start + gl.arange(0, BLOCK, gl.SliceLayout(1, flat)) < max_limit
            for c in gl.static_range(COLUMNS):
                v_tile = v_tiles.index(place * COLUMNS + c)
                v_tile.store(gl.where(inside[:, None], v_tile.load(flat), 0.0))
        fence_async_shared()
        l_i = warpgroup_mma(ones, p_tile, l_i * kept, is_async=True)
        first = warpgroup_mma(v_tiles.index(place * COLUMNS).permute((1, 0)), p_tile, first * kept, is_async=True)
        if COLUMNS == 2:
            v_tile = v_tiles.index(place * COLUMNS + 1).permute((1, 0))
            second = warpgroup_mma(v_tile, p_tile, second * kept, is_async=True)
        l_i, first, second = warpgroup_mma_wait(0, deps=(l_i, first, second))
        gl.thread_barrier()
        mbarrier.arrive(free.index(place), count=1)
        if (start + BLOCK == split_start(split + 1)) | (start + BLOCK >= max_limit):
            row_l = gl.max(l_i, axis=0)
            old_m, old_l = total_m, total_l
            total_m, total_l, total_first = merge(old_m, old_l, total_first, m_i, row_l, first)
            if COLUMNS == 2:
                total_m, total_l, total_second = merge(old_m, old_l, total_second, m_i, row_l, second)
    divisor = gl.where(live, total_l, 1.0)[None, :]
    to = ((tokens.to(gl.int64) * HEADS + heads) * D)[None, :] + dims[:, None]
    gl.store(out + to, (total_first / divisor).to(NUMBER), mask=live[None, :])
    if COLUMNS == 2:
        gl.store(out + to + WIDTH, (total_second / divisor).to(NUMBER), mask=live[None, :])


@gluon.jit(do_not_specialize=["num_pages"])
def hopper_decode_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, Hq, D], tokens q_stride apart
    out,  # [N, Hq, D]
    keys,  # [slots, Hkv * D] in pages by columns
    values,
    positions,  # [N]
    q_starts,  # [R + 1]
    past_lens,  # [R]
    table,  # [R, num_pages]
    scale,
    q_stride,
    num_pages,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (tiles * KV heads, rows)."""
    COLUMNS: gl.constexpr = D // WIDTH
    QUERIES: gl.constexpr = ROWS // GROUP
    product: gl.constexpr = product_layout(ROWS)
    tile, kv_head, row = gl.program_id(0) // KV_HEADS, gl.program_id(0) % KV_HEADS, gl.program_id(1)
    k_tiles = gl.allocate_shared_memory(keys.dtype, [STAGES * COLUMNS, BLOCK, WIDTH], keys.layout)
    v_tiles = gl.allocate_shared_memory(keys.dtype, [STAGES * COLUMNS, BLOCK, WIDTH], keys.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(ready.index(place), count=1)
        mbarrier.init(free.index(place), count=1)
    fence_async_shared()
    place_in_tile = gl.arange(0, ROWS, gl.SliceLayout(0, product))
    query, member = tile * QUERIES + place_in_tile // GROUP, place_in_tile % GROUP
    q_start, q_len = row_queries(q_starts, row)
    live = (place_in_tile < QUERIES * GROUP) & (query < q_len)
    tokens, heads = q_start + query, kv_head * GROUP + member
    past = gl.load(past_lens + row).to(gl.int32)
    position = gl.load(positions + tokens, mask=live, other=0).to(gl.int32)
    limit = gl.where(live, gl.minimum(position + 1, num_pages * PAGE), 0)
    max_limit = gl.max(limit, axis=0)
    count = (max_limit + BLOCK - 1) // BLOCK
    row_table = table + row.to(gl.int64) * num_pages
    factor = scale * LOG2_E
    ring = (k_tiles, v_tiles, ready, free)
    HEADS: gl.constexpr = KV_HEADS * GROUP
    rows = (limit, live, tokens, heads)
    blocks = (max_limit, count)
    gl.warp_specialize(
        [
            (attend_blocks, (q, out, rows, blocks, factor, q_stride, ring, HEADS, COLUMNS, ROWS, STAGES)),
            (copy_blocks, (keys, values, row_table, past, blocks, kv_head * D, ring, 0, PAGE, COLUMNS, STAGES)),
        ],
        [1],
        [40],  # registers per thread of the copying warp
    )
