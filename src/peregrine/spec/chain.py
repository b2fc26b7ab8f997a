"""Guess one token after another: a chain of K drafts."""

import torch
from torch import Tensor

from peregrine.kernels.choose import pick
from peregrine.spec.readers import DraftReader
from peregrine.spec.types import Chunk, Drafts, DraftShape, Seen


class ChainDrafter:
    """Drives a reader: absorb the path, pick, step over the pick, pick again."""

    def __init__(self, reader: DraftReader, num_drafts: int) -> None:
        self.reader = reader
        self.taps = reader.taps
        self.reads_next_token = reader.reads_next_token
        self.shape = DraftShape.chain(num_drafts, num_drafts - 1 + reader.first_place)

    def absorb(self, chunk: Chunk) -> None:
        self.reader.absorb(chunk)

    def propose(self, seen: Seen) -> Drafts:
        hidden = self.reader.read(seen)  # [R, H]
        picks = [self._pick(seen, hidden, 0)]
        for step in range(self.shape.depth - 1):
            # Each step attends to everything before it, earlier drafts included.
            places = (seen.new_past_lens + self.reader.first_place + step)[:, None]
            positions = places.clamp(max=seen.max_len - 1)
            metadata = seen.pages.uniform(positions, positions[:, 0], seen.pages.slots(places))
            hidden = self.reader.step(picks[-1], hidden, metadata)
            picks.append(self._pick(seen, hidden, step + 1))
        tokens = torch.stack(picks, dim=1)  # [R, K]
        return Drafts(tokens, torch.full_like(seen.live, self.shape.depth), None)

    def _pick(self, seen: Seen, hidden: Tensor, step: int) -> Tensor:
        """Each row's guess for the token `step` places past its newest, as the target would choose it. [R]"""
        positions = (seen.new_past_lens + 1 + step)[:, None]
        logits = self.reader.logits(hidden)[:, None]  # [R, 1, Vd]
        picks = pick(logits, positions, self.reader.target_ids, seen.law, seen.features)[:, 0]
        return picks if self.reader.target_ids is None else self.reader.target_ids[picks]
