"""New keys and values on a GPU: norms, rotation and the store in one launch.

What is stored as a value is always finite: a value that is not is stored as zeros, with NaN in its key. A query that
sees the key gets a NaN score. One that does not see it multiplies the value by 0, and 0 * NaN would be NaN for that
query, too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.attention.plan import StoredKV, dense_heads
from peregrine.kernels.attention.triton import padded
from peregrine.kernels.rope import DeferredRope
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter

HEADS_PER_PROGRAM = 8  # of `rope_write_kernel`


@triton.jit
def all_finite(x):  # type: ignore[no-untyped-def]
    """Whether no entry along the last axis is NaN or infinite; the axis stays, with one entry."""
    finite = (tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32)
    return tl.min(finite, axis=len(x.shape) - 1, keep_dims=True) == 1


@triton.jit
def storable(key, value, is_finite):  # type: ignore[no-untyped-def]
    """The key and value that are stored: NaN and 0 if the value is not finite."""
    return tl.where(is_finite, key, float("nan")), tl.where(is_finite, value, 0.0)


@triton.jit
def stored(  # type: ignore[no-untyped-def]
    entry, scale, DTYPE: tl.constexpr, SCALED: tl.constexpr, LARGEST: tl.constexpr
):
    """An entry in the store's dtype; if SCALED, divided by the scale and clamped to the largest number."""
    if SCALED:
        entry = entry.to(tl.float32) / tl.load(scale)
        entry = tl.clamp(entry, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return entry.to(DTYPE)


@triton.jit
def rotated(  # type: ignore[no-untyped-def]
    x, head_norm, table, position, live, eps, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr
):
    """Both halves [heads, HALF] of a token's live heads x [heads, 1], normed and rotated. f32"""
    pairs = tl.arange(0, HALF)[None, :]
    inside = pairs < D // 2
    first = tl.load(x + pairs, mask=live & inside, other=0.0)
    second = tl.load(x + D // 2 + pairs, mask=live & inside, other=0.0)
    if NORM:
        a, b = first.to(tl.float32), second.to(tl.float32)
        square = tl.sum(a * a, axis=1, keep_dims=True) + tl.sum(b * b, axis=1, keep_dims=True)
        scale = 1.0 / tl.sqrt_rn(square / D + eps)
        w_first = tl.load(head_norm + pairs, mask=inside, other=0.0)
        w_second = tl.load(head_norm + D // 2 + pairs, mask=inside, other=0.0)
        first = w_first * (a * scale).to(first.dtype)
        second = w_second * (b * scale).to(second.dtype)
    a, b = first.to(tl.float32), second.to(tl.float32)
    cos = tl.load(table + position * D + pairs, mask=inside, other=0.0)
    sin = tl.load(table + position * D + D // 2 + pairs, mask=inside, other=0.0)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def write_kernel(  # type: ignore[no-untyped-def]
    k,  # [M, Hkv, D], tokens k_stride apart
    v,  # [M, Hkv, D], tokens v_stride apart
    slots,  # [M]
    keys,  # [slots, Hkv, D]
    values,  # [slots, Hkv, D]
    k_scale,  # [] f32
    v_scale,  # [] f32
    k_stride,
    v_stride,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Grid (tokens, KV heads): one token's key and value of one head go to its slot."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, D_PAD)
    mask = dim < D
    to = (tl.load(slots + token) * KV_HEADS + head) * D + dim
    key = tl.load(k + token * k_stride + head * D + dim, mask=mask)
    value = tl.load(v + token * v_stride + head * D + dim, mask=mask, other=0.0)
    key, value = storable(key.to(tl.float32), value.to(tl.float32), all_finite(value))
    tl.store(keys + to, stored(key, k_scale, keys.dtype.element_ty, SCALED, LARGEST), mask=mask)
    tl.store(values + to, stored(value, v_scale, values.dtype.element_ty, SCALED, LARGEST), mask=mask)


@triton.jit(do_not_specialize=["num_queries", "num_tokens"])
def rope_write_kernel(  # type: ignore[no-untyped-def]
    q,  # [R, Hq, D], rows q_stride apart
    k,  # [N, Hkv, D], rows kv_stride apart
    v,  # [N, Hkv, D]
    q_positions,  # [R]
    positions,  # [N]
    table,  # [C, D] cos | sin
    q_norm,  # [D]
    k_norm,  # [D]
    slots,  # [N]
    q_out,  # [R, Hq, D]
    keys,  # [slots, Hkv, D]
    values,  # [slots, Hkv, D]
    k_scale,
    v_scale,
    num_queries,
    num_tokens,
    q_stride,
    kv_stride,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
    EACH: tl.constexpr,
):
    """Grid (tokens, groups of heads): some heads of a token's query, or of its key and value."""
    enter()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_GROUPS: tl.constexpr = (HQ + EACH - 1) // EACH
    pairs = tl.arange(0, HALF)[None, :]
    inside = pairs < D // 2
    if group < Q_GROUPS:
        if row < num_queries:
            head = group * EACH + tl.arange(0, EACH)[:, None]
            live = head < HQ
            position = tl.load(q_positions + row)
            first, second = rotated(q + row * q_stride + head * D, q_norm, table, position, live, eps, D, HALF, NORM)
            place = q_out + (row * HQ + head) * D + pairs
            tl.store(place, first.to(q_out.dtype.element_ty), mask=live & inside)
            tl.store(place + D // 2, second.to(q_out.dtype.element_ty), mask=live & inside)
    elif row < num_tokens:
        head = (group - Q_GROUPS) * EACH + tl.arange(0, EACH)[:, None]
        live = head < HKV
        key = k + row * kv_stride + head * D
        first, second = rotated(key, k_norm, table, tl.load(positions + row), live, eps, D, HALF, NORM)
        # Rounded to the key's dtype first: a scaled store holds what it would from a key that was rotated before.
        first = first.to(k.dtype.element_ty).to(tl.float32)
        second = second.to(k.dtype.element_ty).to(tl.float32)
        value, mask = v + row * kv_stride + head * D + pairs, live & inside
        v_first = tl.load(value, mask=mask, other=0.0).to(tl.float32)
        v_second = tl.load(value + D // 2, mask=mask, other=0.0).to(tl.float32)
        is_finite = all_finite(v_first) & all_finite(v_second)
        first, v_first = storable(first, v_first, is_finite)
        second, v_second = storable(second, v_second, is_finite)
        place = (tl.load(slots + row) * HKV + head) * D + pairs
        NUMBER: tl.constexpr = keys.dtype.element_ty
        tl.store(keys + place, stored(first, k_scale, NUMBER, SCALED, LARGEST), mask=mask)
        tl.store(keys + place + D // 2, stored(second, k_scale, NUMBER, SCALED, LARGEST), mask=mask)
        tl.store(values + place, stored(v_first, v_scale, NUMBER, SCALED, LARGEST), mask=mask)
        tl.store(values + place + D // 2, stored(v_second, v_scale, NUMBER, SCALED, LARGEST), mask=mask)


def write_kv(kv: StoredKV, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """k and v [M, Hkv, D] go to their slots [M] of one layer. The twin is `KVStore.write`."""
    if not len(slots) == len(k) == len(v):
        raise ValueError(f"k has {len(k)} tokens and v {len(v)}, but slots has {len(slots)}")
    k, v = dense_heads(k), dense_heads(v)
    num_heads, head_dim = k.shape[1:]
    launch(
        write_kernel,
        (len(slots), num_heads),
        *(k, v, slots, kv.keys, kv.values, kv.k_scale, kv.v_scale, k.stride(0), v.stride(0)),
        KV_HEADS=num_heads,
        D=head_dim,
        D_PAD=padded(head_dim),
        SCALED=kv.k_scale is not None,
        LARGEST=torch.finfo(kv.keys.dtype).max,
        num_warps=1,
    )


def rope_write_kv(kv: StoredKV, slots: Tensor, q: Tensor, k: Tensor, v: Tensor, rope: DeferredRope) -> Tensor:
    """Rotate queries [R, Hq, D], which are returned, and keys; keys and values [N, Hkv, D] go to their slots [N].

    Head norms come first, if `rope` has them. The twins are `rotate_heads` and `KVStore.write`.
    """
    num_queries, q_heads, head_dim = q.shape
    num_tokens, kv_heads = k.shape[:2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    has_norms = rope.q_norm is not None and rope.k_norm is not None
    unused = rope.table  # a pointer that is never read
    launch(
        rope_write_kernel,
        (
            max(num_queries, num_tokens),
            triton.cdiv(q_heads, HEADS_PER_PROGRAM) + triton.cdiv(kv_heads, HEADS_PER_PROGRAM),
        ),
        *(q, k, v, rope.q_positions, rope.positions, rope.table),
        *((rope.q_norm, rope.k_norm) if has_norms else (unused, unused)),
        *(slots, out, kv.keys, kv.values),
        *(unused if scale is None else scale for scale in (kv.k_scale, kv.v_scale)),
        *(num_queries, num_tokens, q.stride(0), k.stride(0), rope.eps),
        HQ=q_heads,
        HKV=kv_heads,
        D=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        NORM=has_norms,
        SCALED=kv.k_scale is not None,
        LARGEST=torch.finfo(kv.keys.dtype).max,
        EACH=HEADS_PER_PROGRAM,
        num_warps=4,
        pdl=True,
    )
    return out
