"""How rounds of one number of drafts compare with those of another, by the clock, with all the host does between them.

The table of costs is timed part by part when the engine starts, and is some percent off. The time of a round also grows
with the texts, and changes with the machine. So rounds are compared where their number of drafts changes while the same
requests go on: the last ones before with the first ones after.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

COMPARED, LEAST = 15, 5  # rounds on each side of a change; at least so many
CHANGES = 8  # of which the median is taken: up and down, so that growing texts cancel
TABLE = 0.5  # changes that each of the table's steps counts for: of a single change, rounds may be slow by chance
UNSURE = 1.1  # times what a change said, if the one back says so much, neither counts: the machine's speed has changed

Size = tuple[int, int]  # rows, drafts of each
Pair = tuple[int, int, int]  # rows, drafts, more drafts


class Periods:
    """Times of rounds that repeat a plan, and what they say of its number of drafts."""

    def __init__(self) -> None:
        self._ratios: dict[Pair, deque[float]] = {}  # how many times as long rounds with more drafts take
        self._size: Size | None = None  # of the rounds that are noted now
        self._before: float | None = None  # milliseconds of the last rounds of `_from`, just before them
        self._from = 0  # drafts
        self._now: list[float] = []  # milliseconds
        self._last: Pair | None = None  # what the rounds before were compared for, with those before them

    def note(self, ms: float) -> None:
        """Take in one round of the present size."""
        self._now.append(ms)

    def begin(self, size: Size | None, goes_on: bool) -> None:
        """The rounds from now on have this size; None: no one number of drafts. `goes_on`: requests are the same."""
        if goes_on and size is not None and size == self._size:
            return
        self.compare()
        ended, noted = self._size, self._now
        compares = goes_on and ended is not None and len(noted) >= LEAST
        if self._before is not None or not compares:
            self._last = None
        self._before, self._from = (median(noted[-COMPARED:]), ended[1]) if compares and ended else (None, 0)
        self._size, self._now = size, []

    def compare(self) -> None:
        """Compare the rounds of the present size with those just before them; once, when there are enough."""
        if self._size is None or self._before is None or len(self._now) < LEAST:
            return
        (rows, drafts), ratio = self._size, median(self._now[:COMPARED]) / self._before
        fewer, more = sorted((self._from, drafts))
        pair, ratio = (rows, fewer, more), ratio if drafts == more else 1 / ratio
        changes = self._ratios.setdefault(pair, deque(maxlen=CHANGES))
        back = changes[-1] if changes and self._last == pair else ratio
        if ratio >= 1 and max(ratio, back) < UNSURE * min(ratio, back):
            changes.append(ratio)
            self._last = pair
        else:  # the machine's speed has changed meanwhile
            if self._last == pair:
                changes.pop()
            self._last = None
        self._before = None

    def times(self, rows: int, table: Sequence[float]) -> list[float]:
        """Milliseconds of rounds with no draft, one, two and so on, where the table says so much."""
        of_rows = (kept for kept in self._ratios.items() if kept[0][0] == rows and kept[0][2] < len(table))
        return fitted(table, {(fewer, more): ratios for (_, fewer, more), ratios in of_rows if ratios})

    def num_changes(self, rows: int, fewer: int, more: int) -> int:
        """How often they were compared, up to CHANGES."""
        return len(self._ratios.get((rows, fewer, more), ()))


def fitted(table: Sequence[float], compared: Mapping[tuple[int, int], Sequence[float]]) -> list[float]:
    """A table of times, by what was compared: how many times as long one entry takes as one before it.

    The first entry is the table's. The others fit the table's steps from one entry to the next, and all comparisons,
    each counting as often as it was made.
    """
    if not compared:
        return list(table)
    fits = [((more - 1, more), table[more] / table[more - 1], TABLE) for more in range(1, len(table))]
    for (fewer, more), ratios in compared.items():
        foreseen = [table[more] / table[fewer]] if len(ratios) > 1 else []  # of two the median alone is a mean
        fits.append(((fewer, more), median([*ratios, *foreseen]), len(ratios)))
    size = len(table)
    sums, sides = [[0.0] * size for _ in table], [0.0] * size  # of the least squares, of logarithms
    sums[0][0] = 1.0  # the first is 0
    for (fewer, more), ratio, weight in fits:
        value = weight * math.log(ratio)
        sums[fewer][fewer] += weight
        sums[more][more] += weight
        sums[fewer][more] -= weight
        sums[more][fewer] -= weight
        sides[fewer] -= value
        sides[more] += value
    times: list[float] = (table[0] * np.exp(np.linalg.solve(sums, sides))).tolist()
    return times
