"""Multi-head latent attention (MLA) over paged keys on a GPU: one kernel for all windows, and the launches.

A tile is some queries of a row with all their heads, or some heads of one query. If SPLIT_KV, which needs short uniform
windows, programs share the splits of a tile's keys and store their states for `mla_merge_kernel`; else one program
reads all keys of a tile. Bits are the same either way (`mla_blocks.py`). Where queries of one tile have splits of two
widths, keys are read once for each width. Lengths are read on the device, so grids depend on shapes alone. The twin is
`paged_attention_torch`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.attention.blocks import LOG2_E, LOWEST, NODES, find_tile, tile_rows, visible_range
from peregrine.kernels.attention.mla_blocks import load_queries, max_keys, read_splits, split_width
from peregrine.kernels.attention.mla_merge_triton import merge_splits
from peregrine.kernels.attention.plan import (
    MLA_WARPS,
    GpuPlan,
    Kernel,
    Launch,
    hopper_takes_mla_prompt,
    max_tiles,
    mla_num_splits,
    tiles_of_row,
)
from peregrine.kernels.attention.triton import PROMPT_REGISTERS, checked_queries, key_block, padded
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter

# Sizes that differ from call to call: kernels are not compiled again for special values of them.
SIZES = ["q_len", "num_rows", "num_pages", "max_splits"]
HOPPER_REGISTERS = {16: 168, 64: 128}  # per thread on average, by rows of a tile: all that one program can have


@triton.jit(do_not_specialize=SIZES)
def mla_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, HEADS, RANK + ROPE], tokens q_stride apart
    out,  # [N, HEADS, RANK]
    keys,  # [slots, RANK + ROPE]
    positions,  # [N]
    q_starts,  # [R + 1]
    past_lens,  # [R]
    table,  # [R, num_pages]
    limits,  # [N] i32
    paths,  # [N, NODES]
    partial_acc,  # f32 if SPLIT_KV [R * tiles, max_splits, ROWS, RANK_PAD], else [N, HEADS, RANK_PAD]
    partial_ml,  # [R * tiles, max_splits, ROWS, 2] f32
    scale,
    q_len,
    q_stride,
    num_rows,
    num_pages,
    max_splits,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE: tl.constexpr,
    SPLIT_KV: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid if SPLIT_KV (programs, tiles, rows): the programs of one tile share its splits; else (places for tiles,)."""
    QUERIES: tl.constexpr = ROWS // HEADS if HEADS < ROWS else 1
    HEAD_TILES: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    enter()
    program, programs = 0, 1
    if SPLIT_KV:
        program, programs = tl.program_id(0), tl.num_programs(0)
        row, tile = tl.program_id(2), tl.program_id(1)
        q_start = row * q_len
    else:
        # The last tiles of long rows read the most keys: they go first.
        last_first = tl.num_programs(0) - 1 - tl.program_id(0)
        row, q_start, q_len, tile = find_tile(last_first, q_starts, num_rows, QUERIES, HEAD_TILES)
    lead = tile // HEAD_TILES * QUERIES  # the tile's first query
    if lead < q_len:
        query, head, live = tile_rows(tile, HEADS, ROWS)
        live = live & (query < q_len)
        tokens = q_start + query
        past = tl.load(past_lens + row).to(tl.int32)
        _, limit = visible_range(positions, limits, tokens, live, past, num_pages * PAGE, 0, TREE, False)
        table += tl.cast(row, tl.int64) * num_pages
        at = tokens.to(tl.int64) * q_stride + head * (RANK + ROPE)
        q_latent = load_queries(q, at, live, 0, RANK, RANK_PAD)
        q_rope = load_queries(q, at, live, RANK, ROPE, ROPE_PAD)
        factor = scale * LOG2_E
        if SPLIT_KV:
            place = (row * tl.num_programs(1) + tile).to(tl.int64) * max_splits * ROWS + tl.arange(0, ROWS)
        else:
            place = tokens.to(tl.int64) * HEADS + head
        m_i = tl.full([ROWS], LOWEST, tl.float32)
        l_i = tl.zeros([ROWS], tl.float32)
        max_limit, min_limit = tl.max(limit), tl.min(tl.where(live, limit, tl.max(limit)))
        narrow_keys = max_keys(split_width(min_limit))  # rows that see more have wider splits
        for side in range(0, 1 + (max_limit > narrow_keys).to(tl.int32)):
            on_side = live & ((limit > narrow_keys) == (side == 1))
            side_limit = tl.where(on_side, limit, 0)
            width = split_width(tl.max(side_limit))
            end = tl.cdiv(tl.max(side_limit), width)
            # In a tree, splits that end after `past` hold other keys for each query: each is read for one query alone.
            shared_end = end
            if TREE:
                shared_end = tl.minimum(past // width, end)
            run, run_end = shared_end * program // programs, shared_end * (program + 1) // programs
            m_i, l_i = read_splits(
                *(q_latent, q_rope, keys, table, paths, past, side_limit, on_side, run, run_end, width, factor),
                *(m_i, l_i, partial_acc, partial_ml, place),
                *(RANK, ROPE, PAGE, BLOCK, False, SPLIT_KV, STAGES),
            )
            if TREE:
                count = tl.minimum(q_len - lead, QUERIES)
                for item in range(programs - 1 - program, (end - shared_end) * count, programs):
                    split, node = shared_end + item // count, lead + item % count
                    own = on_side & (query == node)
                    own_limit = tl.where(own, limit, 0)
                    m_i, l_i = read_splits(
                        *(q_latent, q_rope, keys, table, paths + (q_start + node) * NODES, past),
                        *(own_limit, own, split, split + 1, width, factor, m_i, l_i, partial_acc, partial_ml),
                        *(place, RANK, ROPE, PAGE, BLOCK, True, SPLIT_KV, STAGES),
                    )
        if not SPLIT_KV:
            dim = tl.arange(0, RANK_PAD)
            tl.debug_barrier()  # other threads wrote what this one reads, see finish_split
            held = partial_acc + place[:, None] * RANK_PAD + dim[None, :]
            acc = tl.load(held, mask=live[:, None], other=0.0)
            outputs = (acc / tl.where(live, l_i, 1.0)[:, None]).to(out.dtype.element_ty)
            inside = live[:, None] & (dim < RANK)[None, :]
            tl.store(out + place[:, None] * RANK + dim[None, :], outputs, mask=inside)


def mla_attention(q: Tensor, keys: Tensor, plan: GpuPlan, how: Launch, rank: int, scale: float) -> Tensor:
    """Attention of q [N, h, rank + rope] over one layer's keys [slots, 1, rank + rope]. -> [N, h, rank]

    DECODE needs as many queries on every row.
    """
    q = checked_queries(q, plan)
    (num_rows, num_pages), (num_tokens, heads, width) = plan.page_table.shape, q.shape
    out, split_kv = q.new_empty(num_tokens, heads, rank), how.kernel is Kernel.DECODE
    done = 0 if split_kv or not how.on_hopper else _hopper_prompt(q, out, keys, plan, how.tile, scale)
    if done >= num_pages * plan.page_size:
        return out
    q_len, rank_pad = num_tokens // num_rows, padded(rank)
    tiles = tiles_of_row(q_len, heads, how.tile)
    grid: tuple[int, ...] = (max_tiles(num_tokens, num_rows, heads, how.tile),)
    held: tuple[int, ...] = (num_tokens, heads)  # one acc for each output
    if split_kv:
        grid = (how.programs, tiles, num_rows)
        held = (num_rows * tiles, mla_num_splits(num_pages * plan.page_size), how.tile)
    partial_acc = torch.empty(*held, rank_pad, dtype=torch.float32, device=q.device)
    partial_ml = torch.empty(*held, 2, dtype=torch.float32, device=q.device) if split_kv else partial_acc  # else unused
    sizes = q_len, q.stride(0), num_rows, num_pages, partial_acc.shape[1]
    constants: dict[str, Any] = {"HEADS": heads, "RANK": rank, "ROPE": width - rank, "PAGE": plan.page_size}
    constants |= {"ROWS": how.tile, "SPLIT_KV": split_kv, "num_warps": MLA_WARPS[how.tile], "enable_fp_fusion": False}
    if how.on_hopper:
        # Imports Gluon, which other devices have no use for.
        from peregrine.kernels.attention.hopper import paged
        from peregrine.kernels.attention.mla_hopper import mla_hopper_kernel

        launch(
            mla_hopper_kernel,
            grid,
            *(q, out, paged(keys, plan.page_size), plan.positions, plan.q_starts, plan.past_lens),
            *(plan.page_table, partial_acc, partial_ml, scale, *sizes),
            **constants,
            STAGES=2,
            ABOVE=done,
            maxnreg=HOPPER_REGISTERS[how.tile],
            pdl=True,
        )
    else:
        launch(
            mla_kernel,
            grid,
            *(q, out, keys, plan.positions, plan.q_starts, plan.past_lens, plan.page_table),
            *(plan.limits, plan.paths, partial_acc, partial_ml, scale, *sizes),
            **constants,
            RANK_PAD=rank_pad,
            ROPE_PAD=padded(width - rank),
            BLOCK=key_block(q),
            TREE=plan.paths is not None,
            STAGES=3,
            pdl=True,
        )
    if split_kv:
        merge_splits(out, plan, how.tile, tiles, partial_acc, partial_ml)
    return out


def _hopper_prompt(q: Tensor, out: Tensor, keys: Tensor, plan: GpuPlan, tile: int, scale: float) -> int:
    """Make the outputs of tiles whose queries all see this many keys or fewer; 0 if other kernels have to make all."""
    (num_tokens, heads, rank), (num_rows, num_pages) = out.shape, plan.page_table.shape
    if not hopper_takes_mla_prompt(rank, q.shape[2] - rank):
        return 0
    # Imports Gluon, which other devices have no use for.
    from peregrine.kernels.attention.hopper import paged
    from peregrine.kernels.attention.mla_hopper_prompt import NARROW, mla_hopper_prompt_kernel

    launch(
        mla_hopper_prompt_kernel,
        (max_tiles(num_tokens, num_rows, heads, tile),),
        *(q, out, paged(keys, plan.page_size), plan.positions, plan.q_starts, plan.page_table),
        *(scale, q.stride(0), num_rows, num_pages),
        HEADS=heads,
        RANK=rank,
        PAGE=plan.page_size,
        num_warps=4,
        maxnreg=PROMPT_REGISTERS,
        enable_fp_fusion=False,
        pdl=True,
    )
    return int(NARROW.value)
