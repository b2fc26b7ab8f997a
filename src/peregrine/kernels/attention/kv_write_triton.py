"""New keys and values on a GPU: norms, rotation and the store in one launch; and the slots of a tree's ancestors.

What is stored as a value is always finite: a value that is not is stored as zeros, with NaN in its key (in MLA: a
latent that is not finite as zeros, with NaN in the rotated part). A query that sees the key gets a NaN score. One that
does not see it multiplies the value by 0, and 0 * NaN would be NaN for that query, too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.config import MAX_NODES
from peregrine.kernels.attention.blocks import NODES
from peregrine.kernels.attention.mla import DeferredMLARope
from peregrine.kernels.attention.plan import GpuPlan, StoredKV, dense_heads
from peregrine.kernels.attention.triton import padded
from peregrine.kernels.rope import DeferredRope
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter

HEADS_PER_PROGRAM = 8  # of `rope_write_kernel`


@triton.jit(do_not_specialize=["num_nodes", "num_pages"])
def paths_kernel(  # type: ignore[no-untyped-def]
    ancestors, past_lens, table, limits, paths, num_nodes, num_pages, PAGE: tl.constexpr
):
    """Grid (tokens,): the slots of a node's ancestors by ascending bit, and how many keys the node sees."""
    token = tl.program_id(0)
    row = token // num_nodes
    past = tl.load(past_lens + row).to(tl.int32)
    bit = tl.arange(0, NODES)
    is_ancestor = ((tl.load(ancestors + token) >> bit) & 1).to(tl.int32)
    key = tl.minimum(past + bit, num_pages * PAGE - 1)
    page = tl.load(table + row.to(tl.int64) * num_pages + key // PAGE).to(tl.int64)
    rank = tl.cumsum(is_ancestor) - 1
    tl.store(paths + token * NODES + rank, page * PAGE + key % PAGE, mask=is_ancestor == 1)
    tl.store(limits + token, past + tl.sum(is_ancestor))


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


def plan_gpu(
    positions: Tensor,
    q_starts: Tensor,
    past_lens: Tensor,
    page_table: Tensor,
    page_size: int,
    ancestors: Tensor | None,
    longest: int | None = None,
) -> GpuPlan:
    """What all layers of a forward share; of a tree, ancestors [R, T] become lists of slots in one launch."""
    page_table = page_table.contiguous()
    if ancestors is None:
        return GpuPlan(positions, q_starts, past_lens, page_table, page_size, None, None, longest)
    num_tokens, num_nodes, num_pages = ancestors.numel(), ancestors.shape[1], page_table.shape[1]
    limits = torch.empty(num_tokens, dtype=torch.int32, device=ancestors.device)
    paths = torch.empty(num_tokens, MAX_NODES, dtype=torch.int64, device=ancestors.device)
    arguments = (ancestors.contiguous(), past_lens, page_table, limits, paths, num_nodes, num_pages)
    launch(paths_kernel, (num_tokens,), *arguments, PAGE=page_size, num_warps=1)
    return GpuPlan(positions, q_starts, past_lens, page_table, page_size, limits, paths, longest)


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
