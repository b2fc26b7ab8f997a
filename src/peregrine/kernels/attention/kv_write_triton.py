"""Kernels around the slots of a KV store: new keys and values go to theirs, a tree's node finds its ancestors'."""

import triton
import triton.language as tl

from peregrine.kernels.attention.splits_triton import MAX_NODES

NODES = tl.constexpr(MAX_NODES)


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


@triton.jit
def all_finite(x):  # type: ignore[no-untyped-def]
    """Whether none of these, along the last axis, is NaN or infinite; the axis stays, with one entry."""
    finite = (tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32)
    return tl.min(finite, axis=len(x.shape) - 1, keep_dims=True) == 1


@triton.jit
def storable(key, value, is_finite):  # type: ignore[no-untyped-def]
    """A key and a value that can be stored: if the value is not all finite, zeros, and NaN for a key.

    Whoever sees the key is told; who does not see it multiplies the value by 0, and 0 * NaN would tell it, too.
    """
    return tl.where(is_finite, key, float("nan")), tl.where(is_finite, value, 0.0)


@triton.jit
def stored(  # type: ignore[no-untyped-def]
    entry, scale, DTYPE: tl.constexpr, SCALED: tl.constexpr, LARGEST: tl.constexpr
):
    """What the store keeps of an entry: if scaled, divided by the scale and cut off at the largest number."""
    if SCALED:
        entry = entry.to(tl.float32) / tl.load(scale)
        entry = tl.clamp(entry, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return entry.to(DTYPE)
