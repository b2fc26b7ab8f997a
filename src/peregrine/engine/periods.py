"""How rounds of one number of drafts compare with those of another, by the clock, with all the host does between them.

The table of costs is timed part by part when the engine starts, and is some percent off. The time of a round also grows
with the texts, and changes with the machine. So rounds are compared where their number of drafts changes while the same
requests go on: the last ones before with the first ones after.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from peregrine.spec.odds import Floats

# Rounds on each side of a change: with more the machine's speed changes between them, and texts grow; the least.
COMPARED, LEAST = 9, 5
CHANGES = 32  # of which the median is taken: up and down, so that growing texts cancel
TABLE_OFF = 0.1  # by what share each of the table's steps from one size to the next may be off
# The same of one comparison: what counts for so many of them before there are others, and the least.
NOISE, FEW, LEAST_NOISE = 0.07, 2, 0.005
SIGNS = np.array((-1.0, 1.0))  # of the two entries of a difference
MIDDLE = 0.6745  # half of all errors are smaller than so many standard deviations

Size = tuple[int, int]  # rows, drafts of each
Pair = tuple[int, int, int]  # rows, drafts, more drafts


class Fit(NamedTuple):
    """Milliseconds of sizes, and how sure they are."""

    times: list[float]
    spread: Floats  # the covariance of their logarithms; the first one's is 0

    def doubt(self, one: int, other: int) -> float:
        """By what share it may be off how many times as long one takes as another: a standard deviation."""
        spread = self.spread
        return math.sqrt(max(0.0, spread[one, one] + spread[other, other] - 2 * spread[one, other]))


class Periods:
    """Times of rounds that repeat a plan, and what they say of its number of drafts."""

    def __init__(self) -> None:
        self._ratios: dict[Pair, deque[float]] = {}  # how many times as long rounds with more drafts take
        self._compared: dict[tuple[int, int], Compared] = {}  # the same of so many rows, for tables of so many entries
        self._size: Size | None = None  # of the rounds that are noted now
        self._before: float | None = None  # milliseconds of the last rounds of `_from`, just before them
        self._from = 0  # drafts
        self._now: list[float] = []  # milliseconds
        self._there: Pair | None = None  # what the rounds before were compared for, with those before them

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
            self._there = None
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
        if self._there == pair:  # there and back again: the rounds between are compared with those on both sides
            changes[-1], self._there = math.sqrt(ratio * changes[-1]), None
        else:
            changes.append(ratio)
            self._there = pair
        self._before = None
        self._compared.clear()

    def fit(self, rows: int, table: Sequence[float]) -> Fit:
        """Rounds with no draft, one, two and so on, where the table says so much.

        Where more drafts seemed to take less time, something else was slow, and nothing was compared.
        """
        size = rows, len(table)
        if size not in self._compared:
            compared = dict[tuple[int, int], list[float]]()
            for (count, fewer, more), ratios in self._ratios.items():
                if count == rows and more < len(table) and (likely := [ratio for ratio in ratios if ratio >= 1]):
                    compared[fewer, more] = likely
            self._compared[size] = Compared(compared, len(table))
        return self._compared[size].fit(table)

    def num_changes(self, rows: int, fewer: int, more: int) -> int:
        """How often they were compared, up to CHANGES."""
        return len(self._ratios.get((rows, fewer, more), ()))


class Compared:
    """What was compared of a table of `count` times: how many times as long one entry takes as one before it.

    The first entry is the table's. The others fit the table's steps from one entry to the next and all comparisons, by
    least squares of logarithms: each counts for the more, the surer it is. So the logarithms of a fit are those of the
    table times a matrix, and an offset, which depend on nothing but what was compared.
    """

    def __init__(self, ratios: Mapping[tuple[int, int], Sequence[float]], count: int) -> None:
        steps, sums, sides = np.zeros((count, count)), np.zeros((count, count)), np.zeros(count)
        for more in range(1, count):
            add_difference(steps, more - 1, more, TABLE_OFF**-2)
        noise = noise_of(ratios.values())
        for (fewer, more), found in ratios.items():
            weight = len(found) / noise**2
            add_difference(sums, fewer, more, weight)
            sides[[fewer, more]] += weight * math.log(median(found)) * SIGNS
        self._spread = np.zeros_like(sums)
        self._spread[1:, 1:] = np.linalg.inv((steps + sums)[1:, 1:])
        self._of_table, self._more = self._spread @ steps, self._spread @ sides

    def fit(self, table: Sequence[float]) -> Fit:
        """Such a table, corrected."""
        logs = np.log(table)
        times: list[float] = np.exp(logs[0] + self._of_table @ (logs - logs[0]) + self._more).tolist()
        return Fit(times, self._spread)


def add_difference(sums: Floats, one: int, other: int, weight: float) -> None:
    """Add the square of the difference of two entries, times a weight, to a quadratic form."""
    for row, col, sign in ((one, one, 1), (other, other, 1), (one, other, -1), (other, one, -1)):
        sums[row, col] += sign * weight


def noise_of(compared: Iterable[Sequence[float]]) -> float:
    """The standard deviation of one comparison, of logarithms: a few that something disturbed hardly move it."""
    errors = [MIDDLE * NOISE] * FEW
    for ratios in compared:
        if len(ratios) > 1:
            logs, freedom = [math.log(ratio) for ratio in ratios], math.sqrt(len(ratios) / (len(ratios) - 1))
            usual = median(logs)
            errors += [freedom * abs(value - usual) for value in logs]
    return max(LEAST_NOISE, median(errors) / MIDDLE)
