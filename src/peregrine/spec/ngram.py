"""Draft by look-up: find the last few tokens earlier in the same request and repeat what followed them."""

from torch import Tensor

from peregrine.kernels.round import find_repeats
from peregrine.spec.types import Chunk, Drafts, DraftShape, Seen


class NgramDrafter:
    """Prompt look-up over a row's own history, on the device."""

    taps: tuple[int, ...] = ()
    reads_next_token = False

    def __init__(self, num_drafts: int) -> None:
        self.shape, self.depths = DraftShape.chain(num_drafts, 0), (0, num_drafts)

    def absorb(self, chunk: Chunk) -> None:
        """Nothing to keep: the history holds it all."""

    def propose(self, seen: Seen) -> Drafts:
        return self.draft(seen, None, seen.depth)

    def read(self, seen: Seen) -> None:
        """Nothing to keep here either."""

    def draft(self, seen: Seen, hidden: Tensor | None, depth: int) -> Drafts:
        tokens, known = find_repeats(seen.history, seen.new_past_lens, depth)
        return Drafts(tokens, known, None)
