"""New keys of latent attention on a GPU: the latent's norm, the rotation and the store in one launch.

A latent is a key and a value in one. One that is not finite is stored as zeros, with NaN in the rotated part: see
`kv_write_triton.py`.
"""

import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.attention.kv_write_triton import all_finite, rotated
from peregrine.kernels.attention.mla import DeferredMLARope
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter


@triton.jit
def mla_write_kernel(  # type: ignore[no-untyped-def]
    k,  # [N, RANK + ROPE], rows k_stride apart
    slots,  # [N]
    keys,  # [slots, RANK + ROPE]
    k_stride,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """Grid (tokens,): a key that is normed and rotated already goes to its slot."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, WIDTH_PAD)
    key = tl.load(k + token * k_stride + dim, mask=dim < WIDTH, other=0.0)
    is_finite = all_finite(tl.where(dim < RANK, key, 0.0))
    key = tl.where(is_finite, key, tl.where(dim < RANK, 0.0, float("nan")))
    tl.store(keys + tl.load(slots + token) * WIDTH + dim, key.to(keys.dtype.element_ty), mask=dim < WIDTH)


@triton.jit(do_not_specialize=["num_queries", "num_tokens"])
def mla_rope_write_kernel(  # type: ignore[no-untyped-def]
    q_rope,  # [R, HEADS, ROPE], rows and heads apart
    q,  # [R, HEADS, RANK + ROPE], rows and heads apart: entries from RANK on are written
    k,  # [N, RANK + ROPE], rows apart: the latent and the part to rotate
    q_positions,  # [R]
    positions,  # [N]
    table,  # [C, ROPE] cos | sin
    kv_norm,  # [RANK]
    slots,  # [N]
    keys,  # [slots, RANK + ROPE]
    num_queries,
    num_tokens,
    from_row,
    from_head,
    q_row,
    q_head,
    k_row,
    eps,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    HALF: tl.constexpr,
):
    """Grid (tokens, 2): all heads of a token's query, or its key."""
    enter()
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, HALF)[None, :]
    inside = pairs < ROPE // 2
    if tl.program_id(1) == 0:
        if token < num_queries:
            head = tl.arange(0, HEADS_PAD)[:, None]
            live = head < HEADS
            source = q_rope + token * from_row + head * from_head
            position = tl.load(q_positions + token)
            first, second = rotated(source, kv_norm, table, position, live, eps, ROPE, HALF, False)
            place = q + token * q_row + head * q_head + RANK + pairs
            tl.store(place, first.to(q.dtype.element_ty), mask=live & inside)
            tl.store(place + ROPE // 2, second.to(q.dtype.element_ty), mask=live & inside)
    elif token < num_tokens:
        source, place = k + token * k_row, keys + tl.load(slots + token) * (RANK + ROPE)
        dim = tl.arange(0, RANK_PAD)
        latent = tl.load(source + dim, mask=dim < RANK, other=0.0)
        wide = latent.to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / RANK + eps)
        normed = tl.load(kv_norm + dim, mask=dim < RANK, other=0.0) * (wide * scale).to(latent.dtype)
        is_finite = all_finite(normed)
        tl.store(place + dim, tl.where(is_finite, normed, 0.0).to(keys.dtype.element_ty), mask=dim < RANK)
        one = tl.zeros([1, 1], tl.int32)
        position = tl.load(positions + token)
        first, second = rotated(source + RANK + one, kv_norm, table, position, one == 0, eps, ROPE, HALF, False)
        place = place + RANK + pairs
        first, second = tl.where(is_finite, first, float("nan")), tl.where(is_finite, second, float("nan"))
        tl.store(place, first.to(keys.dtype.element_ty), mask=inside)
        tl.store(place + ROPE // 2, second.to(keys.dtype.element_ty), mask=inside)


def mla_write_kv(keys: Tensor, slots: Tensor, k: Tensor, rank: int) -> None:
    """k [N, 1, rank + rope], normed and rotated already, goes to its slots [N] of one layer's keys.

    The twin is `KVStore.write`.
    """
    k = _checked_keys(k, slots)
    width = k.shape[2]
    launch(
        mla_write_kernel,
        (len(k),),
        *(k, slots, keys, k.stride(0)),
        RANK=rank,
        WIDTH=width,
        WIDTH_PAD=triton.next_power_of_2(width),
        num_warps=1,
    )


def mla_rope_write_kv(keys: Tensor, slots: Tensor, q: Tensor, k: Tensor, rope: DeferredMLARope) -> Tensor:
    """Norm and rotate k [N, 1, rank + rope], which goes to its slots [N] of one layer's keys [slots, 1, rank + rope].

    rope.q_rope, rotated, is written into q [R, h, rank + rope] after its first `rank` entries; q is returned. The twin
    is `mla_rope`.
    """
    num_queries, heads = q.shape[:2]
    rank, rope_dim, num_tokens = rope.kv_norm.shape[0], rope.table.shape[1], len(k)
    q_rope = rope.q_rope if rope.q_rope.stride(2) == 1 else rope.q_rope.contiguous()
    k = _checked_keys(k, slots)
    launch(
        mla_rope_write_kernel,
        (max(num_queries, num_tokens), 2),
        *(q_rope, q, k, rope.q_positions, rope.positions, rope.table, rope.kv_norm, slots, keys),
        *(num_queries, num_tokens, q_rope.stride(0), q_rope.stride(1), q.stride(0), q.stride(1)),
        *(k.stride(0), rope.eps),
        HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads),
        RANK=rank,
        RANK_PAD=triton.next_power_of_2(rank),
        ROPE=rope_dim,
        HALF=triton.next_power_of_2(rope_dim // 2),
        num_warps=4,
        pdl=True,
    )
    return q


def _checked_keys(k: Tensor, slots: Tensor) -> Tensor:
    """k with its entries side by side; refused if there is not one slot for each."""
    if len(slots) != len(k):
        raise ValueError(f"k has {len(k)} tokens, but slots has {len(slots)}")
    return k if k.stride(2) == 1 else k.contiguous()
