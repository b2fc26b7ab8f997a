"""Decode attention for Hopper, in Gluon: the arithmetic of `attention_tiles_gpu.py`, bit for bit, at memory's speed.

One warp of a program does nothing but ask for pages: the copy engine brings a block of keys and values into a ring of
`STAGES` places, ahead of the four warps that multiply. Keys that were there before this forward are asked for while
the kernel before is still running.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from peregrine.kernels.attention_hopper_blocks import (
    BLOCK,
    COLUMN,
    WIDTH,
    ask_for_blocks,
    attend_blocks,
    split_of,
    split_start,
)
from peregrine.kernels.attention_tiles_gpu import LOG2_E


def paged(store: Tensor, page_size: int) -> TensorDescriptor:
    """One layer's keys or values [slots, Hkv, D] as the copy engine sees them: pages by columns."""
    number = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[store.dtype]
    shape = [min(page_size, BLOCK.value), COLUMN]
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK.value, COLUMN], number)
    return TensorDescriptor.from_tensor(store.flatten(1), shape, layout)


@gluon.jit(do_not_specialize=["q_len", "num_pages", "max_splits"])
def hopper_decode_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, Hq, D], tokens q_stride apart
    out,  # [N, Hq, D]
    keys,  # [slots, Hkv * D] in pages by columns
    values,
    positions,  # [N]
    past_lens,  # [R]
    table,  # [R, num_pages]
    part_sums,  # [R * tiles, max_splits, ROWS, D] f32
    part_stats,  # [R * tiles, max_splits, ROWS, 2] f32: top, mass
    scale,
    q_len,
    q_stride,
    num_pages,
    max_splits,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    ROWS: gl.constexpr,
    APART: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Grid (programs, tiles * KV heads, rows), as `decode_kernel`; not APART: one program, which answers itself."""
    COLUMNS: gl.constexpr = D // WIDTH
    QUERIES: gl.constexpr = ROWS // GROUP
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    program, programs = gl.program_id(0), gl.num_programs(0)
    tile, kv_head, row = gl.program_id(1) // KV_HEADS, gl.program_id(1) % KV_HEADS, gl.program_id(2)
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
    live = (place_in_tile < QUERIES * GROUP) & (query < q_len)
    tokens, heads = row * q_len + query, kv_head * GROUP + member
    past = gl.load(past_lens + row).to(gl.int32)
    position = gl.load(positions + tokens, mask=live, other=0).to(gl.int32)
    limit = gl.where(live, gl.minimum(position + 1, num_pages * PAGE), 0)
    farthest = gl.max(limit, axis=0)
    # Programs take runs of whole splits with about as many keys each, as those of `decode_kernel` do.
    run = gl.where(program == 0, 0, split_of(farthest * program // programs))
    run_end = gl.minimum(split_of(farthest * (program + 1) // programs), split_of(farthest - 1) + 1)
    run_end = gl.where(program == programs - 1, split_of(farthest - 1) + 1, run_end)
    begin = split_start(run)
    stop = gl.maximum(gl.minimum(split_start(run_end), farthest), begin)
    count = (stop - begin + BLOCK - 1) // BLOCK
    place_of = (row * gl.num_programs(1) + gl.program_id(1)).to(gl.int64) * max_splits * ROWS + place_in_tile
    row_table = table + row.to(gl.int64) * num_pages
    factor = scale * LOG2_E
    gl.warp_specialize(
        [
            (
                attend_blocks,
                (
                    q,
                    out,
                    part_sums,
                    part_stats,
                    limit,
                    live,
                    tokens,
                    heads,
                    place_of,
                    farthest,
                    begin,
                    stop,
                    factor,
                    q_stride,
                    k_tiles,
                    v_tiles,
                    ready,
                    free,
                    KV_HEADS * GROUP,
                    COLUMNS,
                    ROWS,
                    APART,
                    STAGES,
                ),
            ),
            (
                ask_for_blocks,
                (
                    keys,
                    values,
                    row_table,
                    past,
                    farthest,
                    begin,
                    count,
                    kv_head * D,
                    k_tiles,
                    v_tiles,
                    ready,
                    free,
                    PAGE,
                    COLUMNS,
                    STAGES,
                    False,
                ),
            ),
        ],
        [1],
        [40],
    )
