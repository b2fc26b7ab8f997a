"""Dense attention over paged keys and values on a GPU: split-KV decode with its merge, and one kernel for all windows.

In `decode_kernel` several programs share the keys of a tile of queries; each stores the state of its splits, and
`merge_kernel` merges them. In `context_kernel` one program reads all keys of a tile. Lengths are read on the device, so
grids depend on shapes alone. Every kernel gives a query the same bits. The twin is `paged_attention_torch`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.attention.blocks import (
    LOWEST,
    NODES,
    SAME_BITS,
    attend_keys,
    find_tile,
    initial_state,
    load_queries,
    merge,
    row_of_tile,
    row_queries,
    score_factor,
    split_of,
    split_start,
    store_outputs,
    tile_rows,
    visible_range,
)
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
from peregrine.kernels.runtime.gpu import launch, multiprocessors
from peregrine.kernels.runtime.pdl import enter, release, wait

# Sizes that differ from call to call: kernels are not compiled again for special values of them.
SIZES = ["window", "num_rows", "num_pages", "max_splits"]
MERGE_REGISTERS = 168  # per thread: the compiler would take 64, and wait for a few loads at a time
PROMPT_REGISTERS = 168  # per thread at the start, a third of all; then the groups that multiply take more
HOPPER_STAGES, HOPPER_REGISTERS = 2, 128  # so that two programs and the next kernel fit on a multiprocessor


@triton.jit(do_not_specialize=SIZES)
def decode_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, Hq, D], tokens q_stride apart
    keys,  # [slots, Hkv, D]
    values,  # [slots, Hkv, D]
    k_scale,  # [] f32
    positions,  # [N]
    q_starts,  # [R + 1]
    past_lens,  # [R]
    table,  # [R, num_pages]
    limits,  # [N] i32
    paths,  # [N, NODES]
    partial_acc,  # [R * tiles, max_splits, ROWS, D_PAD] f32
    partial_ml,  # [R * tiles, max_splits, ROWS, 2] f32
    scale,
    window,
    q_stride,
    num_pages,
    max_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (programs, tiles * KV heads, rows): the programs of one tile share its splits and store their states."""
    QUERIES: tl.constexpr = ROWS // GROUP if GROUP < ROWS else 1
    HEAD_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    STRIDE: tl.constexpr = KV_HEADS * D
    program, programs = tl.program_id(0), tl.num_programs(0)
    tile, kv_head, row = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS, tl.program_id(2)
    q_start, q_len = row_queries(q_starts, row)
    query, member, live = tile_rows(tile, GROUP, ROWS)
    live = live & (query < q_len)
    tokens, heads = q_start + query, kv_head * GROUP + member
    past = tl.load(past_lens + row).to(tl.int32)
    low, limit = visible_range(positions, limits, tokens, live, past, num_pages * PAGE, window, TREE, WINDOWED)
    min_low, max_limit = tl.min(low), tl.max(limit)
    first, end = split_of(min_low), split_of(max_limit - 1) + 1
    # In a tree, splits that end after `past` hold other keys for each query: each is read for one query alone.
    shared_end = end
    if TREE:
        shared_end = tl.minimum(split_of(past), end)
    keys, values = keys + kv_head * D, values + kv_head * D
    table += tl.cast(row, tl.int64) * num_pages
    enter()
    queries = load_queries(q, tokens, heads, live, q_stride, D, D_PAD)
    factor = score_factor(scale, k_scale, SCALED)
    place = row * tl.num_programs(1) + tl.program_id(1)
    place = place.to(tl.int64) * max_splits * ROWS + tl.arange(0, ROWS)
    m_i, l_i, acc = initial_state(q, heads, live, D_PAD, False)  # nothing is merged here
    # Programs take runs of whole splits with about as many keys each.
    shared_keys = tl.maximum(tl.minimum(split_start(shared_end), max_limit) - min_low, 0)
    run = tl.where(program == 0, first, split_of(min_low + shared_keys * program // programs))
    run_end = split_of(min_low + shared_keys * (program + 1) // programs)
    run_end = tl.where(program == programs - 1, shared_end, tl.minimum(run_end, shared_end))
    if run < run_end:
        begin = tl.maximum(split_start(run), min_low // BLOCK * BLOCK)
        stop = tl.minimum(split_start(run_end), max_limit)
        attend_keys(
            *(queries, keys, values, table, paths, past, low, limit, live, begin, stop, factor),
            *(m_i, l_i, acc, partial_acc, partial_ml, place),
            *(D, STRIDE, PAGE, BLOCK, False, True, STAGES),
        )
    if TREE:
        lead = (tile // HEAD_TILES) * QUERIES  # the tile's first query
        count = tl.minimum(q_len - lead, QUERIES)
        for item in range(programs - 1 - program, (end - shared_end) * count, programs):
            split, node = shared_end + item // count, lead + item % count
            own = live & (query == node)
            own_limit = tl.where(own, limit, 0)
            begin = tl.maximum(split_start(split), min_low // BLOCK * BLOCK)
            stop = tl.minimum(split_start(split + 1), tl.max(own_limit))
            attend_keys(
                *(queries, keys, values, table, paths + (q_start + node) * NODES, past),
                *(low, own_limit, own, begin, stop, factor),
                *(m_i, l_i, acc, partial_acc, partial_ml, place),
                *(D, STRIDE, PAGE, BLOCK, True, True, STAGES),
            )


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(  # type: ignore[no-untyped-def]
    out,
    v_scale,
    sinks,
    positions,
    q_starts,
    past_lens,
    limits,
    partial_acc,
    partial_ml,
    window,
    num_pages,
    max_splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Grid (ROWS / MERGED, tiles * KV heads, rows): merge the states that `decode_kernel` stored, in order."""
    release()
    tile, kv_head, row = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS, tl.program_id(2)
    q_start, q_len = row_queries(q_starts, row)
    query, member, live = tile_rows(tile, GROUP, ROWS)
    live = live & (query < q_len)
    past = tl.load(past_lens + row).to(tl.int32)
    tokens = q_start + query
    low, limit = visible_range(positions, limits, tokens, live, past, num_pages * PAGE, window, TREE, WINDOWED)
    first, end = split_of(tl.min(low)), split_of(tl.max(limit) - 1) + 1  # the splits that the tile's programs have read
    mine = tl.program_id(0) * MERGED + tl.arange(0, MERGED)
    query, member, live = row_of_tile(tile, mine, GROUP, ROWS)
    live = live & (query < q_len)
    heads = kv_head * GROUP + member
    m_i, l_i, acc = initial_state(sinks, heads, live, D_PAD, SINKS)
    place = (row * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * max_splits * ROWS + mine
    dim = tl.arange(0, D_PAD)
    wait()
    # Unrolled, not staged: a ring in shared memory would take the room of programs that run at the same time.
    for split in tl.range(first, end, loop_unroll_factor=16):
        at = place + split * ROWS
        next_m = tl.load(partial_ml + at * 2, mask=live, other=LOWEST)
        next_l = tl.load(partial_ml + at * 2 + 1, mask=live, other=0.0)
        next_acc = tl.load(partial_acc + at[:, None] * D_PAD + dim[None, :], mask=live[:, None], other=0.0)
        m_i, l_i, acc = merge(m_i, l_i, acc, next_m, next_l, next_acc)
    tokens = q_start + query
    store_outputs(out, tokens, heads, live, l_i, acc, v_scale, KV_HEADS * GROUP, D, SCALED)


@triton.jit(do_not_specialize=SIZES)
def context_kernel(  # type: ignore[no-untyped-def]
    q,  # [N, Hq, D], tokens q_stride apart
    out,  # [N, Hq, D]
    keys,  # [slots, Hkv, D]
    values,  # [slots, Hkv, D]
    k_scale,  # [] f32
    v_scale,  # [] f32
    sinks,  # [Hq]
    positions,  # [N]
    q_starts,  # [R + 1]
    past_lens,  # [R]
    table,  # [R, num_pages]
    limits,  # [N] i32
    paths,  # [N, NODES]
    scale,
    window,
    num_rows,
    q_stride,
    num_pages,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (places for tiles, KV heads): see `find_tile`."""
    QUERIES: tl.constexpr = ROWS // GROUP if GROUP < ROWS else 1
    HEAD_TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    STRIDE: tl.constexpr = KV_HEADS * D
    # The last tiles of long rows read the most keys: they go first.
    last_first, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    enter()
    row, q_start, q_len, tile = find_tile(last_first, q_starts, num_rows, QUERIES, HEAD_TILES)
    lead = tile // HEAD_TILES * QUERIES  # the tile's first query
    if lead < q_len:
        keys, values = keys + kv_head * D, values + kv_head * D
        table += tl.cast(row, tl.int64) * num_pages
        query, member, live = tile_rows(tile, GROUP, ROWS)
        live = live & (query < q_len)
        tokens, heads = q_start + query, kv_head * GROUP + member
        past = tl.load(past_lens + row).to(tl.int32)
        low, limit = visible_range(positions, limits, tokens, live, past, num_pages * PAGE, window, TREE, WINDOWED)
        min_low, max_limit = tl.min(low), tl.max(limit)
        stop = max_limit
        if TREE:
            stop = tl.minimum(split_start(split_of(past)), max_limit)
        queries = load_queries(q, tokens, heads, live, q_stride, D, D_PAD)
        factor = score_factor(scale, k_scale, SCALED)
        m_i, l_i, acc = initial_state(sinks, heads, live, D_PAD, SINKS)
        m_i, l_i, acc = attend_keys(
            *(queries, keys, values, table, paths, past, low, limit, live, min_low // BLOCK * BLOCK, stop, factor),
            *(m_i, l_i, acc, out, out, 0),
            *(D, STRIDE, PAGE, BLOCK, False, False, STAGES),
        )
        if TREE:
            for split in range(split_of(past), split_of(max_limit - 1) + 1):
                for node in range(lead, tl.minimum(lead + QUERIES, q_len)):
                    own = live & (query == node)
                    own_limit = tl.where(own, limit, 0)
                    begin = tl.maximum(split_start(split), min_low // BLOCK * BLOCK)
                    own_stop = tl.minimum(split_start(split + 1), tl.max(own_limit))
                    # For rows of other queries the split is empty: their state stays as it was.
                    m_i, l_i, acc = attend_keys(
                        *(queries, keys, values, table, paths + (q_start + node) * NODES, past),
                        *(low, own_limit, own, begin, own_stop, factor, m_i, l_i, acc, out, out, 0),
                        *(D, STRIDE, PAGE, BLOCK, True, False, STAGES),
                    )
        store_outputs(out, tokens, heads, live, l_i, acc, v_scale, KV_HEADS * GROUP, D, SCALED)


def dense_attention(
    q: Tensor, kv: StoredKV, plan: GpuPlan, how: Launch, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attention of q [N, Hq, D] over one layer's keys and values, by the kernel that `how` names. -> [N, Hq, D]

    Hopper's own kernels know neither windows nor sinks nor trees.
    """
    q = checked_queries(q, plan)
    if how.on_hopper:
        return (_hopper_context if how.kernel is Kernel.CONTEXT else _hopper_decode)(q, kv, plan, how.tile, scale)
    if how.kernel is Kernel.CONTEXT:
        return _context(q, kv, plan, how.tile, scale, window, sinks)
    return _split_kv_decode(q, kv, plan, how, scale, window, sinks)


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
