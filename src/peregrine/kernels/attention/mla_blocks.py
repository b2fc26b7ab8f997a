"""What programs of multi-head latent attention (MLA) do with blocks of keys on a GPU, in Triton.

There is one key for all heads, [latent | rotated part], and its first RANK entries are its value: a block of latents is
read once and serves twice, for scores and for acc.

Bits do not depend on who reads what. The width of a query's splits follows from how many keys it sees, and from nothing
else. Blocks are added to a split's state in order, and splits to the total in order. Every m is rounded up to a whole
power of 2, so rescaling a state is exact, and it does not matter whether the greatest m is known beforehand. Stored
values are finite, see `mla_write_triton.py`. Kernels must be launched without `enable_fp_fusion`: a fused multiply-add
in one of them would round differently.
"""

import triton
import triton.language as tl

from peregrine.kernels.attention.blocks import LOWEST, power_of_two, slots_of
from peregrine.kernels.attention.plan import mla_max_keys, mla_split_width
from peregrine.kernels.runtime.fence import fence_copies

L_ROWS = tl.constexpr(64)  # rows of l: the height of a matrix instruction

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
