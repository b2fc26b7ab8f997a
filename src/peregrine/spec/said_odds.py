"""The odds of many rows at once where the drafter says itself how likely its drafts are, by a confidence head.

What it says is calibrated while it runs, for greedy and sampled requests apart: of drafts of a depth, for which it said
something in a range, how many were right. What it said of a request's last drafts is kept: by that the host judges how
many of the drafts to come, which it has not seen, are worth their time. Which ones these are is the device's choice, by
the same table (`kernels/round/allot.py`).
"""

import numpy as np

from peregrine.spec.depth_odds import DepthOdds
from peregrine.spec.odds import EDGES, MEMORY, MOST, OWN_MEMORY, OWN_PRIOR, PRIOR, Floats, Ints

RECENT = 8  # rounds of a request that are kept
SAMPLES = 64  # rows times rounds that a plan looks at, at least; or all that are kept
BORDERS = np.array(EDGES)
MIDDLES = np.convolve([0.0, *EDGES, 1.0], [0.5, 0.5], "valid")  # of the ranges


class SaidOdds(DepthOdds):
    """`DepthOdds`, with what the drafter said of each draft; where it has said nothing yet, by depth alone."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self._right = np.tile(PRIOR * MIDDLES, (2, depth, 1))  # by whether requests are sampled, depth and range
        self._tried = np.full(self._right.shape, PRIOR)
        self._record = np.zeros((2, self.LINES))  # of a request: drafts right, and how many the table expected
        self._recent = np.zeros((RECENT, self.LINES, depth))  # what was said of a request's last drafts
        self._count = np.zeros(self.LINES, dtype=np.int64)  # rounds of it, since the request last rested

    def _begin(self, lines: Ints) -> None:
        super()._begin(lines)
        self._record[:, lines], self._count[lines] = 0.0, 0

    def table(self, lines: Ints, sampled: Ints) -> Floats:
        """The chance of a draft of each request and depth, by the range of what is said of it: [R, K, ranges]."""
        right, expected = self._record[:, lines] + OWN_PRIOR
        found: Floats = np.minimum((self._right / self._tried)[sampled] * (right / expected)[:, None, None], MOST)
        return found

    def recent(self, lines: Ints, sampled: Ints) -> Floats:
        """Chances of drafts such as each request's last ones, [S, R, K]: of several rounds, if there are few rows."""
        said = self._last(lines, -(-SAMPLES // max(1, len(lines))))
        known = self._count[lines, None] > 0
        return np.where(known, look_up(self.table(lines, sampled), said), self.chances(lines, sampled, hope=True))

    def count_above(self, lines: Ints, threshold: float, unknown: int) -> Ints:
        """Drafts above this threshold of each request in its last rounds: [S, R]; `unknown` of a new one."""
        found = (self._last(lines, RECENT).cumprod(axis=2) >= threshold).sum(axis=2)
        return np.where(self._count[lines] > 0, found, unknown)

    def _last(self, lines: Ints, rounds: int) -> Floats:
        """What was said in the last rounds of each request [S, R, K]; where fewer are known, some of them twice."""
        counts = self._count[lines]
        back = (counts - 1 - np.arange(min(RECENT, rounds))[:, None] % np.clip(counts, 1, RECENT)) % RECENT
        said: Floats = self._recent[back, lines]
        return said

    def _note(self, chances: Floats, sums: Floats) -> None:
        """`hear` compares what was said of each draft instead."""

    def hear(self, lines: Ints, sampled: Ints, judged: tuple[Ints, Ints, Ints], said: Floats, made: list[bool]) -> None:
        """Take in rounds of the same rows: drafts verified, right, and ends [n, R] each, as `learn` does.

        said [n, R, K] is what the drafter said of the drafts, in rounds that had any made [n].
        """
        verified, correct, ended = judged
        self.learn(lines, sampled, verified, correct, ended)
        known = np.minimum(verified, correct + 1 - ended)[:, :, None] > self._order  # [n, R, K] drafts with a verdict
        right = known & (correct[:, :, None] > self._order)
        places = np.searchsorted(BORDERS, said, side="right")
        super()._note(look_up(self.table(lines, sampled), said), np.stack((right, known)).astype(np.float64))
        expected = np.where(known, look_up(self._right[sampled] / self._tried[sampled], said), 0.0)
        ranges, depth = len(MIDDLES), len(self._order)
        flat = ((sampled[:, None] * depth + self._order) * ranges + places).ravel()
        for counts, weights in ((self._right, right), (self._tried, known)):
            counts += np.bincount(flat, weights.ravel(), counts.size).reshape(counts.shape)
        old = self._tried > MEMORY
        self._right[old] /= 2
        self._tried[old] /= 2
        kept = OWN_MEMORY ** len(said)
        sums = np.stack((right.sum(axis=(0, 2)), expected.sum(axis=(0, 2))))
        self._record[:, lines] = self._record[:, lines] * kept + sums
        for drafted, line in zip(made, said, strict=True):
            if not drafted:
                self._count[lines] = 0
                continue
            new = line[:, 0] > 0  # a request in its first round has no drafts
            counts = self._count[lines[new]]
            self._recent[counts % RECENT, lines[new]] = line[new]
            self._count[lines[new]] = counts + 1


def look_up(table: Floats, said: Floats) -> Floats:
    """The entry of each draft in a table [R, K, ranges], by what was said of it: [S, R, K] -> [S, R, K]."""
    places = np.searchsorted(BORDERS, said, side="right")
    rows, depth = np.ogrid[: said.shape[1], : said.shape[2]]
    found: Floats = table[rows, depth, places]
    return found
