"""Chooses the windows of rounds on a GPU, where a round is queued before the last verdict is read.

When round n + 1 is queued, the host knows the verdicts up to round n - 1 and the depth to which round n drafts, not its
drafts. So the chance of a draft follows from its depth and from how often drafts of that request were right. A plan
is kept for some rounds while the rows stay the same. Plans change speed, never a token.

Of a drafter with a confidence head, the host chooses how many tokens a round verifies, by what was said of the last
drafts it knows, and the device which ones, by what is said of those to be verified.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from peregrine.engine.plan_record import PlanRecord
from peregrine.engine.request import Request
from peregrine.kernels.round import HEADER
from peregrine.spec.ahead import Choice, RowCosts, allot, choose_size, size_of_drafts, token_sizes, window_width
from peregrine.spec.depth_odds import DepthOdds
from peregrine.spec.odds import Floats, Ints
from peregrine.spec.said_odds import SaidOdds

KEPT, MOST_KEPT = 8, 64  # rounds until a plan is made anew; doubled each time it comes out the same
PROBE_EVERY = 256  # rounds between probes; the first ones follow each other sooner
PROBED = 4  # a probe verifies drafts of one row in this many


@dataclass(frozen=True, slots=True)
class AheadPlan:
    """The windows of one round, and how deep it drafts."""

    rows: int  # R, padding included
    tokens: int  # N
    lens: list[int]  # length of each row's window; N in all
    depth: int  # drafts of each row for the next round
    lines: Ints  # each request's line in the tables of odds
    sampled: Ints  # 1 for requests with a temperature
    expected: float  # tokens that the round should give
    odds: Floats | None = None  # [R, K, ranges]; given, the device chooses the windows by them and by what was said
    drafted: int = 0  # drafts of each row that exist


@dataclass(frozen=True, slots=True)
class AheadCosts:
    """The measured costs of rounds, by their number of rows."""

    by_rows: Mapping[int, RowCosts]

    def to_json(self) -> dict[str, dict[str, object]]:
        """Sizes and milliseconds of each part, by rows."""
        return {
            str(rows): {
                "verify": [[size, round(ms, 4)] for size, ms in zip(c.sizes, c.verify, strict=True)],
                "absorb": [[size, round(ms, 4)] for size, ms in zip(c.sizes, c.absorb, strict=True)],
                "read": [[size, round(ms, 4)] for size, ms in zip(c.sizes, c.read, strict=True)],
                "draft": [[depth, round(ms, 4)] for depth, ms in zip(c.depths, c.draft, strict=True)],
                "ms_per_1000_cached": round(1000 * c.key_ms, 5),
            }
            for rows, c in self.by_rows.items()
        }


class AheadPlanner:
    """Plans rounds, and learns the odds from their verdicts."""

    def __init__(self, depth: int, costs: AheadCosts, looks_up: bool = False, says: bool = False) -> None:
        self.depth, self.costs = depth, costs
        self.looks_up = looks_up  # drafts come from a look-up; only the device knows whether it found any
        self.odds = SaidOdds(depth) if says else DepthOdds(depth)
        self.record = PlanRecord()
        self.drafted = 0  # how deep the round that was queued last drafts
        self._requests: list[Request] = []
        self._lines = self._sampled = np.zeros(0, dtype=np.int64)
        self._caps = np.zeros(0, dtype=np.int64)
        self._choice: Choice | None = None
        self._plan: AheadPlan | None = None  # used again while rounds draft to its depth
        self._rounds = self._due = self._probes = self._next_probe = 0
        self._kept = KEPT
        self._num_rows = 0  # R of the choice
        self._probing = False  # the last round drafted deeper, for a probe
        self._read: list[tuple[AheadPlan, Ints, Floats | None]] = []  # verdicts that the odds have not learnt from yet

    @property
    def calibration_error(self) -> float:
        """Mean distance between the expected chance of drafts and the share that was right."""
        return self.odds.calibration_error

    def plan(self, requests: list[Request], rows: int) -> AheadPlan:
        """The plan of the next round: the requests are the first rows, the rest of `rows` is padding."""
        self._rounds += 1
        if requests != self._requests:
            self._seat(requests)
        kept = self._plan
        probe = self._rounds >= self._next_probe
        steady = not (probe or self._probing) and self._rounds < self._due
        if kept is not None and steady and kept.rows == rows and self.drafted == kept.depth:
            return kept
        costs, due = self.costs.by_rows[rows], self._rounds >= self._due or self._num_rows != rows
        if due:
            self._learn()
        survivals = self._survivals(rows)
        if self._choice is None or due:
            self._num_rows = rows
            before, keys = self._choice, sum(request.num_tokens for request in requests)
            self._choice = choose_size(costs, survivals, len(requests), keys, before)
            same = before is not None and (before.tokens, before.depth) == (self._choice.tokens, self._choice.depth)
            self._kept = min(MOST_KEPT, 2 * self._kept) if same else KEPT
            self._due = self._rounds + self._kept
        plan = self._fit(costs, survivals.mean(axis=0), self._choice, probe)
        self._plan = plan if plan.depth == self.drafted == self._choice.depth else None
        self.drafted = plan.depth
        return plan

    def _seat(self, requests: list[Request]) -> None:
        """Note the requests of the coming rounds."""
        self._requests, self._plan, self._due = list(requests), None, 0
        self._lines = self.odds.lines([request.id for request in requests])
        self._sampled = np.array([request.params.temperature > 0 for request in requests], dtype=np.int64)
        asked = (request.params.num_drafts for request in requests)
        self._caps = np.array([self.depth if cap is None else cap for cap in asked])

    def _survivals(self, rows: int) -> Floats:
        """The chance that a draft and all before it are right; 0 in padding and past a request's num_drafts.

        [S, R, K]: of several rounds such as the last ones, where the drafter says how sure it is; else S is 1.
        """
        if isinstance(self.odds, SaidOdds):
            chances = self.odds.recent(self._lines, self._sampled)
        else:
            chances = self.odds.chances(self._lines, self._sampled, hope=True)[None]
        chances[:, np.arange(self.depth) >= self._caps[:, None]] = 0.0
        found = np.zeros((len(chances), rows, self.depth))
        np.cumprod(chances, axis=2, out=found[:, : len(self._lines)])
        return found

    def _table(self, rows: int, probed: range = range(0)) -> Floats | None:
        """What the device chooses windows by; None: the plan's own are taken. Drafts of the probed rows come first."""
        if not isinstance(self.odds, SaidOdds):
            return None
        table = self.odds.table(self._lines, self._sampled)
        table[probed] = 1.0
        table[np.arange(self.depth) >= self._caps[:, None]] = 0.0
        return np.concatenate((table, np.zeros((rows - len(table), *table.shape[1:]))))

    def _fit(self, costs: RowCosts, survivals: Floats, choice: Choice, probe: bool) -> AheadPlan:
        """The plan of this round: which of the last round's drafts it verifies, and how deep it drafts itself."""
        tokens, rows, drafted = choice.tokens, len(survivals), self.drafted
        wanted, some = survivals, range(0)
        if self._probing:  # drafts of a probe are verified, whether they seem to pay or not
            wanted, every = survivals.copy(), min(PROBED, len(self._requests))
            some = range(self._probes % every, len(self._requests), every)
            wanted[some, :drafted] = np.linspace(3.0, 2.0, drafted)
            needed = rows + drafted * len(some)
            tokens = next((size for size in costs.sizes if size >= max(needed, tokens)), costs.sizes[-1])
        elif drafted != choice.depth:
            tokens = size_of_drafts(costs, survivals, drafted, choice.rate) if drafted else rows
        lens = allot(wanted, drafted, tokens, window_width(rows, tokens, self.depth))
        depth = choice.depth
        self._probing = False
        if probe:
            self._probes += 1
            self._next_probe = self._rounds + min(PROBE_EVERY, 4 << self._probes)
            # Probe the next depth below the one in use; depths in use need no probe.
            deeper = [d for d in costs.depths if d > depth]
            if deeper and self._caps.max(initial=0) > depth:
                depth, self._probing = deeper[0] if depth else deeper[min(len(deeper), 2) - 1], True
        read = np.arange(self.depth) < np.array(lens)[:, None] - 1
        expected = len(self._requests) + float(survivals[read].sum())
        return AheadPlan(
            rows, tokens, lens, depth, self._lines, self._sampled, expected, self._table(rows, some), drafted
        )

    def learn(self, plan: AheadPlan, table: Ints, said: Floats | None = None) -> None:
        """Keep a round's verdicts for `_learn`: [R, columns], the first four accept, correct, drafted and finish.

        What the drafter said of the drafts [R, K] is kept with them.
        """
        count = len(plan.lines)
        self._read.append((plan, table[:count, :HEADER].copy(), None if said is None else said[:count].copy()))

    def _learn(self) -> None:
        """Let the odds learn from all kept verdicts; rounds of the same rows are one call."""
        for _, group in groupby(self._read, key=lambda one: id(one[0].lines)):
            rounds = list(group)
            first, tables = rounds[0][0], np.stack([table for _, table, _ in rounds])
            accept, correct, drafted, finish = tables.transpose(2, 0, 1)
            verified, ended = np.minimum(drafted, self.depth), (finish != 0).astype(np.int64)
            if self.looks_up:  # a draft that was not found counts as a wrong one
                verified = np.array([plan.lens[: len(plan.lines)] for plan, _, _ in rounds]) - 1
            said = [line for _, _, line in rounds if line is not None]
            if isinstance(self.odds, SaidOdds) and said:
                made = [plan.drafted > 0 for plan, _, _ in rounds]
                self.odds.hear(first.lines, first.sampled, (verified, correct, ended), np.stack(said), made)
            else:
                self.odds.learn(first.lines, first.sampled, verified, correct, ended)
            self.record.tokens += int(accept.sum())
        for _, group in groupby(self._read, key=lambda one: id(one[0])):
            same = list(group)
            self._count_rounds(same[0][0], [table for _, table, _ in same])
        self._read.clear()

    def _count_rounds(self, plan: AheadPlan, tables: list[Ints]) -> None:
        """Count rounds of this plan for metrics."""
        record, lens, rounds = self.record, np.array([plan.lens[: len(plan.lines)]]), len(tables)
        if plan.odds is not None:  # the device chose them
            lens = 1 + np.stack([table[:, 2] for table in tables])
        for length, count in enumerate(np.bincount(lens.ravel())):
            if count:
                record.windows[length] += rounds // len(lens) * int(count)
        kind = "plain" if plan.tokens == plan.rows else "drafts" if lens.min() > 1 else "mixed"
        record.rounds[kind] += rounds
        record.expected_tokens += rounds * plan.expected


