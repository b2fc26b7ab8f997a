"""How likely drafts are, for plans that are made before the drafts are known: by depth alone, of many rows at once."""

from collections.abc import Sequence

import numpy as np

from peregrine.spec.odds import FIRST_GUESS, HOPE, MEMORY, MOST, PRIOR, TENTHS, Floats, Ints


class DepthOdds:
    """The odds of many rows at once, by depth alone: for plans that are made before the drafts are known.

    A request's own verdicts count beside the engine's mean, which stands for PRIOR of them. Its line is found by its
    id. After LINES further requests it shares the line with another one, which may cost speed.
    """

    LINES = 4096
    PRIOR, MEMORY, RESTED = 3.0, 0.98, 0.993  # what is kept of a request's verdicts in a round with drafts, and without

    def __init__(self, depth: int) -> None:
        self.right = np.full((2, depth), FIRST_GUESS * PRIOR)  # by whether requests are sampled, and depth
        self.tried = np.full((2, depth), PRIOR)
        self._owner = np.full(self.LINES, -1)
        self._own = np.zeros((2, self.LINES, depth))  # right, tried
        self._tenths = np.zeros((3, TENTHS))  # drafts, their chances, and how many were right
        self._order = np.arange(depth)

    def lines(self, ids: Sequence[int]) -> Ints:
        """The lines of these requests; new ones start afresh."""
        wanted = np.array(ids)
        lines = wanted % self.LINES
        new = self._owner[lines] != wanted
        self._owner[lines[new]] = wanted[new]
        self._begin(lines[new])
        return lines

    def _begin(self, lines: Ints) -> None:
        """These lines are new requests'."""
        self._own[:, lines] = 0.0

    def chances(self, lines: Ints, sampled: Ints, hope: bool) -> Floats:
        """The chance of each draft if those before it are right: [R, K]; with hope, higher while few were tried."""
        mean = self.right / self.tried
        if hope:
            mean += HOPE / np.sqrt(self.tried)
        right, tried = self._own[:, lines]
        found: Floats = np.minimum((right + self.PRIOR * mean[sampled]) / (tried + self.PRIOR), MOST)
        return found

    def learn(self, lines: Ints, sampled: Ints, verified: Ints, correct: Ints, ended: Ints) -> None:
        """Take in rounds of the same rows: [n, R] drafts verified, drafts right, and 1 where a row ended.

        A draft after the first wrong one has no verdict, nor has the first one that a row did not take at its end.
        """
        known = np.minimum(verified, correct + 1 - ended)
        depth, rows = len(self._order), known.shape[1]
        first = np.arange(rows) * (depth + 1)
        # By number of right (or tried) drafts: how many rounds of a row have it; then, by depth, how many have more.
        deep = np.stack((np.minimum(known, correct), known)) + first  # [2, n, R]
        counts = np.stack([np.bincount(line.ravel(), minlength=rows * (depth + 1)) for line in deep])
        more = counts.reshape(2, rows, depth + 1)[:, :, :0:-1].cumsum(axis=2)[:, :, ::-1]
        sums: Floats = more.astype(np.float64)  # [2, R, K]
        self._note(self.chances(lines, sampled, hope=False), sums)
        drafting = (known > 0).sum(axis=0)
        kept = self.MEMORY**drafting * self.RESTED ** (len(known) - drafting)
        self._own[:, lines] = self._own[:, lines] * kept[:, None] + sums
        for kind in (0, 1):
            right, count = sums[:, sampled == kind].sum(axis=1)
            self.right[kind] += right
            self.tried[kind] += count
        old = self.tried > MEMORY
        self.right[old] /= 2
        self.tried[old] /= 2

    def _note(self, chances: Floats, sums: Floats) -> None:
        """Compare the chances of drafts with how many were right."""
        place = np.minimum((chances * TENTHS).astype(np.int64), TENTHS - 1).ravel()
        right, tried = sums
        for line, weights in zip(self._tenths, (tried, chances * tried, right), strict=True):
            line += np.bincount(place, weights.ravel(), TENTHS)

    @property
    def calibration_error(self) -> float:
        """The mean distance between the chance that was expected and the share that was right, over tenths."""
        count, said, right = self._tenths
        return float(np.abs(said - right).sum() / max(1.0, count.sum()))
