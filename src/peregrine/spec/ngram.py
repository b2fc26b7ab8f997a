"""Guess by looking back: find the last few tokens earlier in the same request and repeat what followed them."""

import torch

from peregrine.spec.types import Chunk, Drafts, DraftShape, Seen

MAX_GRAM = 4  # the longest run of tokens looked for
MIN_GRAM = 2  # a shorter match is no guess


class NgramDrafter:
    """Prompt look-up over a row's own history, on the device."""

    taps: tuple[int, ...] = ()
    reads_next_token = False

    def __init__(self, num_drafts: int) -> None:
        self.shape = DraftShape.chain(num_drafts, 0)

    def absorb(self, chunk: Chunk) -> None:
        """Nothing to keep: the history holds it all."""

    def propose(self, seen: Seen) -> Drafts:
        history, newest = seen.history, seen.new_past_lens[:, None]  # [R, C], [R, 1]
        places = torch.arange(history.shape[1], device=history.device)
        # run[r, p]: how many tokens up to p equal those up to the newest one.
        alive = places < newest
        run = torch.zeros_like(history)
        for back in range(MAX_GRAM):
            wanted = history.gather(1, (newest - back).clamp(min=0))  # [R, 1]
            shifted = history.roll(back, dims=1)  # place p holds the token at p - back
            alive = alive & (shifted == wanted) & (places >= back) & (newest >= back)
            run += alive
        # The longest run wins, then the latest place.
        best, place = (run * history.shape[1] + places).where(run >= MIN_GRAM, -1).max(dim=1, keepdim=True)
        following = place + 1 + torch.arange(self.shape.depth, device=history.device)  # [R, K]
        tokens = history.gather(1, following.clamp(max=history.shape[1] - 1))
        known = (newest - place).clamp(max=self.shape.depth)
        depths = torch.where(best >= 0, known, 0)[:, 0]
        return Drafts(tokens, depths, None)
