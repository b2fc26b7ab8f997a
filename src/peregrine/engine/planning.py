"""Chooses the windows of every round on a CPU: what is verified now, and which rows are drafted for next.

The choice is by measured costs (`engine/round_costs.py`) and learnt odds (`spec/odds.py`), through the pure functions
of `spec/planner.py`. It changes speed, never a token.

All rows are drafted for or none, but for a probe, which drafts for a few. A row that is not drafted for still has to be
known to the drafter when it comes back. In a round that drafts, the drafter absorbs every row's tokens, which costs
little beside its other work. In others it is not called at all: what it has to absorb is held, and read as one
prompt-like chunk before the next draft of that row, or at its end. What a request holds at its end is dropped if it is
most of its text: should a later prompt hit those pages, its first drafts are worse, which is seldom and costs less than
to absorb the text of every request that rests.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peregrine.engine.request import Held, Request
from peregrine.engine.round_costs import RoundCosts, RoundTimes
from peregrine.spec.odds import MOST, Guess, Odds
from peregrine.spec.planner import Costs, plan_depths, trim_windows, worth_taking
from peregrine.spec.windows import Windows

MAX_HELD = 1024  # rounds whose taps are held
KEPT, MOST_KEPT = 8, 64  # rounds for which rows are chosen to be drafted for; twice as many each time that none is
PROBE_EVERY = 256  # rounds; sooner while there were few
PROBE_DEPTHS = (3, 1, 2)  # drafts of a row in a probe
LOOK_AHEAD = 4  # drafts that are planned before the first is made; further ones are decided step by step


class RoundPlan:
    """The plan of one round; see `spec.windows.Plan`."""

    def __init__(
        self, planner: "WindowPlanner", requests: Sequence[Request], lens: list[int], drafted: list[int]
    ) -> None:
        self.planner, self.requests = planner, requests
        self.windows = Windows.of(tuple(lens))
        self.rests = not drafted and sum(lens) == len(lens)
        self.rows = None if len(drafted) == len(lens) else torch.tensor(drafted, dtype=torch.int64)
        self.guesses: list[list[Guess]] = [[] for _ in requests]  # of the new drafts
        self.steps: list[int] = []  # rows of each step of the drafter
        self.expected = 0.0  # tokens of this round
        self.probe = 0  # drafts that each of these rows gets, to learn what they cost and whether they are right
        self.drafted, self._wanted = drafted, set(drafted)  # rows that are drafted for, and whose drafts seem to pay
        self._tokens = len(lens)  # of the next round, as far as it is planned
        self._held: list[Tensor | None] | None = None

    def add(self, chances: Tensor) -> None:
        self.steps.append(len(self.drafted))
        for row, chance in zip(self.drafted, chances.tolist(), strict=True):
            request, line = self.requests[row], self.guesses[row]
            line.append(self.planner.odds(request).guess(len(line), chance, request.odds, row in self._wanted))
        self._tokens += len(self._wanted)

    def go_on(self) -> bool:
        planner, drafted = self.planner, self.drafted
        depth = len(self.guesses[drafted[0]])
        if depth < self.probe:
            return True
        survivals = []
        for row in drafted:
            request = self.requests[row]
            if depth < planner.cap_of(request):
                survival = planner.odds(request).expect(depth, request.odds)
                for guess in self.guesses[row]:
                    survival *= guess.chance
                survivals.append((survival, row))
        survivals.sort(reverse=True)
        chances = [survival for survival, _ in survivals]
        count, _ = worth_taking(planner.costs.of_all(len(drafted)), chances, self._tokens, planner.rate, depth)
        self._wanted = {row for _, row in survivals[:count]}
        return count > 0

    def depths(self) -> Tensor | int:
        depths = [len(line) for line in self.guesses]
        return depths[0] if depths.count(depths[0]) == len(depths) else torch.tensor(depths)

    def hold(self, taps: Tensor | None) -> None:
        if self._held is None:  # else the plan is repeated: the same rows rest again
            holding = [row for row, request in enumerate(self.requests) if self.rests or request.held]
            if not holding:
                return
            self._held, lens = [], self.windows.lens
            for row in holding:
                request = self.requests[row]
                request.held.append(Held(request.num_tokens - 1, sum(lens[:row]), self._held))
        self._held.append(None if taps is None else taps.flatten(0, -2))

    def force(self, forced: Tensor) -> None:
        for line, known in zip(self.guesses, (forced >= 0).long().cumprod(dim=1).sum(dim=1).tolist(), strict=True):
            line[:known] = [Guess(depth, None, 1.0, 1.0) for depth in range(known)]


@dataclass(slots=True)
class PlanRecord:
    """What was planned and what came of it, for metrics."""

    windows: Counter[int] = field(default_factory=Counter)  # rows by window length
    rounds: Counter[str] = field(default_factory=Counter)  # rounds by plan: plain, drafted, mixed
    expected_tokens: float = 0.0
    tokens: int = 0
    expected_ms: float = 0.0
    ms: float = 0.0


class WindowPlanner:
    """Plans rounds, and learns from them."""

    def __init__(self, depth: int, measured: RoundCosts, looks_up: bool) -> None:
        self.depth, self.measured, self.looks_up = depth, measured, looks_up
        self.costs: Costs = measured.costs()
        self.rate = 0.0  # tokens per millisecond of the last plan
        self.record = PlanRecord()
        self._rounds = self._probes = self._next = 0  # rounds, probes so far, and the round of the next
        self._probing = 0  # drafts of each row that the last round made for a probe
        self._odds = {False: Odds(), True: Odds()}  # by whether a request is sampled
        self._planned: list[int] = []  # ids of the requests that `_drafted` was chosen for
        self._drafted: list[int] = []  # rows that are drafted for
        self._due = 0  # the round after which they are chosen anew
        self._kept = KEPT
        self._resting: RoundPlan | None = None  # the last plan, if it lets all rows rest
        self._repeated = 0  # how often it was repeated

    def odds(self, request: Request) -> Odds:
        return self._odds[request.params.temperature > 0]

    def cap_of(self, request: Request) -> int:
        """The most drafts a request may have after the round to come."""
        asked = request.params.num_drafts
        room = request.limit - request.num_tokens - 1
        return max(0, min(self.depth if asked is None else asked, room))

    @property
    def calibration_error(self) -> float:
        """Of greedy and sampled requests together."""
        counts = [sum(tenth[0] for tenth in odds.tenths) for odds in self._odds.values()]
        total = sum(counts)
        errors = [odds.calibration_error for odds in self._odds.values()]
        return sum(e * n for e, n in zip(errors, counts, strict=True)) / total if total else 0.0

    def rest_again(self, requests: Sequence[Request]) -> RoundPlan | None:
        """The last plan once more, if the same rows rest and nothing else is due: planning would cost what it saves."""
        if self._resting is None or self._rounds + 1 >= min(self._due, self._next):
            return None
        if self._planned != [request.id for request in requests]:
            return None
        self._rounds += 1
        self._repeated += 1
        return self._resting

    def plan(self, requests: Sequence[Request], offered: Sequence[int]) -> RoundPlan:
        """The plan of the next round of the requests in these rows, whose windows hold this many drafts."""
        if self.measured.changed:
            self.costs = self.measured.costs()
        if self._resting is not None and self._repeated:
            for request in self._resting.requests:
                request.odds.fade(self._repeated)
        self._repeated, ids = 0, [request.id for request in requests]
        if ids != self._planned or self._rounds >= self._due:
            means = {sampled: odds.means_by_depth(LOOK_AHEAD) for sampled, odds in self._odds.items()}
            survivals = [self._expected(request, means[request.params.temperature > 0]) for request in requests]
            following = plan_depths(self.costs.of_all(len(requests)), survivals)
            self._drafted = list(range(len(requests))) if any(following.depths) else []
            resting = ids == self._planned and not self._drafted
            self._kept = min(MOST_KEPT, 2 * self._kept) if resting else KEPT
            self.rate, self._planned, self._due = following.rate, ids, self._rounds + self._kept
        drafted = self._drafted
        probe = self._next_probe(requests)
        if self.looks_up:
            drafted = list(range(len(requests)))
        elif probe:
            drafted = sorted({*drafted, *self._probed(requests)})
        verified = self.choose_verified(requests, offered)
        plan = RoundPlan(self, requests, [1 + depth for depth in verified], drafted)
        self._probing = plan.probe = probe
        for request, depth in zip(requests, verified, strict=True):
            plan.expected += 1 + sum(survivals_of(request.guesses[:depth]))
        self._resting = plan if plan.rests else None
        return plan

    def _next_probe(self, requests: Sequence[Request]) -> int:
        """How many drafts some rows get after this round, whether they seem to pay or not; 0: it is no probe.

        A size of window that looks costly, or a request whose drafts were wrong, would never be looked at again.
        """
        self._rounds += 1
        if self._rounds < self._next:
            return 0
        depth = min([PROBE_DEPTHS[self._probes % len(PROBE_DEPTHS)], *map(self.cap_of, requests)])
        if depth:
            self._probes += 1
            self._next = self._rounds + min(PROBE_EVERY, 4 << self._probes)
        return depth

    def _probed(self, requests: Sequence[Request]) -> list[int]:
        """A quarter of the rows: those that hold the least, which has to be absorbed first; of equals, in turn."""
        count = len(requests)
        order = sorted(range(count), key=lambda row: (requests[row].num_held, (row - self._probes) % count))
        return order[: -(-count // 4)]

    def must_absorb(self, plan: RoundPlan) -> list[Request]:
        """Whose held taps the drafter has to absorb before this round."""
        if any(request.num_held >= MAX_HELD for request in plan.requests):
            return list(plan.requests)
        windows = [row for row, length in enumerate(plan.windows.lens) if length > 1]  # a grammar forced their drafts
        return [plan.requests[row] for row in {*plan.drafted, *windows}]

    def choose_verified(self, requests: Sequence[Request], offered: Sequence[int]) -> list[int]:
        """How many drafts of each row are verified."""
        for request, count in zip(requests, offered, strict=True):
            line = request.guesses
            del line[count:]
            while len(line) < count:  # the drafter said nothing of them
                line.append(self.odds(request).guess(len(line), None, request.odds))
        if self._probing or not any(offered):
            return list(offered)
        survivals = [survivals_of(request.guesses[: self.cap_of(request)]) for request in requests]
        return trim_windows(self.costs, survivals, self.rate)

    def _expected(self, request: Request, means: Sequence[float]) -> list[float]:
        """The survival of drafts that have not been made, by the engine's mean chance at each depth."""
        survival, line, factor = 1.0, [], request.odds.factor
        for mean in means[: self.cap_of(request)]:
            survival *= min(MOST, mean * factor)
            line.append(survival)
        return line

    def note_rest(self, plan: RoundPlan) -> None:
        """Count a round that only repeated a plan."""
        count = len(plan.requests)
        self.record.windows[1] += count
        self.record.rounds["plain"] += 1
        self.record.tokens += count
        self.record.expected_tokens += count

    def learn(self, plan: RoundPlan, correct: Sequence[int], ended: Sequence[bool], times: RoundTimes) -> None:
        """Take in a round's verdicts and times; drafts after the first wrong one have no verdict."""
        record, lens = self.record, plan.windows.lens
        for row, request in enumerate(plan.requests):
            odds, own, verified = self.odds(request), request.odds, lens[row] - 1
            own.fade()
            for guess in request.guesses[: min(correct[row], verified)]:
                odds.judge(guess, True, own)
            if correct[row] < verified and not ended[row]:
                odds.judge(request.guesses[correct[row]], False, own)
            request.guesses = plan.guesses[row]
            record.windows[lens[row]] += 1
            record.tokens += correct[row] + 1
        tokens = sum(lens)
        record.rounds["plain" if tokens == len(lens) else "drafts" if min(lens) > 1 else "mixed"] += 1
        record.expected_tokens += plan.expected
        record.expected_ms += self.measured.expect(tokens, plan.steps, plan.rests)
        record.ms += times.verify_ms + times.draft_ms
        self.measured.learn(tokens, plan.steps, plan.rests, times)


def survivals_of(guesses: Sequence[Guess]) -> list[float]:
    """The chance of each draft that it and all before it are right."""
    survival, line = 1.0, []
    for guess in guesses:
        survival *= guess.chance
        line.append(survival)
    return line
