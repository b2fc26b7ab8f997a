"""Draft networks: a draft head reads the target's hidden states, a draft model reads tokens alone.

A reader absorbs what the target has read, returns the hidden state of each row's newest entry, and then steps over
drafted tokens. Place 0 of its look-ahead is `first_place` past the newest cached token.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from peregrine.attention import AttentionBackend
from peregrine.attention.metadata import AttentionMetadata
from peregrine.cache.store import KVStore
from peregrine.models.draft_heads import StepHead
from peregrine.spec.bound import BoundHead, BoundModel
from peregrine.spec.types import Chunk, Seen


class DraftReader(Protocol):
    """A draft network: predicts the next token from the tokens it has read."""

    taps: tuple[int, ...]
    first_place: int  # where look-ahead entries begin, counted from new_past_lens
    reads_next_token: bool
    target_ids: Tensor | None  # [Vd] target id of each draft id; None: the same vocabulary

    def absorb(self, chunk: Chunk) -> None:
        """Read a prompt chunk: keys and values only."""

    def read(self, seen: Seen) -> Tensor:
        """Read the round's path; returns the hidden state that predicts each row's next token. [R, H]"""

    def step(self, tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Read drafted tokens, each with the hidden state that predicted it. [n], [n, H] -> [n, H]"""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token. [n, H] -> [n, Vd]"""


@dataclass(frozen=True, slots=True)
class Path:
    """How a reader reads the round's path: keys and values of all its entries, the rest of the live ones alone."""

    tokens: Tensor  # [N]
    live: Tensor  # [n] place among them of each live entry: one per row that is drafted for
    body: AttentionMetadata  # of all entries
    last: AttentionMetadata  # of the live ones, while all keys are written

    @staticmethod
    def of(seen: Seen, first: int) -> "Path":
        """The path; `first` is 1 if the entry before it is read once more, and an entry's token is its own."""
        pages, layout, width = seen.pages, seen.layout, seen.width + first
        places = pages.path(seen.past_lens, seen.new_past_lens, seen.history, width, behind=1 - first)
        tokens, slots, live, live_positions = places.tokens, places.slots, places.live, places.live_positions
        if layout is None or layout.paths.is_uniform:
            body = pages.uniform(places.positions, seen.past_lens, slots)
        else:
            windows = layout.paths.longer() if first else layout.paths
            tokens, positions, slots = (windows.pack(x) for x in (tokens, places.positions, slots))
            body, live = windows.metadata(pages, positions, seen.past_lens, slots), live + windows.moved
        if layout is not None and layout.rows is not None:
            live, live_positions = (x.index_select(0, layout.rows) for x in (live, live_positions))
        if not len(live):
            return Path(tokens, live, body, body)
        drafted = seen.drafted()
        last = drafted.pages.uniform(live_positions, drafted.past_lens, slots)
        return Path(tokens, live, body, last)


class HeadReader:
    """EAGLE, EAGLE-3 and MTP heads: the entry at position p is (the target's hidden state at p, the token at p + 1)."""

    first_place = 0
    reads_next_token = True

    def __init__(self, head: StepHead, store: KVStore, backend: AttentionBackend) -> None:
        self.head, self.store = head, store
        self.bound = BoundHead(head, head.layer_attention(), store, backend)
        self.taps = head.taps
        self.target_ids = head.draft_to_target

    def absorb(self, chunk: Chunk) -> None:
        assert chunk.taps is not None
        tokens, metadata = chunk.next_tokens, chunk.metadata
        self.bound.read(tokens, self.head.fuse(chunk.taps), metadata, metadata, tokens[:0])

    def read(self, seen: Seen) -> Tensor:
        assert seen.taps is not None
        path = Path.of(seen, first=0)
        hidden = self.head.fuse(seen.taps.flatten(0, -2))
        return self.bound.read(path.tokens, hidden, path.body, path.last, path.live)

    def step(self, tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.bound.read(tokens, hidden, metadata, metadata, None)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(hidden)


class ModelReader:
    """A small model of the same vocabulary: the entry at position p is the token at p."""

    first_place = 1
    reads_next_token = False
    target_ids: Tensor | None = None
    taps: tuple[int, ...] = ()

    def __init__(self, model: BoundModel) -> None:
        self.model = model

    def absorb(self, chunk: Chunk) -> None:
        self.model.fill(chunk.tokens, chunk.metadata, ())

    def read(self, seen: Seen) -> Tensor:
        # The root is read again with the path: a chain that was wholly right left its last draft unread.
        path = Path.of(seen, first=1)
        return self.model.read_live(path.tokens, path.body, path.last, path.live, ())[0]

    def step(self, tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.model.read(tokens, metadata, ())[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.decoder.logits(hidden)
