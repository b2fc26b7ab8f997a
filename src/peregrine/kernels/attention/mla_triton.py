"""Multi-head latent attention (MLA) over paged keys on a GPU: one kernel for all windows, and the split-KV merge.

There is one key for all heads, [latent | rotated part], and its first RANK entries are its value: a block of latents is
read once and serves twice, for scores and for acc. A tile is some queries of a row with all their heads, or some heads
of one query. If SPLIT_KV, which needs short uniform windows, programs share the splits of a tile's keys and store their
states for `mla_merge_kernel`; else one program reads all keys of a tile. Lengths are read on the device, so grids
depend on shapes alone. The twin is `paged_attention_torch`.

Bits are the same either way. The width of a query's splits follows from how many keys it sees, and from nothing else;
where queries of one tile have splits of two widths, keys are read once for each width. Blocks are added to a split's
state in order, and splits to the total in order. Every m is rounded up to a whole power of 2, so rescaling a state is
exact, and it does not matter whether the greatest m is known beforehand. Stored values are finite, see
`mla_write_triton.py`. Kernels must be launched without `enable_fp_fusion`: a fused multiply-add in one of them would
round differently.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.attention.blocks import (
    LOG2_E,
    LOWEST,
    NODES,
    find_tile,
    power_of_two,
    slots_of,
    tile_rows,
    visible_range,
)
from peregrine.kernels.attention.plan import (
    MLA_WARPS,
    GpuPlan,
    Kernel,
    Launch,
    hopper_takes_mla_prompt,
    max_tiles,
    mla_max_keys,
    mla_num_splits,
    mla_split_width,
    tiles_of_row,
)
from peregrine.kernels.attention.triton import MERGE_REGISTERS, PROMPT_REGISTERS, checked_queries, key_block, padded
from peregrine.kernels.runtime.fence import fence_copies
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter, release, wait

L_ROWS = tl.constexpr(64)  # rows of l: the height of a matrix instruction
# Sizes that differ from call to call: kernels are not compiled again for special values of them.
SIZES = ["q_len", "num_rows", "num_pages", "max_splits"]
MERGE_SIZES = ["q_len", "num_pages", "max_splits", "tiles"]
MERGED_COLUMNS = 64  # entries of an output that one program of the merge has: two a thread
MERGED_SPLITS = 32  # partials whose loads such a program has in flight
HOPPER_REGISTERS = {16: 168, 64: 128}  # per thread on average, by rows of a tile: all that one program can have

split_width = triton.jit(mla_split_width)
max_keys = triton.jit(mla_max_keys)


@triton.jit
def load_queries(  # type: ignore[no-untyped-def]
    q, at, live, FIRST: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr
):
    """Entries [FIRST, FIRST + SIZE) of a tile of queries, as [PADDED, ROWS]; zeros in rows that are not live."""
    dim = tl.arange(0, PADDED)
    mask = live[None, :] & (dim < SIZE)[:, None]
    return tl.load(q + FIRST + at[None, :] + dim[:, None], mask=mask, other=0.0)


@triton.jit
def load_entries(  # type: ignore[no-untyped-def]
    keys,
    slot,
    seen,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    STRIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Entries [FIRST, FIRST + SIZE) of a block of keys, as [BLOCK, PADDED]."""
    dim = tl.arange(0, PADDED)
    pointers = keys + FIRST + (slot * STRIDE)[:, None] + dim[None, :]
    if MASKED:
        entries = tl.load(pointers, mask=seen[:, None] & (dim < SIZE)[None, :], other=0.0)
    elif PADDED != SIZE:
        entries = tl.load(pointers, mask=(dim < SIZE)[None, :], other=0.0)
    else:
        entries = tl.load(pointers)
    return entries


@triton.jit
def add_block(  # type: ignore[no-untyped-def]
    q_latent,
    q_rope,
    keys,
    table,
    path,
    past,
    limit,
    start,
    factor,
    m_i,
    l_i,
    acc,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    ON_PATH: tl.constexpr,
):
    """A split's state after one more block. MASKED: some rows do not see some of its keys.

    Keys are the left matrix of both products: matrix instructions are 64 rows high, and so is a block.
    """
    index = start + tl.arange(0, BLOCK)
    max_limit = tl.max(limit)
    seen = index < max_limit  # keys that no row sees are not loaded
    slot = slots_of(start, 0, max_limit, table, path, past, PAGE, BLOCK, ON_PATH)
    latent = load_entries(keys, slot, seen, 0, RANK, q_latent.shape[0], RANK + ROPE, MASKED)
    rotated = load_entries(keys, slot, seen, RANK, ROPE, q_rope.shape[0], RANK + ROPE, MASKED)
    if not MASKED:  # in the pipelined loop; for keys that are stored from registers Triton adds the fence itself
        fence_copies(start)
    scores = tl.dot(latent, q_latent, input_precision="ieee")
    scores = tl.dot(rotated, q_rope, scores, input_precision="ieee") * factor  # [BLOCK, ROWS]
    if MASKED:
        scores = tl.where(index[:, None] < limit[None, :], scores, float("-inf"))
    new_m = tl.maximum(m_i, tl.ceil(tl.max(scores, axis=0)))
    weights = tl.exp2(scores - new_m[None, :]).to(q_latent.dtype)
    kept = power_of_two(m_i - new_m)[None, :]
    # l_i is a product, too: the order of a reduction would change with the height of the tile.
    ones = tl.full([L_ROWS, BLOCK], 1.0, q_latent.dtype)
    l_i = tl.dot(ones, weights, l_i * kept, input_precision="ieee")
    acc = tl.dot(tl.trans(latent), weights, acc * kept, input_precision="ieee")
    return new_m, l_i, acc


