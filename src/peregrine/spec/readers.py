"""How a drafter's network takes in tokens: draft heads read beside the target, a draft model reads on its own.

A reader absorbs what the target has read, leaves the hidden state of each row's newest entry, and then steps over
guessed tokens. Place 0 of its look-ahead is `first_place` past the newest cached token.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from peregrine.attention.backend import AttentionBackend, LayerAttention
from peregrine.attention.metadata import AttentionMetadata
from peregrine.cache.store import KVStore
from peregrine.models.heads import DraftHead
from peregrine.spec.bound import BoundModel, last_layer, write_only
from peregrine.spec.types import Chunk, Seen


class DraftReader(Protocol):
    """A network that guesses the next token from what it has read."""

    taps: tuple[int, ...]
    first_place: int  # where look-ahead entries begin, counted from new_past_lens
    reads_next_token: bool
    target_ids: Tensor | None  # [Vd] target id of each draft id; None: the same vocabulary

    def absorb(self, chunk: Chunk) -> None:
        """Take in a prompt chunk: keys and values only."""

    def read(self, seen: Seen) -> Tensor:
        """Take in the round's path; the hidden state that guesses each row's next token. [R, H]"""

    def step(self, tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Read guessed tokens after the hidden states that guessed them. [n], [n, H] -> [n, H]"""

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token. [n, H] -> [n, Vd]"""


def flat_live(seen: Seen, width: int, offset: int) -> Tensor:
    """Flat index of each row's live entry among [R, width] entries."""
    rows = torch.arange(seen.live.shape[0], device=seen.live.device)
    return rows * width + seen.live + offset


class HeadReader:
    """EAGLE, EAGLE-3 and MTP heads: the entry at position p is (the target's hidden state at p, the token at p + 1)."""

    first_place = 0
    reads_next_token = True

    def __init__(self, head: DraftHead, store: KVStore, backend: AttentionBackend) -> None:
        self.head, self.store, self.backend = head, store, backend
        self.layers: Sequence[LayerAttention] = head.layer_attention()
        self.taps = head.taps
        self.target_ids = head.draft_to_target

    def absorb(self, chunk: Chunk) -> None:
        assert chunk.taps is not None
        last = write_only(self.store, chunk.metadata.slots)
        attend = last
        if self.head.num_layers > 1:
            body = self.backend.bind(self.store, self.layers, chunk.metadata)
            attend = last_layer(body, last, self.head.num_layers)
        hidden = self.head.fuse(chunk.taps)
        self.head.forward(chunk.next_tokens, hidden, chunk.metadata.positions, attend, chunk.next_tokens[:0])

    def read(self, seen: Seen) -> Tensor:
        assert seen.taps is not None
        width = seen.next_tokens.shape[1]
        places = seen.past_lens[:, None] + torch.arange(width, device=seen.live.device)  # [R, W]
        positions = places.clamp(max=seen.max_len - 1)
        slots = seen.pages.slots(places)
        live_positions = (seen.past_lens + seen.live).clamp(max=seen.max_len - 1)[:, None]
        last = seen.pages.uniform(live_positions, live_positions[:, 0], slots)
        attend = self.backend.bind(self.store, self.layers, last)
        if self.head.num_layers > 1:
            body = self.backend.bind(
                self.store, self.layers, seen.pages.uniform(positions, seen.past_lens, slots)
            )
            attend = last_layer(body, attend, self.head.num_layers)
        hidden = self.head.fuse(seen.taps.flatten(0, 1))
        live = flat_live(seen, width, 0)
        return self.head.forward(seen.next_tokens.flatten(), hidden, positions.flatten(), attend, live)

    def step(self, tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata) -> Tensor:
        attend = self.backend.bind(self.store, self.layers, metadata)
        return self.head.forward(tokens, hidden, metadata.positions, attend, None)

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
        tokens = torch.cat([seen.tokens[:, :1], seen.next_tokens], dim=1)  # [R, W + 1]
        width = tokens.shape[1]
        places = seen.past_lens[:, None] + torch.arange(width, device=tokens.device)
        positions = places.clamp(max=seen.max_len - 1)
        slots = seen.pages.slots(places)
        live_positions = seen.new_past_lens.clamp(max=seen.max_len - 1)[:, None]
        body = self.model.bind(seen.pages.uniform(positions, seen.past_lens, slots))
        last = self.model.bind(seen.pages.uniform(live_positions, live_positions[:, 0], slots))
        attend = last_layer(body, last, self.model.decoder.config.num_layers)
        # A row that took nothing this round has its newest token still at the root.
        live = flat_live(seen, width, 0) + (seen.new_past_lens - seen.past_lens - seen.live)
        return self.model.decoder.forward(tokens.flatten(), positions.flatten(), attend, (), live)[0]

    def step(self, tokens: Tensor, hidden: Tensor, metadata: AttentionMetadata) -> Tensor:
        return self.model.read(tokens, metadata, ())[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.decoder.logits(hidden)
