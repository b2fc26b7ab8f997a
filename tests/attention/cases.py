"""Attention problems: dense keys and values per row, laid out in pages on demand, and a float64 answer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.attention import AttentionBackend, AttentionMetadata, LayerAttention, Window
from peregrine.attention.numba_backend import NumbaBackend
from peregrine.attention.torch_backend import TorchBackend
from peregrine.cache.store import KVStore

BACKENDS: list[AttentionBackend] = [b for b in (TorchBackend(), NumbaBackend()) if not b.missing()]


@dataclass(frozen=True)
class Row:
    """One row's window: q [Q, Hq, D] over k, v [S, Hkv, D], of which the first `past` were cached before."""

    past: int
    positions: list[int]
    words: list[int] | None  # ancestor words of a tree; None: causal
    q: Tensor
    k: Tensor
    v: Tensor

    def at(self, *queries: int) -> "Row":
        """The same row with some of its queries alone."""
        words = None if self.words is None else [self.words[i] for i in queries]
        positions = [self.positions[i] for i in queries]
        return Row(self.past, positions, words, self.q[list(queries)], self.k, self.v)


def chain(past: int, q_len: int, heads: tuple[int, int, int], seed: int = 0) -> Row:
    """A causal row; heads is (Hq, Hkv, D)."""
    return _row(past, list(range(past, past + q_len)), None, past + q_len, heads, seed)


def tree(past: int, parents: Sequence[int], heads: tuple[int, int, int], seed: int = 0) -> Row:
    """A tree row: node i's parent is parents[i] (-1 for the root), and its key is past + i."""
    words: list[int] = []
    for node, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | 1 << node)
    positions = [past + word.bit_count() - 1 for word in words]
    return _row(past, positions, words, past + len(parents), heads, seed)


def _row(
    past: int,
    positions: list[int],
    words: list[int] | None,
    total: int,
    heads: tuple[int, int, int],
    seed: int,
) -> Row:
    num_heads, num_kv_heads, head_dim = heads
    rng = torch.Generator().manual_seed(1000 * seed + past)
    q = torch.randn(len(positions), num_heads, head_dim, generator=rng)
    k = torch.randn(total, num_kv_heads, head_dim, generator=rng)
    v = torch.randn(total, num_kv_heads, head_dim, generator=rng)
    return Row(past, positions, words, q, k, v)


def sees(row: Row, query: int, window: int | None) -> list[int]:
    """The keys a query sees, by the definition."""
    position = row.positions[query]
    low = 0 if window is None else max(0, position - window + 1)
    if row.words is None:
        return list(range(low, position + 1))
    nodes = [j for j in range(64) if row.words[query] >> j & 1]
    return list(range(low, row.past)) + [row.past + j for j in nodes]


def expected(row: Row, layer: LayerAttention) -> Tensor:
    """Attention of one row in float64, without pages. -> [Q, Hq, D]"""
    group = row.q.shape[1] // row.k.shape[1]
    out = torch.empty_like(row.q, dtype=torch.float64)
    for i in range(len(row.positions)):
        seen = sees(row, i, layer.window)
        k, v = (x[seen].double().repeat_interleave(group, dim=1) for x in (row.k, row.v))  # [n, Hq, D]
        scores = torch.einsum("hd,nhd->hn", row.q[i].double(), k) * layer.scale
        if layer.sinks is not None:
            scores = torch.cat([scores, layer.sinks.double()[:, None]], dim=1)
        weights = scores.softmax(dim=1)[:, : len(seen)]
        out[i] = torch.einsum("hn,nhd->hd", weights, v)
    return out


@dataclass(frozen=True)
class Layout:
    """How rows are laid out in memory: none of it may change a result."""

    page_size: int = 16
    spare_pages: int = 0  # table entries past the longest row
    poison: bool = False  # NaN in every slot that no row owns or that lies past a row's end


PLAIN = Layout()


def attend(
    backend: AttentionBackend, rows: Sequence[Row], layer: LayerAttention, layout: Layout = PLAIN
) -> list[Tensor]:
    """Run the rows together as one forward over a paged store. -> one [Q, Hq, D] per row"""
    store, metadata, k, v = lay_out(rows, layout)
    q = torch.cat([row.q for row in rows])
    out = backend.bind(store, [layer, layer], metadata)(1, q, k, v)
    return list(out.split([len(row.positions) for row in rows]))


def lay_out(rows: Sequence[Row], layout: Layout) -> tuple[KVStore, AttentionMetadata, Tensor, Tensor]:
    """A store that holds each row's first `past` keys on shuffled pages, and what the forward brings."""
    size = layout.page_size
    needed = [-(-len(row.k) // size) for row in rows]
    rng = torch.Generator().manual_seed(7)
    pages = (1 + torch.randperm(sum(needed), generator=rng)).split(needed)
    table = torch.zeros(len(rows), max(needed) + layout.spare_pages, dtype=torch.int64)
    _, num_kv_heads, head_dim = rows[0].k.shape
    store = KVStore(2, 1 + sum(needed), size, num_kv_heads, head_dim, torch.float32, "cpu")
    if layout.poison:
        store.keys.fill_(torch.nan)
        store.values.fill_(torch.nan)
    slots = []
    for r, row in enumerate(rows):
        table[r, : needed[r]] = pages[r]
        own = (pages[r][:, None] * size + torch.arange(size)).flatten()[: len(row.k)]
        store.write(1, own[: row.past], row.k[: row.past], row.v[: row.past])
        slots.append(own[row.past :])
    lens = [len(row.positions) for row in rows]
    words = [[_signed(word) for word in row.words] for row in rows if row.words is not None]
    metadata = AttentionMetadata(
        window=Window.ragged(lens),
        positions=torch.tensor([p for row in rows for p in row.positions]),
        q_starts=torch.tensor([0, *lens]).cumsum(0),
        past_lens=torch.tensor([row.past for row in rows]),
        page_table=table,
        page_size=size,
        slots=torch.cat(slots),
        ancestors=torch.tensor(words) if words else None,
    )
    new = [torch.cat([x[row.past :] for x, row in zip(xs, rows, strict=True)]) for xs in _columns(rows)]
    return store, metadata, new[0], new[1]


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _columns(rows: Sequence[Row]) -> tuple[list[Tensor], list[Tensor]]:
    return [row.k for row in rows], [row.v for row in rows]
