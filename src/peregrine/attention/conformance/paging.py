"""Rows laid out in pages, with or without poison and pads, and one forward over them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.attention.backend import AttentionBackend
from peregrine.attention.conformance.problem import Row
from peregrine.attention.metadata import AttentionMetadata, LayerAttention
from peregrine.attention.window import Window
from peregrine.cache.store import KVShape, KVStore

K_SCALE, V_SCALE = 0.25, 0.5  # of a float8 store: powers of two, so that dividing by them rounds nothing
LAYER = 1  # the second of two: a read of the wrong layer finds zeros or poison


@dataclass(frozen=True, slots=True)
class Layout:
    """How rows are laid out in memory; nothing of it may change a result."""

    page_size: int = 16
    spare_pages: int = 0  # table entries past the longest row
    poison: bool = False  # NaN in every slot that no row owns or that lies past a row's end
    pads: int = 0  # rows on the scratch page, after the real ones
    kv_dtype: torch.dtype | None = None  # of the store; None: the rows' own


PLAIN = Layout()


@dataclass(frozen=True, slots=True)
class Forward:
    """The inputs of one forward."""

    store: KVStore
    metadata: AttentionMetadata
    q: Tensor  # [N, Hq, D]
    k: Tensor  # [M, Hkv, D]
    v: Tensor  # [M, Hkv, Dv]
    lens: list[int]  # queries of each real row

    def run(self, backend: AttentionBackend, layer: LayerAttention) -> list[Tensor]:
        """Run the forward. -> each real row's part of the output"""
        attend = backend.bind(self.store, [layer] * (LAYER + 1), self.metadata)
        return self.split(attend(LAYER, self.q, self.k, self.v))

    def split(self, out: Tensor) -> list[Tensor]:
        """The real rows' parts of an output."""
        return list(torch.split(out[: sum(self.lens)], self.lens))


def attend(
    backend: AttentionBackend, rows: Sequence[Row], layer: LayerAttention, layout: Layout = PLAIN
) -> list[Tensor]:
    """Run the rows together as one forward over a paged store. -> one [Q, Hq, Dv] per row"""
    return lay_out(rows, layout).run(backend, layer)


def lay_out(rows: Sequence[Row], layout: Layout) -> Forward:
    """A store with each row's first `past` keys on shuffled pages, and the inputs of the forward."""
    size, device = layout.page_size, rows[0].q.device
    needed = [-(-len(row.k) // size) for row in rows]
    rng = torch.Generator().manual_seed(7)
    shuffled = 1 + torch.randperm(sum(needed), generator=rng).to(device)
    pages = torch.split(shuffled, needed)
    store = make_store(rows[0], 1 + sum(needed), layout)
    table = torch.zeros(len(rows), max(needed) + layout.spare_pages, dtype=torch.int64, device=device)
    slots = []
    for r, row in enumerate(rows):
        table[r, : needed[r]] = pages[r]
        own = (pages[r][:, None] * size + torch.arange(size, device=device)).flatten()[: len(row.k)]
        store.write(LAYER, own[: row.past], row.k[: row.past], row.v[: row.past])
        slots.append(own[row.past :])
    everyone = [*rows, *[_pad_of(rows[-1])] * layout.pads]
    slots += [torch.arange(len(row.k), device=device) % size for row in everyone[len(rows) :]]
    lens = [len(row.positions) for row in everyone]
    words = [[_signed(word) for word in row.words] for row in everyone if row.words is not None]
    metadata = AttentionMetadata(
        window=Window.ragged(lens),
        positions=torch.tensor([p for row in everyone for p in row.positions], device=device),
        q_starts=torch.tensor([0, *lens], device=device).cumsum(0),
        past_lens=torch.tensor([row.past for row in everyone], device=device),
        page_table=torch.nn.functional.pad(table, (0, 0, 0, layout.pads)),
        page_size=size,
        slots=torch.cat(slots),
        ancestors=torch.tensor(words, device=device) if words else None,
    )
    return Forward(
        store=store,
        metadata=metadata,
        q=torch.cat([row.q for row in everyone]),
        k=torch.cat([row.k[row.past :] for row in everyone]),
        v=torch.cat([row.v[row.past :] for row in everyone]),
        lens=lens[: len(rows)],
    )


def make_store(row: Row, num_pages: int, layout: Layout) -> KVStore:
    """An empty store for rows like this one."""
    _, num_kv_heads, head_dim = row.k.shape
    dtype, device = layout.kv_dtype or row.k.dtype, row.k.device
    shape = KVShape(num_kv_heads, head_dim, row.v.shape[2], row.is_shared)
    store = KVStore(LAYER + 1, num_pages, layout.page_size, shape, dtype, device)
    if store.k_scales is not None and store.v_scales is not None:
        store.k_scales.fill_(K_SCALE)
        store.v_scales.fill_(V_SCALE)
    if layout.poison:
        store.keys.fill_(torch.nan)
        store.values.fill_(torch.nan)
    return store


def as_stored(row: Row, kv_dtype: torch.dtype) -> Row:
    """The row with keys and values rounded as a store of that dtype rounds them."""
    if kv_dtype == row.k.dtype:
        return row
    k, v = ((x.float() / s).to(kv_dtype).float() * s for x, s in ((row.k, K_SCALE), (row.v, V_SCALE)))
    return Row(row.past, row.positions, row.words, row.q, k, v)


def _pad_of(row: Row) -> Row:
    """A pad row as the engine makes them: no past, keys on the scratch page, output not read."""
    first = row.past
    positions = [position - first for position in row.positions]
    return Row(0, positions, row.words, row.q, row.k[first:], row.v[first:])


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
