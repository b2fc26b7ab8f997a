"""Dense attention over paged keys and values on a GPU: the launches of all its kernels, Triton's and Hopper's own.

`plan.py` says which of them serves a window. Every kernel gives a query the same bits. The twin is
`paged_attention_torch`.
"""

from typing import Any

import torch
from torch import Tensor

from peregrine.kernels.attention.blocks import SAME_BITS
from peregrine.kernels.attention.dense_triton import context_kernel, decode_kernel, merge_kernel
from peregrine.kernels.attention.plan import (
    BLOCK,
    FLOAT32_BLOCK,
    TALL_TILE,
    GpuPlan,
    Kernel,
    Launch,
    StoredKV,
    dense_heads,
    max_tiles,
    num_splits,
    tiles_of_row,
)
from peregrine.kernels.attention.split_decode import run_split_decode
from peregrine.kernels.runtime.gpu import launch, multiprocessors

MERGE_REGISTERS = 168  # per thread: the compiler would take 64, and wait for a few loads at a time
PROMPT_REGISTERS = 168  # per thread at the start, a third of all; then the groups that multiply take more
HOPPER_STAGES, HOPPER_REGISTERS = 2, 128  # so that two programs and the next kernel fit on a multiprocessor


def dense_attention(
    q: Tensor, kv: StoredKV, plan: GpuPlan, how: Launch, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attention of q [N, Hq, D] over one layer's keys and values, by the kernel that `how` names. -> [N, Hq, D]

    Hopper's own kernels know neither windows nor sinks nor trees.
    """
    q = checked_queries(q, plan)
    if how.programs:
        return _split_kv_decode(q, kv, plan, how, scale, window, sinks)
    if how.on_hopper:
        return (_hopper_context if how.kernel is Kernel.CONTEXT else _hopper_decode)(q, kv, plan, how.tile, scale)
    return _context(q, kv, plan, how.tile, scale, window, sinks)


def _split_kv_decode(
    q: Tensor, kv: StoredKV, plan: GpuPlan, how: Launch, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    num_rows, num_pages = plan.page_table.shape
    tile, constants = how.tile, _constants(q, kv, plan, window, sinks, how.tile)
    tiles = tiles_of_row(plan.max_q_len, constants["GROUP"], tile) * constants["KV_HEADS"]  # of one row
    max_splits = num_splits(num_pages * plan.page_size)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    partials = num_rows * tiles, max_splits, tile
    partial_acc = torch.empty(*partials, constants["D_PAD"], dtype=torch.float32, device=q.device)
    partial_ml = torch.empty(*partials, 2, dtype=torch.float32, device=q.device)
    sizes = {"window": window or 0, "num_pages": num_pages, "max_splits": max_splits}
    if how.on_hopper:
        own_tiles = tiles // constants["KV_HEADS"]
        run_split_decode(q, kv, plan, own_tiles, how.programs, (partial_acc, partial_ml), scale)
    else:
        launch(
            decode_kernel,
            (how.programs, tiles, num_rows),
            *(q, kv.keys, kv.values, kv.k_scale, plan.positions, plan.q_starts, plan.past_lens, plan.page_table),
            *(plan.limits, plan.paths, partial_acc, partial_ml, scale),
            q_stride=q.stride(0),
            **sizes,
            **{name: value for name, value in constants.items() if name != "SINKS"},
            pdl=True,
        )
    merged = 1 if q.is_cuda else tile  # rows of one program: in the interpreter a program costs more than its rows
    launch(
        merge_kernel,
        (tile // merged, tiles, num_rows),
        *(out, kv.v_scale, sinks, plan.positions, plan.q_starts, plan.past_lens, plan.limits),
        *(partial_acc, partial_ml),
        **sizes,
        **{name: value for name, value in constants.items() if name not in ("BLOCK", "STAGES", *SAME_BITS)},
        MERGED=merged,
        enable_fp_fusion=False,
        num_warps=1,
        maxnreg=MERGE_REGISTERS,
        pdl=True,
    )
    return out


def _hopper_decode(q: Tensor, kv: StoredKV, plan: GpuPlan, tile: int, scale: float) -> Tensor:
    # Imports Gluon, which other devices have no use for.
    from peregrine.kernels.attention.hopper import hopper_decode_kernel, paged

    num_rows, num_pages = plan.page_table.shape
    num_kv_heads, head_dim = kv.keys.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(
        hopper_decode_kernel,
        (tiles_of_row(plan.max_q_len, group, tile) * num_kv_heads, num_rows),
        *(q, out, paged(kv.keys, plan.page_size), paged(kv.values, plan.page_size)),
        *(plan.positions, plan.q_starts, plan.past_lens, plan.page_table, scale, q.stride(0), num_pages),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        D=head_dim,
        PAGE=plan.page_size,
        ROWS=tile,
        STAGES=HOPPER_STAGES,
        num_warps=4,
        maxnreg=HOPPER_REGISTERS,
        enable_fp_fusion=False,
        pdl=True,
    )
    return out


def _hopper_context(q: Tensor, kv: StoredKV, plan: GpuPlan, tile: int, scale: float) -> Tensor:
    # Imports Gluon, which other devices have no use for.
    from peregrine.kernels.attention.hopper import paged
    from peregrine.kernels.attention.hopper_prompt import hopper_prompt_kernel

    num_rows, num_pages = plan.page_table.shape
    num_kv_heads, head_dim = kv.keys.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # One row's tiles are dealt out evenly beforehand. Of several rows, each multiprocessor takes the next when it can.
    alone = num_rows == 1
    places = tiles_of_row(len(q), group, tile) if alone else max_tiles(len(q), num_rows, group, tile)
    programs = places * num_kv_heads
    launch(
        hopper_prompt_kernel,
        (min(programs, multiprocessors(q.device, programs)) if alone else programs,),
        *(q, out, paged(kv.keys, plan.page_size), paged(kv.values, plan.page_size)),
        *(plan.positions, plan.q_starts, plan.past_lens, plan.page_table),
        *(scale, num_rows, q.stride(0), num_pages, places),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        D=head_dim,
        PAGE=plan.page_size,
        num_warps=4,
        maxnreg=PROMPT_REGISTERS,
        enable_fp_fusion=False,
        pdl=True,
    )
    return out


def _context(
    q: Tensor, kv: StoredKV, plan: GpuPlan, tile: int, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    constants = _constants(q, kv, plan, window, sinks, tile)
    num_rows, num_pages = plan.page_table.shape
    launch(
        context_kernel,
        (max_tiles(len(q), num_rows, constants["GROUP"], tile), constants["KV_HEADS"]),
        *(q, out, kv.keys, kv.values, kv.k_scale, kv.v_scale, sinks),
        *(plan.positions, plan.q_starts, plan.past_lens, plan.page_table, plan.limits, plan.paths),
        *(scale, window or 0, num_rows, q.stride(0), num_pages),
        **constants,
        pdl=True,
    )
    return out


def _constants(
    q: Tensor, kv: StoredKV, plan: GpuPlan, window: int | None, sinks: Tensor | None, tile: int
) -> dict[str, Any]:
    """What the Triton kernels are compiled for, and their compiler options."""
    num_kv_heads, head_dim = kv.keys.shape[1:]
    return {
        "KV_HEADS": num_kv_heads,
        "GROUP": q.shape[1] // num_kv_heads,
        "D": head_dim,
        "D_PAD": padded(head_dim),
        "PAGE": plan.page_size,
        "ROWS": tile,
        "BLOCK": key_block(q),
        "TREE": plan.paths is not None,
        "WINDOWED": window is not None,
        "SINKS": sinks is not None,
        "SCALED": kv.k_scale is not None,
        # Of five stages two are for keys and values, the others for finding their pages.
        "STAGES": 5 if head_dim <= 128 and tile < TALL_TILE else 3,
        **SAME_BITS,
    }


def key_block(q: Tensor) -> int:
    """Key indices of one product."""
    return FLOAT32_BLOCK if q.is_cuda and q.dtype == torch.float32 else BLOCK


def padded(head_dim: int) -> int:
    """The power of two that holds this many entries, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def checked_queries(q: Tensor, plan: GpuPlan) -> Tensor:
    """The queries that the forward was planned for, each token's heads side by side in memory."""
    if len(q) != len(plan.positions):
        raise ValueError(f"q has {len(q)} tokens, but the window was planned for {len(plan.positions)}")
    return dense_heads(q)
