"""Queries and keys of latent attention on a GPU: the latent's norm, the rotation, and the store, in one launch.

A key whose latent is not all finite is stored as zeros beside NaN. Whoever sees the key gets NaN for a score; who does
not see it multiplies its value by 0, and 0 * NaN would reach those, too.
"""

import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.attention.mla import DeferredMLARope
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    x, table, position, inside, ROPE: tl.constexpr, HALF: tl.constexpr
):
    """Both halves of what lies at x [heads, 1], turned. f32 [heads, HALF] each"""
    pairs = tl.arange(0, HALF)
    first = tl.load(x + pairs[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + ROPE // 2 + pairs[None, :], mask=inside, other=0.0).to(tl.float32)
    angle = table + position * ROPE + pairs
    cos = tl.load(angle, mask=pairs < ROPE // 2, other=0.0)[None, :]
    sin = tl.load(angle + ROPE // 2, mask=pairs < ROPE // 2, other=0.0)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize=["num_queries", "num_tokens"])
def turn_latent_kernel(  # type: ignore[no-untyped-def]
    q_rope,  # [R, HEADS, ROPE], rows and heads apart
    q,  # [R, HEADS, RANK + ROPE], rows and heads apart: what comes after RANK is written
    k,  # [N, RANK + ROPE], rows apart: the latent, and the part to be turned
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
    half = pairs < ROPE // 2
    if tl.program_id(1) == 0:
        if token < num_queries:
            head = tl.arange(0, HEADS_PAD)[:, None]
            inside = half & (head < HEADS)
            source = q_rope + token * from_row + head * from_head
            first, second = _turned(source, table, tl.load(q_positions + token), inside, ROPE, HALF)
            place = q + token * q_row + head * q_head + RANK + pairs
            tl.store(place, first.to(q.dtype.element_ty), mask=inside)
            tl.store(place + ROPE // 2, second.to(q.dtype.element_ty), mask=inside)
    elif token < num_tokens:
        source, place = k + token * k_row, keys + tl.load(slots + token) * (RANK + ROPE)
        dim = tl.arange(0, RANK_PAD)
        latent = tl.load(source + dim, mask=dim < RANK, other=0.0)
        wide = latent.to(tl.float32)
        scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / RANK + eps)
        normed = tl.load(kv_norm + dim, mask=dim < RANK, other=0.0) * (wide * scale).to(latent.dtype)
        is_finite = _all_finite(normed)
        tl.store(place + dim, tl.where(is_finite, normed, 0.0).to(keys.dtype.element_ty), mask=dim < RANK)
        none = tl.zeros([1, 1], tl.int32)
        first, second = _turned(source + RANK + none, table, tl.load(positions + token), half, ROPE, HALF)
        place = place + RANK + pairs
        first, second = tl.where(is_finite, first, float("nan")), tl.where(is_finite, second, float("nan"))
        tl.store(place, first.to(keys.dtype.element_ty), mask=half)
        tl.store(place + ROPE // 2, second.to(keys.dtype.element_ty), mask=half)


@triton.jit
def write_latent_kernel(  # type: ignore[no-untyped-def]
    k,  # [N, RANK + ROPE], rows apart
    slots,  # [N]
    keys,  # [slots, RANK + ROPE]
    k_row,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
    """Grid (tokens,): a finished key goes to its slot."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, WIDTH_PAD)
    key = tl.load(k + token * k_row + dim, mask=dim < WIDTH, other=0.0)
    is_finite = _all_finite(tl.where(dim < RANK, key, 0.0))
    key = tl.where(is_finite, key, tl.where(dim < RANK, 0.0, float("nan")))
    tl.store(keys + tl.load(slots + token) * WIDTH + dim, key.to(keys.dtype.element_ty), mask=dim < WIDTH)


@triton.jit
def _all_finite(x):  # type: ignore[no-untyped-def]
    return tl.min((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), axis=0) == 1


def turn_latent_gpu(q: Tensor, k: Tensor, turn: DeferredMLARope, slots: Tensor, keys: Tensor) -> Tensor:
    """Keys [N, 1, rank + rope], normed and turned, go to their slots [N] of one layer's keys [slots, 1, rank + rope].

    Queries [R, h, rank + rope] get turn.q_rope, turned, beside their absorbed part, in place. Twin: `turn_latent`.
    """
    num_queries, heads = q.shape[:2]
    rank, rope, num_tokens = turn.kv_norm.shape[0], turn.table.shape[1], len(k)
    if len(slots) != num_tokens:
        raise ValueError(f"k has {num_tokens} tokens, but slots has {len(slots)}")
    q_rope = turn.q_rope if turn.q_rope.stride(2) == 1 else turn.q_rope.contiguous()
    k = k if k.stride(2) == 1 else k.contiguous()
    launch(
        turn_latent_kernel,
        (max(num_queries, num_tokens), 2),
        *(q_rope, q, k, turn.q_positions, turn.positions, turn.table, turn.kv_norm, slots, keys),
        *(num_queries, num_tokens, q_rope.stride(0), q_rope.stride(1), q.stride(0), q.stride(1)),
        *(k.stride(0), turn.eps),
        HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads),
        RANK=rank,
        RANK_PAD=triton.next_power_of_2(rank),
        ROPE=rope,
        HALF=triton.next_power_of_2(rope // 2),
        num_warps=4,
        pdl=True,
    )
    return q


def write_latent_gpu(k: Tensor, rank: int, slots: Tensor, keys: Tensor) -> None:
    """The same for keys [N, 1, rank + rope] that are normed and turned already. The twin is `KVStore.write`."""
    if len(slots) != len(k):
        raise ValueError(f"k has {len(k)} tokens, but slots has {len(slots)}")
    k = k if k.stride(2) == 1 else k.contiguous()
    width = k.shape[2]
    launch(
        write_latent_kernel,
        (len(k),),
        *(k, slots, keys, k.stride(0)),
        RANK=rank,
        WIDTH=width,
        WIDTH_PAD=triton.next_power_of_2(width),
        num_warps=1,
    )
