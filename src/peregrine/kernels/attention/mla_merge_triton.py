"""The split-KV merge of multi-head latent attention (MLA) on a GPU: the partials of a query, in order of its splits."""

import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.attention.blocks import LOWEST, power_of_two
from peregrine.kernels.attention.mla_blocks import split_width
from peregrine.kernels.attention.plan import GpuPlan
from peregrine.kernels.attention.triton import MERGE_REGISTERS
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import release, wait

# Sizes that differ from call to call: the kernel is not compiled again for special values of them.
SIZES = ["q_len", "num_pages", "max_splits", "tiles"]
MERGED_COLUMNS = 64  # entries of an output that one program has: two a thread
MERGED_SPLITS = 32  # partials whose loads a program has in flight


def merge_splits(out: Tensor, plan: GpuPlan, tile: int, tiles: int, partial_acc: Tensor, partial_ml: Tensor) -> None:
    """Merge the partials of all tiles, `tiles` a row, into out [N, h, rank]."""
    num_tokens, heads, rank = out.shape
    num_rows, num_pages = plan.page_table.shape
    max_splits, rank_pad = partial_acc.shape[1], partial_acc.shape[3]
    columns, most = min(MERGED_COLUMNS, rank_pad), triton.next_power_of_2(max_splits)
    sizes = num_tokens // num_rows, num_pages, max_splits, tiles
    launch(
        mla_merge_kernel,
        (rank_pad // columns, heads, num_tokens),
        *(out, plan.positions, plan.limits, partial_acc, partial_ml, *sizes),
        HEADS=heads,
        RANK=rank,
        RANK_PAD=rank_pad,
        PAGE=plan.page_size,
        ROWS=tile,
        TREE=plan.paths is not None,
        COLUMNS=columns,
        CHUNK=most,
        BATCH=min(MERGED_SPLITS, most),
        enable_fp_fusion=False,
        num_warps=1,
        maxnreg=MERGE_REGISTERS,
        pdl=True,
    )


@triton.jit(do_not_specialize=SIZES)
def mla_merge_kernel(  # type: ignore[no-untyped-def]
    out,  # [N, HEADS, RANK]
    positions,  # [N]
    limits,  # [N] i32
    partial_acc,  # [R * tiles, max_splits, ROWS, RANK_PAD] f32
    partial_ml,  # [R * tiles, max_splits, ROWS, 2] f32
    q_len,
    num_pages,
    max_splits,
    tiles,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TREE: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BATCH: tl.constexpr,
):
    """Grid (RANK_PAD / COLUMNS, HEADS, tokens): merge some columns of one head's output, in order of splits."""
    HEADS_EACH: tl.constexpr = HEADS if HEADS < ROWS else ROWS
    QUERIES: tl.constexpr = ROWS // HEADS_EACH
    HEAD_TILES: tl.constexpr = (HEADS + HEADS_EACH - 1) // HEADS_EACH
    release()
    wait()
    head, token = tl.program_id(1), tl.program_id(2)
    row, query = token // q_len, token % q_len
    limit = tl.load(limits + token) if TREE else tl.load(positions + token).to(tl.int32) + 1
    limit = tl.minimum(limit, num_pages * PAGE)
    end = tl.cdiv(limit, split_width(limit))
    tile = query // QUERIES * HEAD_TILES + head // HEADS_EACH
    place = (row * tiles + tile).to(tl.int64) * max_splits * ROWS
    place += query % QUERIES * HEADS_EACH + head % HEADS_EACH
    m_i = tl.full([], LOWEST, tl.float32)
    for first in range(0, end, CHUNK):
        split = first + tl.arange(0, CHUNK)
        m_i = tl.maximum(m_i, tl.max(tl.load(partial_ml + (place + split * ROWS) * 2, mask=split < end, other=LOWEST)))
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    l_i = tl.zeros([], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, end, BATCH):
        for i in tl.static_range(BATCH):  # all loads are in flight before the first is used
            at = place + (first + i) * ROWS
            added = power_of_two(tl.load(partial_ml + at * 2, mask=first + i < end, other=LOWEST) - m_i)
            l_i += tl.load(partial_ml + at * 2 + 1, mask=first + i < end, other=0.0) * added
            acc += tl.load(partial_acc + at * RANK_PAD + column, mask=first + i < end, other=0.0) * added
    outputs = (acc / l_i).to(out.dtype.element_ty)
    tl.store(out + (token.to(tl.int64) * HEADS + head) * RANK + column, outputs, mask=column < RANK)
