"""How likely drafts are, learnt from verdicts: by depth and by the drafter's own probability, and per request.

A draft's chance is that it is right if the drafts before it are. The engine counts how often drafts of a depth, and of
a range of the drafter's own probability, were right; so what the drafter says is calibrated while it runs. A request
has one factor: how many of its drafts were right over how many the engine's counts had expected.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # of ranges of the drafter's own probability
DEPTHS = 4  # deeper drafts count as the deepest of these
PRIOR = 4.0  # drafts that the first guess counts for
DEPTH_PRIOR = 128.0  # the same of first drafts, whatever is said of them: a few requests say little of others
FIRST_GUESS = 0.6  # of drafters that say nothing themselves
MEMORY = 500.0  # drafts after which older ones begin to count less
DEPTH_MEMORY = 2000.0  # the same of a depth's, whatever is said of them: texts differ more than what is said tells
ALIKE = 12.0  # drafts for which it counts that those of a depth are as often right as those before them
OWN_PRIOR, OWN_MEMORY = 6.0, 0.97  # of a request's factor: drafts, and what is kept of them each round
MIDDLES = tuple((low + high) / 2 for low, high in pairwise((0.0, *EDGES, 1.0)))
MOST = 0.995
HOPE = 0.3  # added to a mean chance, over the square root of the drafts it is made of
TENTHS = 10


@dataclass(slots=True)
class Count:
    """How many drafts were right, of how many."""

    right: float
    tried: float

    @property
    def chance(self) -> float:
        return self.right / self.tried

    def add(self, right: float, memory: float = MEMORY, tried: float = 1.0) -> None:
        self.right += right
        self.tried += tried
        if self.tried > memory:
            self.right, self.tried = self.right / 2, self.tried / 2


@dataclass(slots=True)
class RequestOdds:
    """A request's own record against what the engine expected of its drafts."""

    expected: float = 0.0
    right: float = 0.0

    @property
    def factor(self) -> float:
        return self.factor_with(OWN_PRIOR)

    def factor_with(self, prior: float) -> float:
        """Where it counts for so many drafts that this request is like others."""
        return (self.right + prior) / (self.expected + prior)

    def fade(self, rounds: int = 1) -> None:
        """Rounds have passed: old verdicts count less, so that a request that rests is tried again."""
        self.expected *= OWN_MEMORY**rounds
        self.right *= OWN_MEMORY**rounds


class Guess(NamedTuple):
    """One draft: what the drafter said of it, and its chance."""

    depth: int
    said: float | None  # the drafter's own probability
    chance: float  # calibrated, with the request's factor
    engine_chance: float  # without it


def survivals(chances: Iterable[float]) -> list[float]:
    """The chance of each draft that it and all before it are right, where `chances` are of each if those before are."""
    return list(accumulate(chances, mul))


def survivals_of(guesses: Sequence[Guess]) -> list[float]:
    """The same of drafts that were made."""
    return survivals([guess.chance for guess in guesses])


