"""Plans for rounds on a GPU, which are queued before the last verdict is known.

A round of R rows verifies N tokens in all. CUDA graphs are recorded for a few values of N (sizes); which rows the
tokens belong to is data on the device. The planner takes the size N and the depth of the next drafts that give the most
expected tokens per millisecond, then fills N with the newest token of every row and the N - R likeliest drafts.
Everything here is a pure function of values that the host has.
"""

import math
from dataclasses import dataclass

import numpy as np

from peregrine.spec.odds import Floats, Ints

# Tokens per row of the recorded sizes, by the number of rows from which they are used. With many rows every token
# costs, so sizes lie closer together, and long windows never pay.
SHARES = {1: (1, 2, 3, 4, 6, 9), 4: (1, 1.5, 2, 2.5, 3, 4, 6, 9), 32: (1, 1.25, 1.5, 2, 2.5, 3, 4)}
MAX_SHARE = 4  # the most tokens per row with many rows
MARGIN = 0.01  # a choice is changed if another is better by more than this share


def token_sizes(rows: int, depth: int) -> tuple[int, ...]:
    """The sizes recorded for this number of rows, if windows have at most `depth` drafts."""
    shares = SHARES[max(least for least in SHARES if least <= rows)]
    return tuple(sorted({math.ceil(rows * min(share, depth + 1)) for share in shares}))


def window_width(rows: int, tokens: int, depth: int) -> int:
    """The longest window that a size allows: about twice the mean, so that rows may differ."""
    return 1 if tokens == rows else min(depth + 1, 2 * -(-tokens // rows))


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Milliseconds of the parts of a round of R rows, for each recorded size and depth."""

    sizes: tuple[int, ...]  # tokens in all windows, R first
    verify: tuple[float, ...]  # by size: all but the drafter, with an empty KV cache
    absorb: tuple[float, ...]  # by size: the drafter reads what was verified, in a round that does not draft
    read: tuple[float, ...]  # by size: the same in a round that drafts
    depths: tuple[int, ...]  # of drafts, 0 first
    draft: tuple[float, ...]  # by depth: the drafter's steps
    key_ms: float  # to add to `verify` for each cached token of each row

    def round_ms(self, keys: int) -> Floats:
        """Milliseconds of whole rounds [depths, sizes], if all rows have `keys` cached tokens together.

        inf at depth 0 for sizes above R: rounds that never draft have nothing more to verify.
        """
        read = np.array([self.absorb, *[self.read] * (len(self.depths) - 1)])
        total: Floats = np.array(self.verify) + self.key_ms * keys + read + np.array(self.draft)[:, None]
        total[0, 1:] = np.inf
        return total


@dataclass(frozen=True, slots=True)
class Choice:
    """A size and a depth, with what rounds give if all of them use these."""

    tokens: int
    depth: int
    rate: float  # expected tokens per millisecond
    ms: float  # of a round


def gains(survivals: Floats, depths: Ints, sizes: Ints) -> Floats:
    """How many drafts are expected to be accepted, if the likeliest fill a size. [R, K] -> [depths, sizes]

    survivals[r, d] is the chance that the draft of row r at depth d is accepted; it falls with d. Of several rounds
    [S, R, K] the mean: the likeliest of each fill it.
    """
    *_, rows, most = survivals.shape
    kept = np.where(np.arange(most) < depths[:, None, None, None], survivals, 0.0).reshape(len(depths), -1, rows * most)
    kept.sort(axis=2)
    totals = np.zeros((len(depths), kept.shape[1], rows * most + 1))
    np.cumsum(kept[:, :, ::-1], axis=2, out=totals[:, :, 1:])
    taken: Floats = totals[:, :, np.minimum(sizes - rows, rows * most)].mean(axis=1)
    return taken


def choose_size(costs: RowCosts, survivals: Floats, live: int, keys: int, before: Choice | None = None) -> Choice:
    """The size and depth with the highest rate. survivals: as for `gains`; all rows but `live` are padding.

    The choice before is kept if its rate is within MARGIN of the best and not below that of plain decoding: learnt
    odds always move a little, and each change of depth costs a round whose drafts do not fit.
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
    """The size for a round whose drafts have this depth: time for drafts must give at least `rate` tokens per ms."""
    sizes = np.array(costs.sizes)
    won = gains(survivals, np.array([depth]), sizes)[0] - rate * (np.array(costs.verify) + np.array(costs.read))
    return costs.sizes[int(won.argmax())]


def allot(survivals: Floats, depth: int, tokens: int, width: int) -> list[int]:
    """The length of each row's window: `tokens` in all, at most `width` in one. The likeliest drafts are taken.

    Drafts exist down to `depth`. If they do not fill the size, windows are made longer than that.
    """
    rows = len(survivals)
    if tokens == rows:
        return [1] * rows
    chances = np.zeros((rows, width - 1))
    known = min(depth, width - 1, survivals.shape[1])
    chances[:, :known] = survivals[:, :known]
    chosen = np.argsort(-chances, axis=None, kind="stable")[: tokens - rows]
    return list(map(int, 1 + np.bincount(chosen // (width - 1), minlength=rows)))