@triton.jit
def read_splits(  # type: ignore[no-untyped-def]
    q_latent,
    q_rope,
    keys,
    table,
    path,
    past,
    limit,
    live,
    first,
    end,
    width,
    factor,
    total_m,
    total_l,
    partial_acc,
    partial_ml,
    place,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_PATH: tl.constexpr,
    SPLIT_KV: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Read the splits [first, end), as far as any row sees; each is stored if SPLIT_KV, else added to the total.

    ON_PATH: keys from index `past` on are a node's ancestors, listed in `path`. Loads are pipelined where all rows see
    all keys. `place` is each row's place in partial_acc: of its first split if SPLIT_KV, else of its total acc, whose
    m and l are returned.
    """
    RANK_PAD: tl.constexpr = q_latent.shape[0]
    ROWS: tl.constexpr = q_latent.shape[1]
    min_limit = tl.min(tl.where(live, limit, tl.max(limit)))
    for split in tl.range(first, end, num_stages=1):
        m_i = tl.full([ROWS], LOWEST, tl.float32)
        l_i = tl.zeros([L_ROWS, ROWS], tl.float32)
        acc = tl.zeros([RANK_PAD, ROWS], tl.float32)
        begin, stop = split * width, tl.minimum((split + 1) * width, tl.max(limit))
        clear = begin  # below this all rows see all keys
        if not ON_PATH:
            clear = tl.maximum(tl.minimum(min_limit, stop) // BLOCK * BLOCK, begin)
            for start in tl.range(begin, clear, BLOCK, num_stages=STAGES):
                m_i, l_i, acc = add_block(
                    *(q_latent, q_rope, keys, table, path, past, limit, start, factor, m_i, l_i, acc),
                    *(RANK, ROPE, PAGE, BLOCK, False, False),
                )
        for start in tl.range(clear, stop, BLOCK, num_stages=1):
            m_i, l_i, acc = add_block(
                *(q_latent, q_rope, keys, table, path, past, limit, start, factor, m_i, l_i, acc),
                *(RANK, ROPE, PAGE, BLOCK, True, ON_PATH),
            )
        total_m, total_l = finish_split(
            *(split, live, m_i, tl.max(l_i, axis=0), acc, total_m, total_l), *(partial_acc, partial_ml, place, SPLIT_KV)
        )
    return total_m, total_l


@triton.jit
def finish_split(  # type: ignore[no-untyped-def]
    split, live, m_i, l_i, acc, total_m, total_l, partial_acc, partial_ml, place, SPLIT_KV: tl.constexpr
):
    """Store a finished split for the merge kernel, or add it to the total; its acc is in memory: registers are full."""
    RANK_PAD: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[1]
    dim = tl.arange(0, RANK_PAD)
    if SPLIT_KV:
        at = place + split * ROWS
        tl.store(partial_ml + at * 2, m_i, mask=live)
        tl.store(partial_ml + at * 2 + 1, l_i, mask=live)
        tl.store(partial_acc + at[None, :] * RANK_PAD + dim[:, None], acc, mask=live[None, :])
    else:
        new_m = tl.maximum(total_m, m_i)
        kept, added = power_of_two(total_m - new_m), power_of_two(m_i - new_m)
        held = partial_acc + place[None, :] * RANK_PAD + dim[:, None]
        # Other threads wrote what this one reads, and read what it writes. bar.sync orders that: PTX makes accesses to
        # global memory before it visible to all threads of the program, and loads and stores stay on their side of it.
        tl.debug_barrier()
        before = tl.load(held, mask=(live & (split > 0))[None, :], other=0.0)
        tl.debug_barrier()
        tl.store(held, before * kept[None, :] + acc * added[None, :], mask=live[None, :])
        total_l = tl.where(live, total_l * kept + l_i * added, total_l)
        total_m = tl.where(live, new_m, total_m)
    return total_m, total_l


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


@triton.jit(do_not_specialize=MERGE_SIZES)
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
        _merge(out, plan, how.tile, tiles, partial_acc, partial_ml)
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


def _merge(out: Tensor, plan: GpuPlan, tile: int, tiles: int, partial_acc: Tensor, partial_ml: Tensor) -> None:
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
