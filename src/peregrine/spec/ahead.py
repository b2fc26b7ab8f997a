"""Plans for rounds that are queued before the last verdict is known, in sizes that were recorded.

A round of R rows reads N tokens in all, one of a few sizes that are recorded; which rows they belong to is data. N and
the depth of the next drafts are those with the most expected tokens per millisecond; then the N - R likeliest drafts
are read, so a size is always filled. Everything here is a pure function of values that the host has.
"""

import math
from dataclasses import dataclass

import numpy as np

from peregrine.spec.odds import Floats, Ints

# Tokens per row of the sizes that are recorded, by the least number of rows they are for. With many rows every token
# costs, so sizes lie closer together and long windows never pay.
SHARES = {1: (1, 2, 3, 4, 6, 9), 4: (1, 1.5, 2, 2.5, 3, 4, 6, 9), 32: (1, 1.25, 1.5, 2, 2.5, 3, 4)}
MAX_SHARE = 4  # with many rows
MARGIN = 0.01  # of the best rate, for which a choice is not changed


def token_sizes(rows: int, depth: int) -> tuple[int, ...]:
    """The recorded numbers of tokens of a round of so many rows, whose windows hold up to `depth` drafts."""
    shares = SHARES[max(least for least in SHARES if least <= rows)]
    return tuple(sorted({math.ceil(rows * min(share, depth + 1)) for share in shares}))


def window_width(rows: int, tokens: int, depth: int) -> int:
    """The longest window of a recorded size: about twice the mean, so that rows may differ."""
    return 1 if tokens == rows else min(depth + 1, 2 * -(-tokens // rows))


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Milliseconds of the parts of a round of R rows, in the sizes that are recorded."""

    sizes: tuple[int, ...]  # tokens in all windows, R first
    verify: tuple[float, ...]  # by size: everything but the drafter, without what cached tokens cost
    absorb: tuple[float, ...]  # by size: the drafter reads what was verified
    read: tuple[float, ...]  # by size: and is ready to draft
    depths: tuple[int, ...]  # of drafts, 0 first
    draft: tuple[float, ...]  # by depth
    key_ms: float  # for each cached token of all rows

    def round_ms(self, keys: int) -> Floats:
        """[depths, sizes] of whole rounds, with so many cached tokens; inf where there is nothing to verify."""
        read = np.array([self.absorb, *[self.read] * (len(self.depths) - 1)])
        total: Floats = np.array(self.verify) + self.key_ms * keys + read + np.array(self.draft)[:, None]
        total[0, 1:] = np.inf
        return total


@dataclass(frozen=True, slots=True)
class Choice:
    """The size and depth with which rounds that are all alike give the most tokens per millisecond."""

    tokens: int
    depth: int
    rate: float  # tokens per millisecond
    ms: float


def gains(survivals: Floats, depths: Ints, sizes: Ints) -> Floats:
    """Tokens that drafts are expected to add, by depth and size: the likeliest are read. [R, K] -> [depths, sizes]

    survivals[r, d] is the chance that the draft of row r at depth d is accepted; it falls with d.
    """
    rows, most = survivals.shape
    kept = np.where(np.arange(most) < depths[:, None, None], survivals, 0.0).reshape(len(depths), rows * most)
    kept.sort(axis=1)
    totals = np.zeros((len(depths), rows * most + 1))
    np.cumsum(kept[:, ::-1], axis=1, out=totals[:, 1:])
    taken: Floats = totals[:, np.minimum(sizes - rows, rows * most)]
    return taken


def choose_size(costs: RowCosts, survivals: Floats, live: int, keys: int, before: Choice | None = None) -> Choice:
    """The size and depth with the highest rate; survivals are [R, K], of which `live` rows are no pads.

    The choice before stays if its rate is as good but for a hundredth, and no worse than plain decoding's:
    odds that are learnt are never quite the same, and every change costs a round between two depths.
    """
    depths, sizes = np.array(costs.depths), np.array(costs.sizes)
    ms = costs.round_ms(keys)
    rates = (live + gains(survivals, depths, sizes)) / ms
    depth, size = divmod(int(rates.argmax()), len(sizes))
    if before is not None and before.tokens in costs.sizes and before.depth in costs.depths:
        kept = costs.depths.index(before.depth), costs.sizes.index(before.tokens)
        if rates[kept] >= max(rates[depth, size] * (1 - MARGIN), rates[0, 0]):
            depth, size = kept
    return Choice(costs.sizes[size], costs.depths[depth], float(rates[depth, size]), float(ms[depth, size]))


def size_of_drafts(costs: RowCosts, survivals: Floats, depth: int, rate: float) -> int:
    """How many tokens to read now, if drafts of this depth were made already: what pays at this rate."""
    sizes = np.array(costs.sizes)
    won = gains(survivals, np.array([depth]), sizes)[0] - rate * (np.array(costs.verify) + np.array(costs.read))
    return costs.sizes[int(won.argmax())]


def allot(survivals: Floats, depth: int, tokens: int, width: int) -> list[int]:
    """Tokens of each row's window, `tokens` in all and at most `width` in one: the likeliest drafts are taken.

    There are drafts down to `depth`; places past them are taken last, to fill the size.
    """
    rows = len(survivals)
    if tokens == rows:
        return [1] * rows
    chances = np.zeros((rows, width - 1))
    known = min(depth, width - 1, survivals.shape[1])
    chances[:, :known] = survivals[:, :known]
    chosen = np.argsort(-chances, axis=None, kind="stable")[: tokens - rows]
    return list(map(int, 1 + np.bincount(chosen // (width - 1), minlength=rows)))
