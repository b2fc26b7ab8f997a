"""The arithmetic of latent attention (MLA) on a GPU: one key for all heads, whose first RANK entries are its value.

A block of latents is read once and serves twice, for scores and for sums. Key indices are cut into splits, splits into
blocks; blocks are added to a split's state in order, and splits to the whole in order. How wide splits are follows from
how many keys a query sees, and from nothing else; where queries of one tile fall on both sides of a change of widths,
keys are read once for either side. Every maximum is rounded up to a whole power of 2, so that bringing two states to
one maximum is exact: whoever adds the splits up, whether it knows the greatest maximum beforehand or not, gets the same
bits. Values are finite: who stores a key sees to that (`latent_gpu`).

Kernels must be launched without `enable_fp_fusion`: a fused multiply-add in one of them would round apart.
"""

import triton
import triton.language as tl

from peregrine.kernels.attention.blocks_triton import LOWEST, slots_of

MASS_ROWS = tl.constexpr(64)  # of a matrix instruction


# There is one KV head only, so that splits have to be narrow for all multiprocessors to find work in one row; but a
# split's state is as large as the latents of a hundred keys. So a query has up to 132 of them, of 128 keys or more.
def latent_width(num_keys: int) -> int:
    """How many keys a split has for a query that sees so many; 64 for none. Works on the host and on the device."""
    blocks = (num_keys + 8447) // 8448
    return (blocks + (blocks < 2)) * 64


def latent_reach(width: int) -> int:
    """The most keys that are cut into splits of this width; works on the host and on the device."""
    return width * 132


width_of = triton.jit(latent_width)
reach_of = triton.jit(latent_reach)


@triton.jit
def power_of_two(exponent):  # type: ignore[no-untyped-def]
    """2 to a whole number that is not above 0, exactly; 0 where that is too small for a normal float32."""
    biased = tl.maximum(exponent, -127.0) + (2.0**23 + 127.0)  # its lowest bits are the biased exponent
    return (biased.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_latent_queries(  # type: ignore[no-untyped-def]
    q, at, live, FIRST: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr
):
    """Entries [FIRST, FIRST + SIZE) of a tile of queries, as [PADDED, ROWS]; zeros where there is none."""
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
    HIDES: tl.constexpr,
):
    """Entries [FIRST, FIRST + SIZE) of a block of keys, as [BLOCK, PADDED]."""
    dim = tl.arange(0, PADDED)
    pointers = keys + FIRST + (slot * STRIDE)[:, None] + dim[None, :]
    if HIDES:
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
    top,
    mass,
    sums,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    HIDES: tl.constexpr,
    ON_PATH: tl.constexpr,
):
    """A split's state after one more block. HIDES: not all rows see all its keys.

    Keys are the left matrix of both products: matrix instructions are 64 rows high, and so is a block.
    """
    index = start + tl.arange(0, BLOCK)
    farthest = tl.max(limit)
    seen = index < farthest  # what no row sees is not even loaded
    slot = slots_of(start, 0, farthest, table, path, past, PAGE, BLOCK, ON_PATH)
    latent = load_entries(keys, slot, seen, 0, RANK, q_latent.shape[0], RANK + ROPE, HIDES)
    turned = load_entries(keys, slot, seen, RANK, ROPE, q_rope.shape[0], RANK + ROPE, HIDES)
    scores = tl.dot(latent, q_latent, input_precision="ieee")
    scores = tl.dot(turned, q_rope, scores, input_precision="ieee") * factor  # [BLOCK, ROWS], as powers of 2
    if HIDES:
        scores = tl.where(index[:, None] < limit[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.ceil(tl.max(scores, axis=0)))
    weights = tl.exp2(scores - new_top[None, :]).to(q_latent.dtype)
    kept = power_of_two(top - new_top)[None, :]
    # The mass is a product, too: a reduction's order would change with the height of the tile.
    ones = tl.full([MASS_ROWS, BLOCK], 1.0, q_latent.dtype)
    mass = tl.dot(ones, weights, mass * kept, input_precision="ieee")
    sums = tl.dot(tl.trans(latent), weights, sums * kept, input_precision="ieee")
    return new_top, mass, sums


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
    whole_top,
    whole_mass,
    held_sums,
    held_stats,
    place,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_PATH: tl.constexpr,
    APART: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Read the splits [first, end), as far as any row sees; each is put aside if APART, else added to the whole.

    ON_PATH: keys from `past` on are those of `path`. Loads run ahead where all rows see all keys. `place` is each row's
    place among the held sums: of its first split if APART, else of its whole, of which the rest is returned.
    """
    RANK_PAD: tl.constexpr = q_latent.shape[0]
    ROWS: tl.constexpr = q_latent.shape[1]
    nearest = tl.min(tl.where(live, limit, tl.max(limit)))
    for split in tl.range(first, end, num_stages=1):
        top = tl.full([ROWS], LOWEST, tl.float32)
        mass = tl.zeros([MASS_ROWS, ROWS], tl.float32)
        sums = tl.zeros([RANK_PAD, ROWS], tl.float32)
        begin, stop = split * width, tl.minimum((split + 1) * width, tl.max(limit))
        clear = begin  # below this all rows see all keys
        if not ON_PATH:
            clear = tl.maximum(tl.minimum(nearest, stop) // BLOCK * BLOCK, begin)
            for start in tl.range(begin, clear, BLOCK, num_stages=STAGES):
                top, mass, sums = add_block(
                    *(q_latent, q_rope, keys, table, path, past, limit, start, factor, top, mass, sums),
                    *(RANK, ROPE, PAGE, BLOCK, False, False),
                )
        for start in tl.range(clear, stop, BLOCK, num_stages=1):
            top, mass, sums = add_block(
                *(q_latent, q_rope, keys, table, path, past, limit, start, factor, top, mass, sums),
                *(RANK, ROPE, PAGE, BLOCK, True, ON_PATH),
            )
        whole_top, whole_mass = leave_split(
            *(split, live, top, tl.max(mass, axis=0), sums, whole_top, whole_mass),
            *(held_sums, held_stats, place, APART),
        )
    return whole_top, whole_mass


@triton.jit
def leave_split(  # type: ignore[no-untyped-def]
    split, live, top, mass, sums, whole_top, whole_mass, held_sums, held_stats, place, APART: tl.constexpr
):
    """Put a finished split aside for the merge, or add it to the whole: there is no room for two in registers."""
    RANK_PAD: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[1]
    dim = tl.arange(0, RANK_PAD)
    if APART:
        at = place + split * ROWS
        tl.store(held_stats + at * 2, top, mask=live)
        tl.store(held_stats + at * 2 + 1, mass, mask=live)
        tl.store(held_sums + at[None, :] * RANK_PAD + dim[:, None], sums, mask=live[None, :])
    else:
        new_top = tl.maximum(whole_top, top)
        kept, added = power_of_two(whole_top - new_top), power_of_two(top - new_top)
        held = held_sums + place[None, :] * RANK_PAD + dim[:, None]
        tl.debug_barrier()  # other threads wrote what this one reads, and read what it writes
        before = tl.load(held, mask=(live & (split > 0))[None, :], other=0.0)
        tl.debug_barrier()
        tl.store(held, before * kept[None, :] + sums * added[None, :], mask=live[None, :])
        whole_mass = tl.where(live, whole_mass * kept + mass * added, whole_mass)
        whole_top = tl.where(live, new_top, whole_top)
    return whole_top, whole_mass
