"""Attention problems without pages, their float64 answers by definition, and the allowed error."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peregrine.attention.metadata import LayerAttention

# Query heads, KV heads, head dim; for MLA a fourth number: how many entries of a key, from the first on, are its value.
Heads = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One row's window: q [Q, Hq, D] over k [S, Hkv, D] and v [S, Hkv, Dv], the first `past` cached before."""

    past: int
    positions: list[int]
    words: list[int] | None  # ancestor words of a tree; None: causal
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def is_shared(self) -> bool:
        """Whether keys hold their values: then v is the first part of k."""
        return self.v.shape[2] < self.k.shape[2]

    def at(self, *queries: int) -> "Row":
        """The row with only some of its queries; all its keys are stored."""
        words = None if self.words is None else [self.words[i] for i in queries]
        return replace(self, positions=[self.positions[i] for i in queries], words=words, q=self.q[list(queries)])

    def path_to(self, query: int) -> "Row":
        """The chain that equals a tree's path: one query over its own keys alone."""
        keys = self.keys_of(query, None)
        return Row(self.past, [self.positions[query]], None, self.q[query : query + 1], self.k[keys], self.v[keys])

    def keys_of(self, query: int, window: int | None) -> list[int]:
        """The keys that a query sees, by definition."""
        position = self.positions[query]
        low = 0 if window is None else max(0, position - window + 1)
        if self.words is None:
            return list(range(low, position + 1))
        nodes = [j for j in range(64) if self.words[query] >> j & 1]
        return list(range(low, self.past)) + [self.past + j for j in nodes]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Row":
        """The row on another device, in another dtype."""
        return replace(self, q=self.q.to(device, dtype), k=self.k.to(device, dtype), v=self.v.to(device, dtype))


def chain(past: int, q_len: int, heads: Heads, seed: int = 0) -> Row:
    """A causal row."""
    return _row(past, list(range(past, past + q_len)), None, past + q_len, heads, seed)


def tree(past: int, parents: Sequence[int], heads: Heads, seed: int = 0) -> Row:
    """A tree row: node i's parent is parents[i] (-1 for the root), and its key is past + i."""
    words: list[int] = []
    for node, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | 1 << node)
    positions = [past + word.bit_count() - 1 for word in words]
    return _row(past, positions, words, past + len(parents), heads, seed)


def _row(past: int, positions: list[int], words: list[int] | None, total: int, heads: Heads, seed: int) -> Row:
    num_heads, num_kv_heads, head_dim, *value_dim = heads
    rng = torch.Generator().manual_seed(1000 * seed + past)
    q = torch.randn(len(positions), num_heads, head_dim, generator=rng)
    k = torch.randn(total, num_kv_heads, head_dim, generator=rng)
    v = k[..., : value_dim[0]] if value_dim else torch.randn(k.shape, generator=rng)
    return Row(past, positions, words, q, k, v)


@dataclass(frozen=True, slots=True)
class Answer:
    """The attention of one row, and how far from it a correct kernel may be."""

    out: Tensor  # [Q, Hq, Dv] f64
    bound: Tensor  # [Q, Hq, Dv] f64


def answer(row: Row, layer: LayerAttention, dtype: torch.dtype) -> Answer:
    """Attention of one row in float64, query by query, and the bound for a kernel that computes in `dtype`."""
    outs, bounds = [], []
    for query in range(len(row.positions)):
        seen = row.keys_of(query, layer.window)
        out, bound = _answer_query(row.q[query], row.k[seen], row.v[seen], layer, dtype)
        outs.append(out)
        bounds.append(bound)
    return Answer(torch.stack(outs), torch.stack(bounds))


def _answer_query(q: Tensor, k: Tensor, v: Tensor, layer: LayerAttention, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One query [Hq, D] over the keys it sees [n, Hkv, D]. -> the output and its bound, [Hq, Dv] each"""
    count, num_kv_heads, head_dim = k.shape
    q, k, v = q.double().view(num_kv_heads, -1, head_dim), k.double(), v.double()  # q [Hkv, G, D]
    scores = torch.einsum("hgd,nhd->hgn", q, k) * layer.scale
    all_scores, sinks = scores, None
    if layer.sinks is not None:
        sinks = layer.sinks.double().view(num_kv_heads, -1, 1)  # [Hkv, G, 1]
        all_scores = torch.cat([scores, sinks], dim=2)
    weights = all_scores.softmax(dim=2)[:, :, :count]
    out = torch.einsum("hgn,nhd->hgd", weights, v)

    # The bound. With u the rounding error of `dtype` and f that of one float32 operation (truncated, as in matrix
    # units), a kernel errs in three places.
    # 1. A score is a sum of D products: off by f * D times the sum of their sizes. Subtracting the maximum and
    #    exponentiating adds a few operations on numbers of that size. The relative error of a weight is as large.
    # 2. A weight is rounded to `dtype` before the product with its value: u, or half a subnormal step.
    # 3. Adding n products and their weights in any order, and rescaling: f * n.
    # A relative error e of all weights moves the output by e * (sum of weights * |v| + |out|); rounding it adds u.
    info, f = torch.finfo(dtype), torch.finfo(torch.float32).eps
    u = info.eps / 2
    products = torch.einsum("hgd,nhd->hgn", q.abs(), k.abs()) * abs(layer.scale)
    sizes = products.amax(dim=2, keepdim=True)  # [Hkv, G, 1]
    if sinks is not None:
        sizes = torch.maximum(sizes, sinks.nan_to_num(neginf=0.0).abs())
    relative = u + f * (head_dim + 4) * sizes + f * (count + 8)
    moved = relative * (torch.einsum("hgn,nhd->hgd", weights, v.abs()) + out.abs())
    lost = count * info.smallest_normal * info.eps * v.abs().amax(dim=0)[:, None]
    bound = moved + lost + u * out.abs() + info.smallest_normal
    return out.flatten(0, 1), bound.flatten(0, 1)
