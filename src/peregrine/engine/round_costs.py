"""What rounds cost on this machine: timed when the engine starts.

Milliseconds are processor time of the engine's thread: what other processes take from it is no cost of a round.
The table says how the parts of a round compare, and a plan depends on that alone. Real rounds add what the host does
between them, and `speed`: how fast the machine is at the moment. They do not correct the table: a size that is seen
often would drift away from those that are not, and the choice between them with it.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.spec.links import Branched
from peregrine.spec.planner import Costs
from peregrine.spec.windows import Windows, paths_of

SPEED_SHARE = 0.2  # how far one round moves the machine's speed, and the host's share
MOST_OFF = 3.0  # a round that takes this many times what it should was interrupted
REFRESH = 16  # rounds after which plans see the host's share anew
TIME_LIMIT_S = 0.6  # of processor time, for all measurements
PASSES = 4  # over all sizes, at most

# (tokens in each window, rows that are drafted for, drafts of each) -> milliseconds of (verify, absorb and draft)
TimeRound = Callable[[Sequence[int], int, int], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Milliseconds of one real round."""

    verify_ms: float  # everything but the drafter
    draft_ms: float
    host_ms: float | None  # between the round before and this one; None: something else was done there


class FixedPlan:
    """A plan of given windows and depths, whatever the drafter says; see `spec.windows.Plan`."""

    rests = False

    def __init__(self, lens: Sequence[int], depths: Sequence[int], ranks: int = 1, branches: bool = False) -> None:
        self.windows, self.ranks = Windows.of(tuple(lens)), ranks
        self.branched = Branched.of([[0] * length for length in lens], [()] * len(lens)) if branches else None
        self.paths = paths_of(self.windows, self.branched)
        drafted = [row for row, depth in enumerate(depths) if depth]  # all of them as deep
        self._depths, self._left = torch.tensor(depths), max(depths)
        self.rows = None if len(drafted) == len(depths) else torch.tensor(drafted, dtype=torch.int64)

    def add(self, chances: Tensor, ranked: tuple[Tensor, Tensor] | None = None) -> None:
        for said in (chances, *(ranked or ())):
            said.tolist()  # as a real plan does
        self._left -= 1

    def go_on(self) -> bool:
        return self._left > 0

    def depths(self) -> Tensor:
        return self._depths

    def hold(self, taps: Tensor | None) -> None:
        """It never rests."""

    def force(self, forced: Tensor) -> None:
        """Depths are as they were given."""


class RoundCosts:
    """The table of costs, and the speed of the rounds that pass."""

    def __init__(
        self,
        verify: dict[int, float],
        absorb: dict[int, float],
        step: dict[int, float],
        steps: int,
        first: dict[int, float] | None = None,
        ragged: float = 0.0,
    ) -> None:
        self._verify, self._absorb, self._step, self._steps = verify, absorb, step, steps
        self._first, self._ragged = first or {}, ragged
        self.branched = 0.0  # milliseconds more, if chains branch
        self._host = 0.0  # milliseconds between rounds
        self._speed = 1.0
        self._rounds = 0
        self._known = self.costs()

    @property
    def changed(self) -> bool:
        return self._rounds % REFRESH == 0

    def costs(self) -> Costs:
        """The table as a value; a larger size never costs less than a smaller one."""
        verify = tuple((size, ms + self._host) for size, ms in rising(self._verify))
        parts = rising(self._absorb), rising(self._step), self._steps, rising(self._first)
        self._known = Costs(verify, *parts, self._ragged, self.branched)
        return self._known

    def expect(self, tokens: int, steps: Sequence[int], rests: bool, branches: bool = False) -> float:
        """Milliseconds of a round at the machine's present speed."""
        known = self._known
        absorbed = 0.0 if rests else known.absorb_ms(tokens)
        more = known.branched if branches else 0.0
        return self._speed * (known.verify_ms(tokens) + absorbed + known.steps_ms(steps) + more)

    def learn(self, tokens: int, steps: Sequence[int], rests: bool, times: RoundTimes) -> None:
        """Take in one real round."""
        self._rounds += 1
        if times.host_ms is not None:
            self._host += SPEED_SHARE * (times.host_ms / self._speed - self._host)
        expected = self.expect(tokens, steps, rests) - self._speed * self._host
        off = (times.verify_ms + times.draft_ms) / expected if expected else 1.0
        self._speed *= 1 + max(SPEED_SHARE, 1 / self._rounds) * (clipped(off) - 1)


def clipped(off: float) -> float:
    return min(max(off, 1 / MOST_OFF), MOST_OFF)


def rising(part: dict[int, float]) -> tuple[tuple[int, float], ...]:
    """The table in order of size; no size costs more than a larger one, since a disturbance only adds time."""
    least, points = math.inf, []
    for size in sorted(part, reverse=True):
        least = min(least, part[size])
        points.append((size, least))
    return tuple(reversed(points))


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 4, 8, ...: between them costs are close to straight lines."""
    return [1 << power for power in range(most.bit_length())]


def measure_costs(time_round: TimeRound, max_rows: int, depth: int, steps: int) -> RoundCosts:
    """Time rounds of several sizes in passes over all of them, as long as the time limit allows; the fastest count.

    A size whose turn never came is interpolated.
    """
    began = time.thread_time()
    verify: dict[int, float] = {}
    absorb: dict[int, float] = {}
    drafted: dict[int, dict[int, float]] = {1: {}, 2: {}}  # by drafts of a row
    made = 2 if min(depth, steps) > 1 else 1 if steps else 0
    for attempt in range(1 + PASSES):
        for tokens in sizes_up_to(max_rows * min(depth + 1, 4)):
            late = time.thread_time() - began > TIME_LIMIT_S
            if late and (attempt > 1 or len(verify) > 1):
                break
            rows = min(tokens, max_rows)
            lens = [tokens // rows + (row < tokens % rows) for row in range(rows)]
            if tokens not in verify:  # the first rounds of a size allocate and record
                time_round(lens, rows if tokens <= max_rows and steps else 0, made)
                time_round(lens, 0, 0)
            times = time_round(lens, 0, 0)
            verify[tokens] = min(verify.get(tokens, times[0]), times[0])
            absorb[tokens] = min(absorb.get(tokens, times[1]), times[1])
            for drafts in range(1, made + 1) if tokens <= max_rows else ():
                ms, found = time_round(lens, rows, drafts)[1], drafted[drafts]
                found[tokens] = min(found.get(tokens, ms), ms)
    first = {rows: max(0.0, ms - absorb[rows]) for rows, ms in drafted[1].items()}
    step = {rows: max(0.0, ms - drafted[1][rows]) for rows, ms in drafted[2].items()}
    ragged = 0.0
    if made and max_rows > 1:  # the first rounds allocate and record
        uneven, even = (min([time_round(lens, 2, 1)[1] for _ in range(4)][2:]) for lens in ((2, 1), (2, 2)))
        ragged = max(0.0, uneven - even)
    return RoundCosts(verify, absorb, step or first or {1: 0.0}, steps, first, ragged)


def branched_ms(time_round: Callable[[], tuple[float, float]], tokens: int, costs: Costs) -> float:
    """Milliseconds that a round of one row takes more because its window, of so many tokens, is a tree's.

    `time_round` times one that drafts once.
    """
    time_round()  # the first one allocates and records
    return max(0.0, min(sum(time_round()) for _ in range(2)) - costs.round_ms(tokens, [1]))