class ThresholdPlanner(AheadPlanner):
    """No plan by costs: all rows draft, and windows have the drafts whose confidence is above a threshold.

    The drafter offers no others. How many there are is known two rounds late, so a round verifies as many tokens as any
    of the last rounds would have taken, rounded up to a recorded size; what is left out is least likely to be right.
    """

    def __init__(self, depth: int, threshold: float) -> None:
        super().__init__(depth, AheadCosts({}), says=True)
        self.threshold = threshold
        self._usual = depth  # drafts above it of a request of which nothing is known yet

    def plan(self, requests: list[Request], rows: int) -> AheadPlan:
        self._rounds += 1
        if requests != self._requests:
            self._seat(requests)
        kept = self._plan
        if kept is not None and kept.rows == rows and self._rounds < self._due:
            return kept
        self._learn()
        assert isinstance(self.odds, SaidOdds)
        counts = np.minimum(self.odds.count_above(self._lines, self.threshold, self._usual), self._caps)
        self._usual = math.ceil(counts.mean())
        wanted, survivals = rows + int(counts.sum(axis=1).max()), self._survivals(rows).mean(axis=0)
        sizes = token_sizes(rows, self.depth)
        tokens = next((size for size in sizes if size >= wanted), sizes[-1])
        lens = allot(survivals, self.depth, tokens, window_width(rows, tokens, self.depth))
        offered = np.arange(self.depth) < counts.mean(axis=0)[:, None]
        expected = len(requests) + float(survivals[: len(requests)][offered].sum())
        table, self.drafted, self._due = self._table(rows), self.depth, self._rounds + KEPT
        found = rows, tokens, lens, self.depth, self._lines, self._sampled, expected, table, self.depth
        self._plan = AheadPlan(*found)
        return self._plan
