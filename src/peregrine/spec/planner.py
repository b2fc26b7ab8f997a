"""How deep each row's window should be: the most expected tokens per millisecond, by measured costs and learnt odds.

Tokens never depend on drafts, so any plan is correct and the fastest is best. Everything here is a pure function of
values that the host has, on any device.

A draft pays if the chance that it is accepted, which is its survival, is more than the tokens that its time would give
elsewhere: rate x (what it adds to the drafter's steps and to the verification).
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.spec.odds import Floats

Points = tuple[tuple[int, float], ...]  # (size, milliseconds), sizes ascending

MAX_ITERATIONS = 8  # the rate of a plan converges in two or three
MOST_COUNTS = 8  # rows up to which every number of them is tried with a block; of more, powers of two

_compiled = DeviceFile("peregrine.spec.planner_cpu")


class Curves(NamedTuple):
    """Sizes and milliseconds of the parts of a round: [2, n] each."""

    verify: Floats
    absorb: Floats
    first: Floats
    step: Floats

    def step_at(self, level: int, steps: int) -> Floats:
        """The step that drafts this level, where so many levels cost a step each."""
        return FREE if level >= steps else self.step if level else self.first


def curve(points: Points) -> Floats:
    return np.ascontiguousarray(np.array(points, dtype=np.float64).T)


FREE = curve(((1, 0.0),))


@dataclass(frozen=True, slots=True)
class Costs:
    """What the parts of a round cost; between two measured sizes a straight line."""

    verify: Points  # by tokens in all windows: everything but the drafter
    absorb: Points  # by tokens in all windows: the drafter reads what was verified
    step: Points  # by rows drafted for: one step of the drafter
    steps: int  # levels that cost a step each; further ones are free (a block is one step, a look-up none)
    first: Points = ()  # the first step, if it costs something else: it follows from what was absorbed
    ragged: float = 0.0  # more, if windows differ in length: the drafter's work is not one replay then
    branched: float = 0.0  # more, if chains branch
    _verified: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _read: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _arrays: list[Curves] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def curves(self) -> Curves:
        """For compiled functions."""
        if not self._arrays:
            self._arrays.append(Curves(*map(curve, (self.verify, self.absorb, self.first or self.step, self.step))))
        return self._arrays[0]

    def verify_ms(self, tokens: int) -> float:
        ms = self._verified.get(tokens)
        if ms is None:
            ms = self._verified[tokens] = ms_at(self.verify, tokens)
        return ms

    def absorb_ms(self, tokens: int) -> float:
        return ms_at(self.absorb, tokens)

    def read_ms(self, tokens: int) -> float:
        """Verified by the target, and absorbed by the drafter."""
        ms = self._read.get(tokens)
        if ms is None:
            ms = self._read[tokens] = self.verify_ms(tokens) + self.absorb_ms(tokens)
        return ms

    def step_ms(self, rows: int, level: int) -> float:
        """The step that drafts this level, the first being 0, for this many rows."""
        if not rows or level >= self.steps:
            return 0.0
        return ms_at(self.step if level or not self.first else self.first, rows)

    def of_all(self, rows: int) -> "Costs":
        """The same costs where a step is made for so many rows, whichever of them want its drafts."""
        return replace(self, step=((1, self.step_ms(rows, 1)),), first=((1, self.step_ms(rows, 0)),))

    def steps_ms(self, steps: Sequence[int]) -> float:
        """Steps for this many rows each."""
        return sum(self.step_ms(rows, level) for level, rows in enumerate(steps))

    def round_ms(self, tokens: int, steps: Sequence[int]) -> float:
        """A round whose windows have this many tokens, and whose drafter makes a step for each number of rows."""
        absorbed = self.absorb_ms(tokens) if steps else 0.0
        return self.verify_ms(tokens) + absorbed + self.steps_ms(steps)

    def plain_rate(self, rows: int) -> float:
        """Tokens per millisecond of rounds without drafts."""
        return rows / self.verify_ms(rows)

    def to_json(self) -> dict[str, list[list[float]]]:
        """Sizes and milliseconds of each part."""
        parts = {"verify": self.verify, "absorb": self.absorb, "first": self.first, "step": self.step}
        more = {"ragged": self.ragged, "branched": self.branched}
        curves = {name: [[float(size), round(ms, 4)] for size, ms in points] for name, points in parts.items()}
        return curves | {name: [[0.0, round(ms, 4)]] for name, ms in more.items()}


def rising(part: dict[int, float]) -> Points:
    """The table in order of size; no size costs more than a larger one, since a disturbance only adds time."""
    least, points = math.inf, []
    for size in sorted(part, reverse=True):
        least = min(least, part[size])
        points.append((size, least))
    return tuple(reversed(points))


def ms_at(points: Points, size: int) -> float:
    """Milliseconds at a size, by the line through its neighbours; never below 0."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_left(points, (size, -1.0)), 1), len(points) - 1)
    (low, below), (high, above) = points[right - 1], points[right]
    return max(0.0, below + (above - below) * (size - low) / (high - low))


