"""A pool of finished answers on the device, with an index of their runs of three tokens.

The pool is a ring of tokens in which answers end with END. The index maps the hash of a run to the last few places
where such a run ends. What a place says is always checked against the tokens that lie there, so the index may point at
answers that have been overwritten since, and hashes may collide: that costs a draft, never a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

END = -1
GRAM = 3  # tokens of an indexed run
WAYS = 4  # places kept for a run, the latest first
MAX_MATCH = 16  # tokens that are compared
_FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)


@dataclass(frozen=True, slots=True)
class AnswerPool:
    """The buffers; written by `add_answer`, read by `find_answers`."""

    tokens: Tensor  # [P] i64
    index: Tensor  # [B, WAYS] i64 places in `tokens` where a run of this hash ends; -1: none

    @staticmethod
    def empty(size: int, device: torch.device | str) -> "AnswerPool":
        """A pool of `size` tokens, a power of two."""
        tokens = torch.full((size,), END, device=device)
        return AnswerPool(tokens, torch.full((size, WAYS), -1, device=device))

    def clear(self) -> None:
        """Forget all answers."""
        self.tokens.fill_(END)
        self.index.fill_(-1)


def add_answer(pool: AnswerPool, answer: Tensor, start: int) -> None:
    """Write an answer [n] i64 and its end at places from `start` on; the room must be there."""
    count = answer.shape[0]
    pool.tokens[start : start + count].copy_(answer)
    pool.tokens[start + count] = END
    if count < GRAM:
        return
    runs = torch.stack([answer[i : count - GRAM + 1 + i] for i in range(GRAM)], dim=1)  # [n - 2, GRAM]
    keys = _keys(runs, pool)
    ends = torch.arange(start + GRAM - 1, start + count, device=answer.device)
    # Of runs with one hash in one answer one place is kept, whichever the device writes last.
    pool.index[keys] = torch.cat((ends[:, None], pool.index[keys][:, :-1]), dim=1)


def find_answers(pool: AnswerPool, history: Tensor, newest: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """What followed the tokens up to `newest` [R] of histories [R, C] in earlier answers.

    Returns tokens [R, count] i64, how many of them are text [R], and how many tokens before them agree [R]. The longest
    agreement wins, then the next token that most of the found places share, then the latest place.
    """
    device, size = history.device, pool.tokens.shape[0]
    back = torch.arange(MAX_MATCH, device=device)
    places = newest[:, None] - back  # [R, M]
    tail = history.gather(1, places.clamp(min=0)).where(places >= 0, END - 1)
    found = pool.index[_keys(tail[:, :GRAM].flip(1), pool)]  # [R, WAYS]
    lies = found[:, :, None] - back  # [R, WAYS, M]
    same = (pool.tokens[lies.clamp(min=0)] == tail[:, None]) & (lies >= 0) & (found[:, :, None] >= 0)
    agrees = same.long().cumprod(dim=2).sum(dim=2)  # [R, WAYS]
    agrees = agrees.where(agrees >= GRAM, 0)
    ahead = found[:, :, None] + 1 + torch.arange(count, device=device)  # [R, WAYS, count]
    following = pool.tokens[ahead.clamp(min=0, max=size - 1)].where(ahead < size, END)
    votes = ((following[:, :, None, 0] == following[:, None, :, 0]) & (agrees > 0)[:, None]).sum(dim=2)  # [R, WAYS]
    best = ((agrees * (WAYS + 1) + votes) * WAYS - torch.arange(WAYS, device=device)).argmax(dim=1, keepdim=True)
    chosen = following.gather(1, best[:, :, None].expand(-1, -1, count))[:, 0]  # [R, count]
    agreed = agrees.gather(1, best)[:, 0]
    known = (chosen >= 0).long().cumprod(dim=1).sum(dim=1).where(agreed > 0, 0)
    return chosen.clamp(min=0), known, agreed


def _keys(runs: Tensor, pool: AnswerPool) -> Tensor:
    """The index's line for runs of tokens [n, GRAM] -> [n]."""
    total = sum(runs[:, i] * factor for i, factor in enumerate(_FACTORS))
    assert isinstance(total, Tensor)
    return (total ^ (total >> 15)) & (pool.index.shape[0] - 1)
