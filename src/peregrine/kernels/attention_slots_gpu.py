"""Kernels around the slots of a KV store: new keys and values go to theirs, a tree's node finds its ancestors'."""

import triton
import triton.language as tl

from peregrine.kernels.attention_borders_gpu import MAX_NODES

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
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    SCALED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Grid (tokens, 2): one token's keys or values of all heads go to its slot."""
    token = tl.program_id(0)
    column = tl.arange(0, WIDTH_PAD)
    mask = column < WIDTH
    to = tl.load(slots + token) * WIDTH + column
    if tl.program_id(1) == 0:
        entry = tl.load(k + token.to(tl.int64) * k_stride + column, mask=mask)
        tl.store(keys + to, stored(entry, k_scale, keys.dtype.element_ty, SCALED, LARGEST), mask=mask)
    else:
        entry = tl.load(v + token.to(tl.int64) * v_stride + column, mask=mask)
        tl.store(values + to, stored(entry, v_scale, values.dtype.element_ty, SCALED, LARGEST), mask=mask)


@triton.jit
def stored(  # type: ignore[no-untyped-def]
    entry, scale, DTYPE: tl.constexpr, SCALED: tl.constexpr, LARGEST: tl.constexpr
):
    """What the store keeps of an entry: if scaled, divided by the scale and cut off at the largest number."""
    if SCALED:
        entry = entry.to(tl.float32) / tl.load(scale)
        entry = tl.clamp(entry, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return entry.to(DTYPE)
