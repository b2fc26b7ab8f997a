"""The times of one round, and a plan of given windows to take them with."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from peregrine.spec.branches import RANKS
from peregrine.spec.links import Branched
from peregrine.spec.windows import Ruled, Windows, paths_of


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Milliseconds of one round, up to its last draft."""

    verify_ms: float  # everything but the drafter
    first_ms: float  # the drafter reads what was verified and makes the first drafts; the round is planned
    steps_ms: Sequence[float]  # further drafts
    host_ms: float | None = None  # between the round before and this one; None: something else was done there
    usual: bool = True  # False: a new size was recorded meanwhile

    @property
    def ms(self) -> float:
        return self.verify_ms + self.first_ms + sum(self.steps_ms)

    def first(self, steps: int) -> float:
        """What `Costs.steps` levels pay for first; a block is paid for as a whole."""
        return self.first_ms + sum(self.steps_ms) if steps == 1 else self.first_ms


def now() -> tuple[float, float]:
    """Seconds by the clock, and of processor time of all threads."""
    return time.perf_counter(), time.process_time()


class FixedPlan:
    """A plan of given windows and as many drafts for every row, whatever the drafter says; see `spec.windows.Plan`.

    With branches, windows are read as trees are, and the drafter ranks tokens.
    """

    rests = False
    ruled: Ruled | None = None

    def __init__(self, lens: Sequence[int], drafts: int, branches: bool = False) -> None:
        self.windows, self.ranks = Windows.of(tuple(lens)), RANKS if branches else 1
        self.branched = Branched.of([[0] * length for length in lens], [()] * len(lens)) if branches else None
        self.paths = paths_of(self.windows, self.branched)
        self.rows = None if drafts else torch.empty(0, dtype=torch.int64)
        self.drafts = None if branches or not drafts else drafts  # known, so that nothing is asked between them
        self._drafts, self._made = drafts, 0

    def add(self, chances: Tensor, ranked: tuple[Tensor, Tensor] | None = None) -> None:
        for said in (chances, *(ranked or ())):
            said.tolist()  # as a real plan does
        self._made += 1

    def go_on(self) -> bool:
        return self._made < self._drafts

    def depths(self) -> int:
        return self._drafts

    def force(self, forced: Tensor) -> None:
        """Depths are as they were given."""


def times_of(
    began: float,
    proposing: float,
    stamps: Sequence[float],
    planning: float = 0.0,
    host: float | None = None,
    usual: bool = True,
) -> RoundTimes:
    """Of a round by the seconds at which it began, began to draft, and had made each draft; planning took so long."""
    laps = [1e3 * (after - before) for before, after in pairwise(stamps)]
    drafted = stamps[0] if stamps else proposing
    host_ms = None if host is None else 1e3 * host
    return RoundTimes(1e3 * (proposing - began), 1e3 * (drafted - proposing + planning), laps, host_ms, usual)


class Stopwatch:
    """When the parts of real rounds begin and end, in seconds by the clock."""

    def __init__(self) -> None:
        self.proposing = 0.0  # when the last round began to draft
        self.learnt = 0.0  # how long its verdicts have been taken in for
        self._done = 0.0  # when the round before was done

    def times(
        self, began: float, planned: float, stamps: Sequence[float], usual: bool, timed: bool
    ) -> RoundTimes | None:
        """Of the round that began then, was planned then, and has just been done; its drafts were made at `stamps`.

        None if it is not to be timed, which would take time itself.
        """
        now, learnt = time.perf_counter(), self.learnt
        if not timed:
            self._done, self.learnt = now, 0.0
            return None
        between, verify = began - self._done - learnt, self.proposing - planned
        self._done, self.learnt = now, 0.0
        # A longer pause was not the host's work of one round, but prompts or nothing to do.
        host = between if between < verify / 2 else None
        stamps = stamps or (now,)
        return times_of(planned, self.proposing, stamps, planned - began + learnt + now - stamps[-1], host, usual)


def least(one: RoundTimes, other: RoundTimes) -> RoundTimes:
    """Of each part, the shorter time."""
    steps = [min(pair) for pair in zip(one.steps_ms, other.steps_ms, strict=True)]
    return RoundTimes(min(one.verify_ms, other.verify_ms), min(one.first_ms, other.first_ms), steps)