@dataclass(frozen=True, slots=True)
class DepthPlan:
    """Drafts per row, and what the model of costs and odds expects of a round that has them."""

    depths: tuple[int, ...]
    tokens: float
    ms: float

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens / self.ms


def plan_depths(costs: Costs, survivals: Sequence[Sequence[float]]) -> DepthPlan:
    """The depths with the highest rate, drafting and verifying together.

    survivals[r][d] is the chance that the draft of row r at depth d is accepted; it falls with d, and its length is the
    row's cap. A round is costed as one of many alike. The best rate is found by Dinkelbach's iteration: for a
    given rate the drafts that pay are taken, which gives a higher rate, until it stays. That is optimal where costs
    are straight lines; elsewhere plain decoding is the least it returns.
    """
    best = plain = depth_plan(costs, survivals, [0] * len(survivals))
    for _ in range(MAX_ITERATIONS):
        found = depth_plan(costs, survivals, paying_depths(costs, survivals, best.rate))
        if found.rate <= best.rate * (1 + 1e-9):
            break
        best = found
    return best if best.rate > plain.rate else plain


def depth_plan(costs: Costs, survivals: Sequence[Sequence[float]], depths: Sequence[int]) -> DepthPlan:
    """What a round with these depths is expected to do."""
    rows = len(depths)
    steps = [sum(depth > level for depth in depths) for level in range(max(depths, default=0))]
    expected = rows + sum(sum(row[:depth]) for row, depth in zip(survivals, depths, strict=True))
    return DepthPlan(tuple(depths), expected, costs.round_ms(rows + sum(depths), steps))


def paying_depths(costs: Costs, survivals: Sequence[Sequence[float]], rate: float) -> list[int]:
    """Depths whose drafts pay at this rate. Level by level: a draft cannot pay if the one before it does not.

    Except in a block, whose drafts pay for its one step together.
    """
    if costs.steps == 1:
        return paying_blocks(costs, survivals, rate)
    rows = len(survivals)
    depths, tokens, active, level = [0] * rows, rows, list(range(rows)), 0
    surplus, best, kept = -rate * costs.absorb_ms(rows), 0.0, depths
    while active:
        active = [row for row in active if len(survivals[row]) > level]
        active.sort(key=lambda row: -survivals[row][level])
        chances = [survivals[row][level] for row in active]
        count, gain = worth_taking(costs, chances, tokens, rate, level)
        if not count:
            break
        active = active[:count]
        for row in active:
            depths[row] += 1
        tokens += count
        surplus += gain
        level += 1
        if surplus > best:
            best, kept = surplus, list(depths)
    return kept


def paying_blocks(costs: Costs, survivals: Sequence[Sequence[float]], rate: float) -> list[int]:
    """Depths that pay if one step drafts every level: of how many rows, the likeliest first, and which drafts."""
    rows = len(survivals)
    likeliest = sorted(range(rows), key=lambda row: -sum(survivals[row]))
    counts = set(range(1, rows + 1)) if rows <= MOST_COUNTS else {rows, *(1 << i for i in range(rows.bit_length()))}
    best, kept = rate * costs.absorb_ms(rows), [0] * rows
    for count in counts:
        drafts = [(a, -level, row) for row in likeliest[:count] for level, a in enumerate(survivals[row])]
        drafts.sort(reverse=True)
        taken, net = worth_taking(costs, [a for a, _, _ in drafts], rows, rate, level=1)  # the step is paid for below
        net -= rate * costs.step_ms(count, 0)
        if net > best:
            best, kept = net, [0] * rows
            for _, _, row in drafts[:taken]:
                kept[row] += 1
    return kept


def worth_taking(costs: Costs, survivals: Sequence[float], tokens: int, rate: float, level: int) -> tuple[int, float]:
    """How many of the survivals (falling) to give one draft more, and the tokens that this wins net."""
    curves = costs.curves
    step = curves.step_at(level, costs.steps)
    taken, net = _compiled.worth(np.array(survivals, np.float64), curves.verify, curves.absorb, step, tokens, rate)
    return taken, net


def trim_windows(costs: Costs, survivals: Sequence[Sequence[float]], rate: float) -> list[int]:
    """How many of the drafts that exist to verify in each row: those that pay, the likeliest first.

    The time that it took to make them is spent. At a rate no lower than plain decoding's, the result is expected to
    be no slower than plain decoding.
    """
    lens, taken = np.array([len(line) for line in survivals]), np.zeros(len(survivals), np.int64)
    lines = np.array([[*line] + [0.0] * (max(lens) - len(line)) for line in survivals])
    _compiled.trim(lines, lens, costs.curves.verify, costs.ragged, rate, taken)
    return [int(depth) for depth in taken]
