"""Draft by look-up in the request's own text and in answers that the engine has finished."""

import torch
from torch import Tensor

from peregrine.hardware import upload
from peregrine.kernels.round import AnswerPool, add_answer, find_answers, find_repeats
from peregrine.spec.types import Chunk, Drafts, DraftShape, Seen

POOL_TOKENS = 1 << 17  # 5 MiB with the index
LONG_MATCH = 6  # equal tokens from which a match in another answer counts more than a short one in the own text


class SuffixDrafter:
    """Continues the latest tokens as they were continued before: in this text, or in an earlier answer.

    It pays where answers repeat: JSON of one form, edits of a file, an agent's loop.
    """

    taps: tuple[int, ...] = ()
    reads_next_token = False

    def __init__(self, num_drafts: int, device: torch.device) -> None:
        self.shape, self.depths = DraftShape.chain(num_drafts, 0), (0, num_drafts)
        self.pool = AnswerPool.empty(POOL_TOKENS, device)
        self._next = 0  # where the next answer goes

    def absorb(self, chunk: Chunk) -> None:
        """Nothing to keep: the history holds it all."""

    def learn(self, answer: list[int]) -> None:
        """Add a finished answer to the pool; the oldest ones are overwritten."""
        answer = answer[: POOL_TOKENS // 4]
        if self._next + len(answer) + 1 > POOL_TOKENS:
            self._next = 0
        add_answer(self.pool, upload(answer, self.pool.tokens.device), self._next)
        self._next += len(answer) + 1

    def forget(self) -> None:
        """Empty the pool, in its place: recorded rounds read it there."""
        self.pool.clear()
        self._next = 0

    def propose(self, seen: Seen) -> Drafts:
        return self.draft(seen, None, seen.depth)

    def read(self, seen: Seen) -> None:
        """Nothing to keep here either."""

    def draft(self, seen: Seen, hidden: Tensor | None, depth: int) -> Drafts:
        history, newest = seen.history, seen.new_past_lens
        own, own_known = find_repeats(history, newest, depth)
        others, known, agreed = find_answers(self.pool, history, newest, depth)
        takes_other = (known > 0) & ((own_known == 0) | (agreed >= LONG_MATCH))  # [R]
        tokens = torch.where(takes_other[:, None], others, own)
        return Drafts(tokens, torch.where(takes_other, known, own_known), None)
