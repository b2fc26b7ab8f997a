"""Rotary positions on a GPU: head norms, rotation, and the store of keys and values, all in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.attention.kv_write_triton import all_finite, storable, stored
from peregrine.kernels.rope.reference import DeferredRope
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter

HEADS_EACH = 8  # of one program


@triton.jit
def _turned(  # type: ignore[no-untyped-def]
    x, head_norm, table, position, live, eps, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr
):
    """Both halves [heads, HALF] of a token's live heads x [heads, 1], normed and turned. f32"""
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


@triton.jit(do_not_specialize=["num_queries", "num_tokens"])
def turn_kernel(  # type: ignore[no-untyped-def]
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
            first, second = _turned(q + row * q_stride + head * D, q_norm, table, position, live, eps, D, HALF, NORM)
            place = q_out + (row * HQ + head) * D + pairs
            tl.store(place, first.to(q_out.dtype.element_ty), mask=live & inside)
            tl.store(place + D // 2, second.to(q_out.dtype.element_ty), mask=live & inside)
    elif row < num_tokens:
        head = (group - Q_GROUPS) * EACH + tl.arange(0, EACH)[:, None]
        live = head < HKV
        key = k + row * kv_stride + head * D
        first, second = _turned(key, k_norm, table, tl.load(positions + row), live, eps, D, HALF, NORM)
        # Rounded as a key first, so that a scaled store holds what it would from a key made elsewhere.
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


def turn_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: DeferredRope,
    slots: Tensor,
    store: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
) -> Tensor:
    """Queries [R, Hq, D] turned; keys, turned, and values [N, Hkv, D] go to their slots [N] of the store.

    The store is one layer's keys, values [slots, Hkv, D] and their scales, if it has any.
    """
    keys, values, k_scale, v_scale = store
    num_queries, q_heads, head_dim = q.shape
    num_tokens, kv_heads = k.shape[:2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    has_norms = turn.q_norm is not None and turn.k_norm is not None
    launch(
        turn_kernel,
        (max(num_queries, num_tokens), triton.cdiv(q_heads, HEADS_EACH) + triton.cdiv(kv_heads, HEADS_EACH)),
        q,
        k,
        v,
        turn.q_positions,
        turn.positions,
        turn.table,
        turn.q_norm if has_norms else turn.table,
        turn.k_norm if has_norms else turn.table,
        slots,
        out,
        keys,
        values,
        turn.table if k_scale is None else k_scale,
        turn.table if v_scale is None else v_scale,
        num_queries,
        num_tokens,
        q.stride(0),
        k.stride(0),
        turn.eps,
        HQ=q_heads,
        HKV=kv_heads,
        D=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        NORM=has_norms,
        SCALED=k_scale is not None,
        LARGEST=torch.finfo(keys.dtype).max,
        EACH=HEADS_EACH,
        num_warps=4,
        pdl=True,
    )
    return out
