"""No drafts: plain decoding is a round whose window is the newest token alone."""

from peregrine.spec.types import Chunk, Drafts, DraftShape, Seen


class NoDrafter:
    """Proposes nothing."""

    taps: tuple[int, ...] = ()
    reads_next_token = False
    shape = DraftShape.chain(0, 0)

    def absorb(self, chunk: Chunk) -> None:
        """Nothing to keep."""

    def propose(self, seen: Seen) -> Drafts:
        return Drafts(seen.history[:, :0], 0, None)
