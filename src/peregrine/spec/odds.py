"""How likely drafts are, learnt from verdicts: by depth and by the drafter's own probability, and per request.

A draft's chance is that it is right if the drafts before it are. The engine counts how often drafts of a depth, and of
a range of the drafter's own probability, were right; so what the drafter says is calibrated while it runs. A request
has one factor: how many of its drafts were right over how many the engine's counts had expected.
"""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from peregrine.kernels.runtime.dispatch import DeviceFile

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
RANGES = len(MIDDLES)
MEANS = 2 * DEPTHS * RANGES  # where the parts of a line of `Odds` begin
ALL = MEANS + 2 * DEPTHS
COMPARED = ALL + 2 * DEPTHS
LINE = COMPARED + 3 * TENTHS

_compiled = DeviceFile("peregrine.spec.odds_cpu")


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


class Guess(NamedTuple):
    """One draft in a request's window: what the drafter said of it, and its chance."""

    said: float  # the drafter's own probability; NaN: it said nothing
    chance: float  # calibrated, with the request's factor
    engine_chance: float  # without it


def survivals(chances: Iterable[float]) -> list[float]:
    """The chance of each draft that it and all before it are right, where `chances` are of each if those before are."""
    return list(accumulate(chances, mul))


class Odds:
    """The engine's counts for one class of requests (greedy, or sampled).

    Counts are pairs: how many drafts were right, of how many. They lie in one line of numbers, which compiled functions
    read and write (`odds_cpu.py`).
    """

    def __init__(self, line: Floats | None = None) -> None:
        self.line: Floats = np.zeros(LINE) if line is None else line
        self.counts, self.means = counts_in(self.line), means_in(self.line)
        self.depths, self.tenths = depths_in(self.line), tenths_in(self.line)
        self.counts[..., 0], self.counts[..., 1] = PRIOR * np.array(MIDDLES), PRIOR  # the first guess
        self.means[:] = FIRST_GUESS * PRIOR, PRIOR

    def expect(self, depth: int, own: RequestOdds) -> float:
        """The chance of a draft that has not been made."""
        right, made = self.means[min(depth, DEPTHS - 1)]
        return min(MOST, float(right / made) * own.factor)

    def means_by_depth(self, count: int) -> list[float]:
        """The engine's mean chance of a draft at each of the first depths; higher while few drafts were made.

        Who rests learns nothing: a few wrong drafts at the start must not end drafting.
        """
        found = [self.means[min(depth, DEPTHS - 1)] for depth in range(count)]
        hopes = [HOPE / made**0.5 if made > PRIOR else 0.0 for _, made in found]
        return [min(MOST, float(right / made + hope)) for (right, made), hope in zip(found, hopes, strict=True)]

    def guess(self, depth: int, said: float, own: RequestOdds) -> Guess:
        """A draft that was made."""
        right, tried = self.counts[min(depth, DEPTHS - 1), bisect(EDGES, said)]
        chance = float(right / tried)
        return Guess(said, min(MOST, chance * own.factor), chance)

    def chances_with(self, own: RequestOdds) -> tuple[tuple[float, ...], ...]:
        """The chances of a request's drafts, by depth and by the range of what is said of them."""
        chances = np.minimum(self.counts[..., 0] / self.counts[..., 1] * own.factor, MOST)
        return tuple(tuple(map(float, level)) for level in chances)

    def hoped_by_depth(self, most: int) -> list[float]:
        """`chances_by_depth`, but higher while few first drafts were made: who rests learns nothing."""
        hope = HOPE / (DEPTH_PRIOR + float(self.depths[0, 1])) ** 0.5
        chances = self.chances_by_depth(most)
        chances[:1] = [chance + hope for chance in chances[:1]]
        return chances

    def chances_by_depth(self, most: int) -> list[float]:
        """The chances of drafts whatever the drafter says; where few had a verdict, that of the depth before."""
        chance, weight, chances = FIRST_GUESS, DEPTH_PRIOR, list[float]()
        known = [float(count) for count in self.depths[:most].flat]
        for right, tried in zip(known[::2], known[1::2], strict=True):
            chance = (right + weight * chance) / (tried + weight)
            weight = ALIKE
            chances.append(chance)
        return chances + [chance] * (most - len(chances))

    @property
    def num_judged(self) -> float:
        """Drafts that had a verdict."""
        return float(self.tenths[:, 0].sum())

    def judge_chains(self, known: Ints, right: Ints, read: Floats, made: Floats, own: RequestOdds) -> None:
        """Count the verdicts of rounds of one request, and the drafts that they made.

        Of the drafts in its window, known [n] had a verdict and right [n] were right. A line of read [n, 1 + K] says
        how many drafts there were, and what was said of each; made [n, 1 + K] the same of those made.
        """
        record = np.array((own.expected, own.right))
        _compiled.judge_chains(self.line, record, known, right, read, made)
        own.expected, own.right = map(float, record)

    def judge_rounds(self, rounds: int, tried: Ints, right: Ints, owns: Sequence[RequestOdds]) -> None:
        """Count the verdicts of many rounds: in how many each request's draft of each depth had one, and was right.

        [R, K] each. The drafter said nothing of these drafts.
        """
        records = np.array([(own.expected, own.right) for own in owns])
        _compiled.judge_counts(self.line, records, rounds, np.ascontiguousarray(tried), np.ascontiguousarray(right))
        for own, record in zip(owns, records, strict=True):
            own.expected, own.right = map(float, record)


def calibration_error(kinds: Iterable[Odds]) -> float:
    """The mean distance between the chance that was expected and the share that was right, over tenths."""
    tenths = np.stack([odds.tenths for odds in kinds])  # [n, TENTHS, 3]
    count, said, right = np.moveaxis(tenths, 2, 0)
    return float(np.abs(said - right).sum() / max(1.0, count.sum()))


def odds_by_kind() -> tuple[Floats, dict[bool, Odds]]:
    """The odds of requests by whether they are sampled, and the lines of both: [2, LINE]."""
    lines = np.zeros((2, LINE))
    return lines, {False: Odds(lines[0]), True: Odds(lines[1])}


def counts_in(line: Floats) -> Floats:
    """Of a line of `Odds`: drafts that were verified, by depth and by the range of what was said of them."""
    return line[:MEANS].reshape((DEPTHS, RANGES, 2))


def means_in(line: Floats) -> Floats:
    """The chances of all drafts that were made, by depth."""
    return line[MEANS:ALL].reshape((DEPTHS, 2))


def depths_in(line: Floats) -> Floats:
    """Drafts that were made whatever was said of those before, by depth."""
    return line[ALL:COMPARED].reshape((DEPTHS, 2))


def tenths_in(line: Floats) -> Floats:
    """By tenths of their chance: drafts, their chances, and how many were right."""
    return line[COMPARED:].reshape((TENTHS, 3))
