"""Attention of many rows at once for Hopper, in Gluon: the arithmetic of `attention_tiles_gpu.py`, bit for bit.

Where there are as many tiles as fill the device, one program reads all keys of its tile and answers alone. One warp of
it does nothing but ask for pages: the copy engine brings a block of keys and values into a ring of `STAGES` places,
ahead of the four warps that multiply. Keys that were there before this forward are asked for while the kernel before is
still running.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from peregrine.kernels.attention.blocks_triton import LOG2_E
from peregrine.kernels.attention.hopper_blocks import BLOCK, COLUMN, WIDTH, ask_for_blocks, attend_blocks


def paged(store: Tensor, page_size: int) -> TensorDescriptor:
    """One layer's keys or values [slots, Hkv, D] as the copy engine sees them: pages by columns."""
    number = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[store.dtype]
    shape = [min(page_size, BLOCK.value), COLUMN]
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK.value, COLUMN], number)
    return TensorDescriptor.from_tensor(store.flatten(1), shape, layout)


@gluon.jit(do_not_specialize=["q_len", "num_pages"])
def hopper_decode_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, Hq, D], tokens q_stride apart
    out,  # [N, Hq, D]
    keys,  # [slots, Hkv * D] in pages by columns
    values,
    positions,  # [N]
    past_lens,  # [R]
    table,  # [R, num_pages]
    scale,
    q_len,
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
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
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
    live = (place_in_tile < QUERIES * GROUP) & (query < q_len)
    tokens, heads = row * q_len + query, kv_head * GROUP + member
    past = gl.load(past_lens + row).to(gl.int32)
    position = gl.load(positions + tokens, mask=live, other=0).to(gl.int32)
    limit = gl.where(live, gl.minimum(position + 1, num_pages * PAGE), 0)
    farthest = gl.max(limit, axis=0)
    count = (farthest + BLOCK - 1) // BLOCK
    row_table = table + row.to(gl.int64) * num_pages
    factor = scale * LOG2_E
    gl.warp_specialize(
        [
            (
                attend_blocks,
                (
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
                    KV_HEADS * GROUP,
                    COLUMNS,
                    ROWS,
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
                    0,
                    count,
                    kv_head * D,
                    k_tiles,
                    v_tiles,
                    ready,
                    free,
                    PAGE,
                    COLUMNS,
                    STAGES,
                ),
            ),
        ],
        [1],
        [40],
    )
