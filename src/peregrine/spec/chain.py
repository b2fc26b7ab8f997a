"""Draft one token after another: a chain of K drafts."""

import torch

from peregrine.kernels.sampling import pick
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
        depth, pages = self.shape.depth, seen.pages
        ahead = pages.ahead(seen.new_past_lens, self.reader.first_place, depth, width=1)
        hidden = self.reader.read(seen)  # [R, H]
        tokens = seen.new_past_lens.new_empty(depth, hidden.shape[0])  # [K, R]
        for step in range(depth):
            if step > 0:
                # Each step attends to everything before it, earlier drafts included.
                positions = ahead.positions[step - 1]  # [R, 1]
                metadata = pages.uniform(positions, positions[:, 0], ahead.slots[step - 1])
                hidden = self.reader.step(tokens[step - 1], hidden, metadata)
            logits = self.reader.logits(hidden)[:, None]  # [R, 1, Vd]
            place = ahead.next_positions[step]  # [R, 1]
            pick(logits, place, self.reader.target_ids, seen.sampling, seen.features, out=tokens[step, :, None])
            if seen.forced is not None:  # what a grammar leaves no choice about is taken as given
                tokens[step].copy_(torch.where(seen.forced[:, step] >= 0, seen.forced[:, step], tokens[step]))
        return Drafts(tokens.T, depth, None)
