"""Attention over paged keys and values in plain torch: the definition, the oracle, and the path for any device.

A query reads the keys it sees in order: its row's keys by index, then (in a tree) its own ancestors by ascending bit.
The n-th key it reads has index n, so a tree path and the chain it stands for give the same bits. Matrix libraries round
differently for different shapes; here every product has one shape, a tile of TILE query rows by a block of BLOCK key
indices, and blocks are added in order. A block in which a query sees nothing leaves its state (m, l, acc) as it was, so
neither other rows nor longer tables change a bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from peregrine.config import MAX_NODES
from peregrine.kernels.activation import soft_cap

TILE = 16  # query rows (query tokens x heads of one KV head) per product
BLOCK = 64  # key indices per product
COLUMNS = 16  # columns of a product are filled up to a multiple of this
SPAN = 8 * BLOCK  # key indices that share one running maximum
MAX_PRODUCTS = 1024  # products of one call, unless one tile per lane and KV head is more; bounds memory
LOWEST = -1e30  # below any score, yet finite: the difference of two of them is 0 and not NaN


@dataclass(frozen=True, slots=True)
class QueryPlan:
    """Which keys the queries of one forward see, shared by all layers: B lanes of Q queries with one list of keys each.

    A lane is a row of the batch; in a tree, where queries of one row read different keys, it is one query.
    """

    key_slots: Tensor  # [B, C] i64 slot of the lane's key at each index; C is a multiple of BLOCK
    limits: Tensor  # [B, Q] i64 the query sees key indices below this
    positions: Tensor  # [B, Q] i64 what the sliding window is measured from
    shared: Tensor  # [B, Q] i64 a sliding window applies to key indices below this; the rest are tree ancestors
    places: Tensor | None  # [B, Q] i64 token at each place of the lanes; None: tokens in order
    tokens: Tensor | None  # [N] i64 place of each token; None: tokens in order


def plan_causal(positions: Tensor, q_starts: Tensor, max_q_len: int, key_slots: Tensor) -> QueryPlan:
    """Queries [N] of rows that begin at q_starts [R + 1]; a query at position p sees keys [0, p] of its row.

    Rows shorter than max_q_len are padded with tokens of the next rows, whose results are dropped.
    """
    num_rows, num_tokens = key_slots.shape[0], positions.shape[0]
    if num_tokens == num_rows * max_q_len:
        lanes = positions.view(num_rows, max_q_len)
        return QueryPlan(key_slots, lanes + 1, lanes, lanes + 1, None, None)
    order = torch.arange(num_tokens, device=positions.device)
    places = (q_starts[:-1, None] + order[:max_q_len]).clamp(max=num_tokens - 1)  # [R, Q]
    row_of = torch.searchsorted(q_starts[1:], order, right=True)  # [N]
    tokens = row_of * max_q_len + order - q_starts[row_of]  # [N]
    lanes = positions[places]  # [R, Q]
    return QueryPlan(key_slots, lanes + 1, lanes, lanes + 1, places, tokens)


def plan_tree(
    positions: Tensor, q_starts: Tensor, past_lens: Tensor, ancestors: Tensor, key_slots: Tensor
) -> QueryPlan:
    """Queries [N] that see keys [0, past_len) of their row and those that their words, N in all, name."""
    bits = torch.arange(MAX_NODES, device=ancestors.device)
    is_ancestor = (ancestors.reshape(-1, 1) >> bits) & 1  # [N, 64]
    # The d-th ancestor's node, by ascending bit; past the last ancestor any node will do.
    nodes = is_ancestor.sort(dim=1, descending=True, stable=True).indices  # [N, 64]
    order = torch.arange(len(positions), device=positions.device)
    row_of = torch.searchsorted(q_starts[1:].contiguous(), order, right=True)  # [N]
    past = past_lens[row_of][:, None]  # [N, 1]
    index = torch.arange(key_slots.shape[1], device=key_slots.device)  # [C]
    depth = (index - past).clamp(min=0, max=MAX_NODES - 1)  # [N, C]
    key = torch.where(index < past, index, past + nodes.gather(1, depth)).clamp(max=key_slots.shape[1] - 1)
    limits = past + is_ancestor.sum(dim=1, keepdim=True)
    return QueryPlan(key_slots[row_of].gather(1, key), limits, positions[:, None], past, None, None)


def slots_of_rows(page_table: Tensor, page_size: int) -> Tensor:
    """The slot of every key of every row. [R, P] -> [R, C] i64, padded to whole blocks with slot 0."""
    offsets = torch.arange(page_size, device=page_table.device)
    slots = (page_table.long()[:, :, None] * page_size + offsets).flatten(1)
    return functional.pad(slots, (0, -slots.shape[1] % BLOCK))


def paged_attention_torch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: QueryPlan,
    scale: float | Tensor,
    window: int | None,
    sinks: Tensor | None,
    cap: float | None = None,
) -> Tensor:
    """Attention of q [N, Hq, D] over one layer's keys [slots, Hkv, D] and values [slots, Hkv, Dv]. -> [N, Hq, Dv]"""
    num_lanes, q_len = plan.limits.shape
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    lanes = q if plan.places is None else q[plan.places.view(-1)]
    rows = lanes.reshape(num_lanes, q_len, num_kv_heads, group, head_dim).transpose(1, 2).flatten(2, 3)
    lows = torch.zeros_like(plan.limits)
    if window is not None:
        lows = torch.minimum(plan.positions + 1 - window, plan.shared)
    tiles = Tiles(
        rows=_to_tiles(rows.float() * scale),
        limits=_to_tiles(plan.limits.repeat_interleave(group, dim=1)[:, None, :, None]),
        lows=_to_tiles(lows.repeat_interleave(group, dim=1)[:, None, :, None]),
        m_i=_to_tiles(_initial_m(sinks, q, num_kv_heads).repeat(1, q_len)[None, :, :, None]),
        l_i=0.0 if sinks is None else 1.0,
        cap=cap,
    )
    output = torch.cat([_attend_tiles(piece, keys, values, plan) for piece in tiles.pieces()], dim=2)
    output = output.flatten(2, 3)[:, :, : q_len * group]  # [B, Hkv, Q * G, Dv]
    output = torch.unflatten(output, 2, (q_len, group)).transpose(1, 2)  # [B, Q, Hkv, G, Dv]
    output = output.reshape(num_lanes * q_len, num_heads, values.shape[2]).to(q.dtype)
    return output if plan.tokens is None else output[plan.tokens]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query rows of one KV head each, in tiles; row i * G + g is head g of the lane's query i."""

    rows: Tensor  # [B, Hkv, tiles, TILE, D] scaled queries
    limits: Tensor  # [B, 1, tiles, TILE, 1]
    lows: Tensor  # [B, 1, tiles, TILE, 1] first key index inside the sliding window
    m_i: Tensor  # [1, Hkv, tiles, TILE, 1] running maximum before any key: the sink, or LOWEST
    l_i: float  # running denominator before any key: 1 for the sink, or 0
    cap: float | None  # of the scores

    def pieces(self) -> Iterator["Tiles"]:
        """Some tiles of each lane and KV head at a time: it bounds memory and changes no bit."""
        fields = (self.rows, self.limits, self.lows, self.m_i)
        count = max(1, MAX_PRODUCTS // (self.rows.shape[0] * self.rows.shape[1] * (SPAN // BLOCK)))
        for rows, limits, lows, m_i in zip(*(torch.split(x, count, 2) for x in fields), strict=True):
            yield Tiles(rows, limits, lows, m_i, self.l_i, self.cap)


def _to_tiles(x: Tensor) -> Tensor:
    """Cut dimension 2 into tiles, the last one padded with zeros. [B, H, n, D] -> [B, H, tiles, TILE, D]"""
    return torch.unflatten(functional.pad(x, (0, 0, 0, -x.shape[2] % TILE)), 2, (-1, TILE))


def _initial_m(sinks: Tensor | None, q: Tensor, num_kv_heads: int) -> Tensor:
    """Each head's running maximum before any key. -> [Hkv, G]"""
    if sinks is None:
        sinks = torch.full((q.shape[1],), LOWEST, device=q.device)
    return sinks.float().clamp(min=LOWEST).view(num_kv_heads, -1)


def _attend_tiles(tiles: Tiles, keys: Tensor, values: Tensor, plan: QueryPlan) -> Tensor:
    """Merge all key blocks, in order, into the outputs of the tiles. -> [B, Hkv, tiles, TILE, Dv]"""
    m_i = tiles.m_i.expand(*tiles.rows.shape[:-1], 1)
    l_i = torch.full_like(m_i, tiles.l_i)
    acc = tiles.rows.new_zeros(*tiles.rows.shape[:-1], values.shape[2])
    for start in range(0, plan.key_slots.shape[1], SPAN):
        slots = torch.unflatten(plan.key_slots[:, start : start + SPAN], 1, (-1, BLOCK))  # [B, blocks, BLOCK]
        grid = (*tiles.rows.shape[:3], slots.shape[1])  # B, Hkv, tiles, blocks
        key = keys[slots].float().permute(0, 3, 1, 4, 2)  # [B, Hkv, blocks, D, BLOCK]
        value = values[slots].float().permute(0, 3, 1, 2, 4)  # [B, Hkv, blocks, BLOCK, Dv]
        # 0 * NaN is NaN, so values that are not finite become 0 and make the score NaN instead: only queries that see
        # the key are affected.
        is_bad = ~value.isfinite().all(dim=4)  # [B, Hkv, blocks, BLOCK]
        value = value.masked_fill(is_bad[..., None], 0.0)
        scores = _products(tiles.rows[:, :, :, None], key[:, :, None], grid)  # [*grid, TILE, BLOCK]
        scores = scores if tiles.cap is None else soft_cap(scores, tiles.cap)
        scores = scores.masked_fill(is_bad[:, :, None, :, None], torch.nan)
        scores = scores.masked_fill(~_visible(start, tiles, slots.shape[1]), -torch.inf)
        new_m = torch.maximum(m_i, scores.amax(dim=(3, 5))[..., None])
        weights = (scores - new_m[:, :, :, None]).exp()
        kept = (m_i - new_m).exp()
        l_i, acc, m_i = l_i * kept, acc * kept, new_m
        block_l = weights.sum(dim=5, keepdim=True)  # [*grid, TILE, 1]
        block_acc = _products(weights, value[:, :, None], grid)  # [*grid, TILE, Dv]
        for block in range(slots.shape[1]):
            l_i = l_i + block_l[:, :, :, block]
            acc = acc + block_acc[:, :, :, block]
    return acc / l_i


def _visible(start: int, tiles: Tiles, blocks: int) -> Tensor:
    """Which key indices from `start` each query sees. -> [B, 1, tiles, blocks, TILE, BLOCK]"""
    index = torch.arange(start, start + blocks * BLOCK, device=tiles.rows.device).view(blocks, 1, BLOCK)
    return (index >= tiles.lows[:, :, :, None]) & (index < tiles.limits[:, :, :, None])


def _products(a: Tensor, b: Tensor, grid: tuple[int, ...]) -> Tensor:
    """a @ b for a grid of matrices, each product of one shape and one memory layout. -> [*grid, n, m]

    Dimensions of size 1 are expanded. Libraries take other code paths for transposed or strided matrices. MKL splits
    the columns of a single product between threads, and rounds differently where a piece fills no vectors: hence the
    zeros.
    """
    columns = b.shape[-1]
    b = functional.pad(b, (0, -columns % COLUMNS)) if columns % COLUMNS else b
    left, right = (x.expand(*grid, -1, -1).reshape(-1, *x.shape[-2:]).contiguous() for x in (a, b))
    return torch.bmm(left, right)[..., :columns].reshape(*grid, a.shape[-2], columns)