@dataclass(slots=True)
class Odds:
    """The engine's counts for one class of requests (greedy, or sampled)."""

    counts: dict[tuple[int, int], Count] = field(default_factory=dict)  # (depth, range): drafts that were verified
    means: dict[int, Count] = field(default_factory=dict)  # depth: chances of all drafts that were made
    depths: dict[int, Count] = field(default_factory=dict)  # depth: drafts made whatever was said of those before
    tenths: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0, 0.0] for _ in range(TENTHS)])

    def expect(self, depth: int, own: RequestOdds) -> float:
        """The chance of a draft that has not been made."""
        mean = self.means.get(min(depth, DEPTHS - 1))
        return min(MOST, (FIRST_GUESS if mean is None else mean.chance) * own.factor)

    def means_by_depth(self, count: int) -> list[float]:
        """The engine's mean chance of a draft at each of the first depths; higher while few drafts were made.

        Who rests learns nothing: a few wrong drafts at the start must not end drafting.
        """
        found = [self.means.get(min(depth, DEPTHS - 1)) for depth in range(count)]
        return [FIRST_GUESS if mean is None else min(MOST, mean.chance + HOPE / mean.tried**0.5) for mean in found]

    def guess(self, depth: int, said: float | None, own: RequestOdds, counts: bool = True) -> Guess:
        """A draft that was made; counts it among those of its depth, or not if only other rows wanted theirs."""
        level = min(depth, DEPTHS - 1)
        chance = self.chance_at(level) if said is None else self._count(level, said).chance
        if counts:
            self._mean(level).add(chance)
        return Guess(depth, said, min(MOST, chance * own.factor), chance)

    def count_made(self, said: Sequence[float]) -> None:
        """Count the drafts of a chain, of which this was said, among those of their depths."""
        for depth, value in enumerate(said):
            level = min(depth, DEPTHS - 1)
            self._mean(level).add(self._count(level, value).chance)

    def chances_with(self, own: RequestOdds) -> tuple[tuple[float, ...], ...]:
        """The chances of a request's drafts, by depth and by the range of what is said of them."""
        factor, levels = own.factor, range(DEPTHS)
        return tuple(tuple(min(MOST, self._count(n, said).chance * factor) for said in MIDDLES) for n in levels)

    def survivals_by_depth(self, factor: float, most: int) -> list[float]:
        """The survivals of a row's drafts, whatever is said of them; `factor` is the request's own.

        Higher while few first drafts were made: who rests learns nothing.
        """
        first = self.depths.get(0)
        hope = HOPE / (DEPTH_PRIOR + (0.0 if first is None else first.tried)) ** 0.5
        chances = self.chances_by_depth(most)
        chances[:1] = [chance + hope for chance in chances[:1]]
        return survivals([min(MOST, chance * factor) for chance in chances])

    def chances_by_depth(self, most: int) -> list[float]:
        """The chances of drafts whatever the drafter says; where few had a verdict, that of the depth before."""
        chance, weight, chances = FIRST_GUESS, DEPTH_PRIOR, list[float]()
        for level in range(min(most, DEPTHS)):
            count = self.depths.get(level)
            if count is not None:
                chance = (count.right + weight * chance) / (count.tried + weight)
            weight = ALIKE
            chances.append(chance)
        return chances + [chance] * (most - len(chances))

    def chance_at(self, depth: int) -> float:
        """The chance of a draft at this depth, whatever the drafter says."""
        return self.chances_by_depth(1 + depth)[-1]

    @property
    def num_judged(self) -> float:
        """Drafts that had a verdict."""
        return sum(tenth[0] for tenth in self.tenths)

    def judge(self, guess: Guess, right: bool, own: RequestOdds) -> None:
        """Count a verdict on a draft all of whose predecessors were right."""
        level = min(guess.depth, DEPTHS - 1)
        if guess.said is not None:
            self._count(level, guess.said).add(right)
        if guess.said is None or not level:
            self._depth(level).add(right, DEPTH_MEMORY)
        own.expected += guess.engine_chance
        own.right += right
        self._note(guess.chance, 1.0, float(right))

    def judge_line(self, said: Sequence[float], right: int, own: RequestOdds) -> None:
        """Count the verdicts of one round: the first `right` of the drafts of which this was said were right."""
        own.fade()
        factor = own.factor
        for depth, value in enumerate(said):
            level, good = min(depth, DEPTHS - 1), depth < right
            count = self._count(level, value)
            chance = count.chance
            count.add(good)
            if not level:
                self._depth(level).add(good, DEPTH_MEMORY)
            own.expected += chance
            own.right += good
            self._note(min(MOST, chance * factor), 1.0, good)

    def judge_rounds(
        self, rounds: int, tried: Sequence[Sequence[int]], right: Sequence[Sequence[int]], owns: Sequence[RequestOdds]
    ) -> None:
        """Count the verdicts of many rounds: in how many each request's draft of each depth had one, and was right.

        The drafter said nothing of these drafts.
        """
        chances = self.chances_by_depth(len(tried[0]))
        for own, made, good in zip(owns, tried, right, strict=True):
            own.fade(rounds)
            factor = own.factor
            for chance, count, correct in zip(chances, made, good, strict=True):
                own.expected += chance * count
                own.right += correct
                self._note(min(MOST, chance * factor), count, correct)
        for depth in range(len(chances)):
            count, correct = sum([line[depth] for line in tried]), sum([line[depth] for line in right])
            self._depth(min(depth, DEPTHS - 1)).add(correct, DEPTH_MEMORY, count)

    def _note(self, chance: float, tried: float, right: float) -> None:
        """Compare a chance with what came of it."""
        tenth = self.tenths[min(TENTHS - 1, int(chance * TENTHS))]
        tenth[0] += tried
        tenth[1] += chance * tried
        tenth[2] += right

    def _mean(self, level: int) -> Count:
        mean = self.means.get(level)
        if mean is None:
            mean = self.means[level] = Count(FIRST_GUESS * PRIOR, PRIOR)
        return mean

    def _depth(self, level: int) -> Count:
        return self.depths.setdefault(level, Count(0.0, 0.0))

    def _count(self, level: int, said: float) -> Count:
        place = bisect(EDGES, said)
        count = self.counts.get((level, place))
        if count is None:
            count = self.counts[level, place] = Count(said * PRIOR, PRIOR)
        return count

    @property
    def calibration_error(self) -> float:
        """The mean distance between the chance that was expected and the share that was right, over tenths."""
        total = sum(count for count, _, _ in self.tenths)
        return sum(abs(said - right) for _, said, right in self.tenths) / total if total else 0.0
