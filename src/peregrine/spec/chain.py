"""Draft one token after another: a chain of K drafts."""

import torch
from torch import Tensor

from peregrine.kernels.round import AheadPlaces
from peregrine.kernels.sampling import pick, top_chances
from peregrine.spec.readers import DraftReader
from peregrine.spec.types import Chunk, Drafts, DraftShape, Seen
from peregrine.spec.windows import Plan


class ChainDrafter:
    """Drives a reader: absorb the path, pick, step over the pick, pick again."""

    def __init__(self, reader: DraftReader, num_drafts: int) -> None:
        self.reader = reader
        self.taps = reader.taps
        self.reads_next_token = reader.reads_next_token
        self.shape = DraftShape.chain(num_drafts, num_drafts - 1 + reader.first_place)
        self.depths = tuple(range(num_drafts + 1))

    def absorb(self, chunk: Chunk) -> None:
        self.reader.absorb(chunk)

    def propose(self, seen: Seen) -> Drafts:
        if seen.plan is not None:
            return self._propose_planned(seen, seen.plan)
        return self.draft(seen, self.read(seen), seen.depth)

    def read(self, seen: Seen) -> Tensor:
        return self.reader.read(seen)

    def draft(self, seen: Seen, hidden: Tensor | None, depth: int) -> Drafts:
        assert hidden is not None
        ahead = self._ahead(seen, depth)
        tokens = seen.new_past_lens.new_empty(depth, hidden.shape[0])  # [K, R]
        for step in range(depth):
            if step > 0:
                hidden = self._step(seen, ahead, step, tokens[step - 1], hidden)
            self._pick(seen, ahead, step, hidden, tokens[step])
        return Drafts(tokens.T, depth, None)

    def _propose_planned(self, seen: Seen, plan: Plan) -> Drafts:
        """As deep for each row as the plan asks for, step by step; a step runs for the rows that go on."""
        tokens = seen.new_past_lens.new_zeros(self.shape.depth, len(seen.past_lens))  # [K, R]
        hidden = self.reader.read(seen)  # [n, H]
        if len(hidden):
            some, rows = seen.drafted(), plan.rows
            ahead = self._ahead(some, self.shape.depth)
            for step in range(self.shape.depth):
                picked = tokens[step] if rows is None else tokens.new_empty(len(hidden))
                plan.add(top_chances(self._pick(some, ahead, step, hidden, picked)[:, 0]))
                if rows is not None:
                    tokens[step].index_copy_(0, rows, picked)
                kept = plan.go_on()
                if kept is not None:
                    if not len(kept):
                        break
                    some, ahead = some.only(kept), only(ahead, kept)
                    hidden, picked = hidden.index_select(0, kept), picked.index_select(0, kept)
                    rows = kept if rows is None else rows.index_select(0, kept)
                hidden = self._step(some, ahead, step + 1, picked, hidden)
        return Drafts(tokens.T, plan.depths(), None)

    def _ahead(self, seen: Seen, depth: int) -> AheadPlaces:
        return seen.pages.ahead(seen.new_past_lens, self.reader.first_place, depth, width=1)

    def _step(self, seen: Seen, ahead: AheadPlaces, step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Read the drafts before this step; it attends to everything before it, earlier drafts included."""
        positions = ahead.positions[step - 1]  # [R, 1]
        metadata = seen.pages.uniform(positions, positions[:, 0], ahead.slots[step - 1])
        return self.reader.step(tokens, hidden, metadata)

    def _pick(self, seen: Seen, ahead: AheadPlaces, step: int, hidden: Tensor, out: Tensor) -> Tensor:
        """Pick the drafts of a step into `out` [R]; returns their scores [R, 1, Vd]."""
        logits = self.reader.logits(hidden)[:, None]
        place = ahead.next_positions[step]  # [R, 1]
        pick(logits, place, self.reader.target_ids, seen.sampling, seen.features, out=out[:, None])
        if seen.forced is not None:  # what a grammar leaves no choice about is taken as given
            out.copy_(torch.where(seen.forced[:, step] >= 0, seen.forced[:, step], out))
        return logits


def only(ahead: AheadPlaces, rows: Tensor) -> AheadPlaces:
    """The places of some rows [n] of a chain."""
    lines = (x.index_select(1, rows) for x in (ahead.positions, ahead.slots, ahead.next_positions))
    return AheadPlaces(ahead.base_lens.index_select(0, rows), *lines)
