"""Chooses the windows of every round on a CPU: what is verified now, and which rows are drafted for next.

The choice is by measured costs (`engine/round_costs.py`) and learnt odds (`spec/odds.py`), through the pure functions
of `spec/planner.py`. It changes speed, never a token. Every so many rounds it is decided whether they are planned draft
by draft, have one number of drafts for all rows (`engine/draft_number.py`), or none. Those of one row have a form of
their own (`engine/alone.py`).

All rows are drafted for or none, but for a probe, which drafts for a few. In a round without drafts the drafter is not
called, and what it missed is read before the next draft (`engine/missed.py`).
"""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from peregrine.engine.alone import LonePlan, LoneRounds, lone_rule
from peregrine.engine.branching import Branching
from peregrine.engine.by_draft import RoundsByDraft
from peregrine.engine.draft_number import DraftNumber
from peregrine.engine.missed import Missed
from peregrine.engine.plan_record import PlanRecord
from peregrine.engine.planned_rates import UNSEEN, PlannedRate, PlannedRates
from peregrine.engine.probes import Probes
from peregrine.engine.request import Request
from peregrine.engine.round_costs import RoundCosts
from peregrine.engine.round_plan import RoundPlan, expected_survivals
from peregrine.engine.round_times import RoundTimes
from peregrine.engine.steady import SteadyPlan, SteadyRounds
from peregrine.spec.odds import Ints, Odds, calibration_error, odds_by_kind
from peregrine.spec.planner import Costs, plan_depths

KEPT, MOST_KEPT = 16, 128  # rounds for which it is decided whether to draft; twice as many each time that it stays so
KEPT_BY_DRAFT = 256  # the most of rounds that are planned draft by draft: their windows change by themselves
FEWER = 8  # rounds for which it is kept if some requests have ended
MOST_RESTED = 512  # where rows rest: nothing is learnt there, so that only a trial can change the decision
JUDGED = 150  # drafts with a verdict before rounds count for the rate of planned ones: the odds have to be learnt first
AnyPlan = RoundPlan | SteadyPlan | LonePlan


class WindowPlanner:
    """Plans rounds, and learns from them."""

    def __init__(
        self, depth: int, measured: RoundCosts, looks_up: bool, room: int = 0, max_stall_ms: float = math.inf
    ) -> None:
        self.depth, self.measured, self.looks_up = depth, measured, looks_up
        self.branching = Branching(room) if room else None  # None: chains never branch
        self.costs: Costs = measured.costs()
        self._costs_of: dict[int, Costs] = {}
        self.rate = 0.0  # tokens per millisecond that time is worth
        self._record, self.rates = PlanRecord(), PlannedRates()
        self._rounds, self.probes = 0, Probes()
        self._probing = 0  # drafts of each row that the last round made for a probe
        lines, self._odds = odds_by_kind()  # by whether a request is sampled
        self._planned: list[Request] = []  # for whom `_drafted` was chosen
        self._drafted: list[int] = []  # rows that are drafted for
        self._everyone: list[int] = []  # all rows
        self._wanted = 0  # drafts that are made in any case, for trees that were asked for
        self._due = 0  # the round after which they are chosen anew
        self.missed = Missed(measured, max_stall_ms)
        self.number = DraftNumber(measured, self.missed)
        self.steady, self.alone = SteadyRounds(measured), LoneRounds(measured)
        self.by_draft = RoundsByDraft(measured, lines, depth, self.branching)
        self._drafts = 0  # of every row, if it is one number for all
        self._resting: dict[int, bool] = {}  # whether so many rows rest, by the last decision
        self._last: dict[int, tuple[bool, int, int]] = {}  # so many rows: if by draft, drafts, rounds it was kept for
        self._rounds_of: Counter[int] = Counter()  # rounds of so many rows
        self.catches_up = False  # rows will be drafted for, and the drafter reads what it missed between rounds
        self._probes = False  # whether a few rows are drafted for now and then
        self._expected_tokens = 0.0  # of rounds that have as many
        self._decided = self._counted = 0  # the rounds before which it was decided, and `_rounds_of` were counted
        self._again: RoundPlan | SteadyPlan | None = None  # what may be repeated: all rows rest, or have as many
        self._rested, self._began = 0, 0.0  # how often rows have rested by it; seconds when the last such round began

    @property
    def record(self) -> PlanRecord:
        """What was planned and what came of it until now."""
        record, plan = self._record.copy(), self._again
        if plan is not None and plan.rests:
            record.note_rests(len(plan.requests), self._rested)
        for rounds in (self.steady, self.alone, self.by_draft):
            rounds.count(record)
        return record

    def odds(self, request: Request) -> Odds:
        return self._odds[request.params.temperature > 0]

    def costs_of(self, rows: int) -> Costs:
        """Where every step is made for so many rows."""
        costs = self._costs_of.get(rows)
        if costs is None:
            costs = self._costs_of[rows] = self.costs.of_all(rows)
        return costs

    def cap_of(self, request: Request) -> int:
        """The most drafts a request may have after the round to come."""
        asked, room = request.params.num_drafts, request.limit - request.num_tokens - 1
        return max(0, min(self.depth if asked is None else asked, room))

    @property
    def calibration_error(self) -> float:
        """Of greedy and sampled requests together."""
        return calibration_error(self._odds.values())

    def repeat(self, requests: list[Request]) -> AnyPlan | None:
        """The last plan once more, if it serves and nothing else is due: planning would cost what it saves."""
        plan = self._again
        if plan is None or self._rounds + 1 >= self._due or self._planned != requests:
            return None
        if plan.rests and self._probes and self._rounds + 1 >= self.probes.due:
            return None
        self._rounds += 1
        self._rested += plan.rests
        before, self._began = self._began, time.perf_counter()
        if before:
            self.measured.periods.note(1e3 * (self._began - before))
        return plan

    def rests_with(self, rows: int) -> bool:
        """Whether so many requests, if they come now, will not be drafted for."""
        self._count_rounds()
        return self._resting.get(rows, False) and not self.number.is_trial_due(rows, self._rounds_of[rows])

    def missed_tokens_now(self, requests: list[Request]) -> int:
        """How many of the tokens that it missed the drafter reads before the next round, while rows still rest."""
        self._began = 0.0  # no time of a round alone
        if requests == self._planned and (count := self.missed.tokens_at_once(requests)) is not None:
            return count
        self._due, self.catches_up = 0, False  # the rest is soon read
        return 0

    def plan(self, requests: list[Request], offered: Sequence[int]) -> AnyPlan:
        """The plan of the next round of the requests in these rows, whose windows hold this many drafts."""
        self._began = 0.0
        if self._rounds + 1 >= self._due or not (requests == self._planned or self._goes_on_with(requests)):
            self._decide(requests)
        ranks = 0
        if self.alone.rule is not None:
            ranks = self._ranks(requests)
            if ranks == 1 and not requests[0].ranked:
                self._rounds, self._probing = self._rounds + 1, 0
                self.by_draft.leave()
                return self.alone.plan(requests, offered[0])
        if self.alone.last is not None:
            self.alone.settle(self.odds)
        if self._drafts:
            return self._plan_steady(requests, offered)
        return self._plan_by_draft(requests, offered, ranks)

    def _plan_by_draft(self, requests: list[Request], offered: Sequence[int], ranks: int) -> RoundPlan:
        """Windows of the drafts that pay; `ranks` that are asked for, 0: not known yet."""
        if self._rested:
            self._count_rests()
        self._rounds += 1
        rows, wanted = self.by_draft.rows or self.by_draft.rows_of(requests), self._wanted
        drafted = self._everyone if self.looks_up or wanted else self._drafted
        probe = self.probes.depth(self._rounds, map(self.cap_of, requests)) if self._probes else 0
        if probe and drafted is self._drafted:
            drafted = sorted({*drafted, *self.probes.rows(requests)})
        probing, any_offered = self._probing, any(offered)
        lens, won = self.by_draft.choose(rows, self.costs, offered, self.rate, probing > 0 or not any_offered)
        branched = None
        if self.by_draft.ranked and any_offered and (wanted or not probing):
            more = self.measured.planning_ms if self.alone.rule is not None else 0.0
            costs = replace(self.costs, branched=self.costs.branched + more)
            lens, won, branched = self.by_draft.branch(rows, costs, lens, won, self.rate)
        if not ranks:
            ranks = self._ranks(requests) if drafted else 1
        plan = RoundPlan(self, rows, lens, drafted, branched, ranks)
        self._probing, plan.probe = probe, max(probe, wanted)
        plan.expected = len(requests) + won
        self._again = plan if plan.rests else None
        return plan

    def _ranks(self, requests: list[Request]) -> int:
        """How many of the likeliest tokens of each step the drafter is asked for."""
        if self.branching is None:
            return 1
        return self.branching.ranks(requests, self.rate * self.costs.branched, self._wanted)

    def _goes_on_with(self, requests: list[Request]) -> bool:
        """If some of the requests have ended, the decision is kept for a while: others often end soon after them."""
        if self._drafted or self._drafts > self._most(requests) or not set(requests) < set(self._planned):
            return False
        self._count_rests()
        self._count_rounds()
        self.measured.periods.begin(None, goes_on=False)
        self._again, self._due = None, min(self._due, self._rounds + FEWER)
        self._set_rows(requests)
        return True

    def _set_rows(self, requests: list[Request]) -> None:
        """These are planned for from now on."""
        if requests != self._planned:
            self.by_draft.leave()
        self._planned, self._everyone = requests.copy(), list(range(len(requests)))
        self._wanted = self.branching.wants(requests) if self.branching is not None else 0

    def _count_rounds(self) -> None:
        self._rounds_of[len(self._planned)] += self._rounds - self._counted
        self._counted = self._rounds

    def _decide(self, requests: list[Request]) -> None:
        """Decide for some rounds whether rows get drafts: each as it deserves them, or one number for all."""
        self._take_in()
        self._again = self.alone.rule = None
        rows, trial, usual = len(requests), 0, 1
        *before, kept = self._last.get(rows, (False, 0, KEPT))
        goes_on, passed = requests == self._planned, self._rounds - self._decided
        self._count_rounds()
        plain, measured = rows / self.measured.steady_ms(rows, 0), self.rates.of(requests)
        by_draft = self.looks_up or any(r.matcher is not None or r.params.tree == "tree" for r in requests)
        if by_draft:
            following = plan_depths(self.costs_of(rows), expected_survivals(requests, self._odds, self.cap_of))
            drafts, foreseen = max(following.depths), following.rate
        else:
            chosen = self.number.choose(requests, self.odds, self._most(requests), self._rounds_of[rows], goes_on)
            drafts, self._expected_tokens, foreseen, trial, usual = chosen
        (rate,) = self.missed.net(requests, [measured.value(foreseen)]) if foreseen else (0.0,)
        planned = rate > plain and (rows == 1 or (by_draft and drafts > 0))
        if not planned and not trial and drafts and rate > plain:
            steady = self.rates.of(requests, steady=True).value(foreseen, UNSEEN)
            hope = self.number.hope(requests, self.odds, drafts, self.costs_of(rows), self.branching is not None)
            planned = measured.value(steady, hope) > steady
        self._resting[rows] = not (planned or usual)
        self.catches_up = (planned or drafts > 0) and self.missed.tokens_at_once(requests) is not None
        if self.catches_up:
            planned, drafts = False, 0
        self._set_rows(requests)
        self._drafted = self._everyone if planned else []
        self._drafts = 0 if planned or by_draft else drafts
        self._probes = by_draft  # others are tried by one number of drafts for all
        self.measured.periods.begin(None if planned or by_draft else (rows, self._drafts), goes_on)
        same = before == [planned, self._drafts] and (goes_on or not planned)
        most = MOST_RESTED if self._resting[rows] else KEPT_BY_DRAFT if planned and rows > 1 else MOST_KEPT
        if planned or not trial:  # after a trial, what was decided before it is kept as long
            trial = kept = min(most, 2 * kept) if same else KEPT
            self._last[rows] = planned, self._drafts, kept
        self._due = self._rounds + trial
        self.rate = max(plain, rate)  # only planned rounds ask for it
        if planned and rows == 1 and not by_draft:
            kind, own = self.odds(requests[0]), requests[0].odds
            self.alone.rule = lone_rule(self.measured.replayed(), kind, own, self.rate, self._most(requests))
        self._decided = self._rounds
        measured.fade(0 if planned else passed)
        self.rates.of(requests, steady=True).fade(0 if self._drafts else passed)

    def _take_in(self) -> None:
        """Learn from the rounds whose verdicts or times were kept."""
        self._count_rests()
        self.by_draft.tell()
        self.steady.learn(self.odds, partial(self.rates.of, steady=True), self._record)
        self.alone.learn(self.odds, self._known_rate, self._record)
        self.by_draft.learn(self._known_rate, self._record)
        self.costs, self._costs_of = self.measured.costs(), {}

    def _count_rests(self) -> None:
        """Count the rounds in which all rows rested, and let what is known of the rows fade."""
        if self._again is not None and self._rested:
            self._record.note_rests(len(self._again.requests), self._rested)
            self.by_draft.rest(self._rested)
        self._rested = 0

    def _most(self, requests: Sequence[Request]) -> int:
        """The most drafts that all of them may have."""
        return min(self.depth if r.params.num_drafts is None else r.params.num_drafts for r in requests)

    def _known_rate(self, requests: Sequence[Request]) -> PlannedRate | None:
        """What planned rounds give; None while the odds are not known yet."""
        return self.rates.of(requests) if self.odds(requests[0]).num_judged >= JUDGED else None

    def _plan_steady(self, requests: Sequence[Request], offered: Sequence[int]) -> SteadyPlan:
        """The drafts that there are, up to the number for all; the rounds after it have just that many."""
        self._rounds += 1
        self._probing = 0
        self.by_draft.leave()
        for request in requests:
            request.guesses, request.ranked = [], []
        drafts = self._drafts
        plan = again = SteadyPlan(requests, [1 + min(drafts, count) for count in offered], drafts)
        if plan.windows.lens != (1 + drafts,) * len(requests):
            again = SteadyPlan(requests, [1 + drafts] * len(requests), drafts)
            plan.expected = float(len(requests)) if plan.windows.lens[0] == 1 else self._expected_tokens
        self._again, again.expected, again.lasts = again, self._expected_tokens, self._due >= self._rounds + FEWER
        return plan

    def learn(self, plan: AnyPlan, table: Ints, times: RoundTimes | None) -> None:
        """Take in a round's verdict [R, columns], and its times, if it was timed.

        Drafts after the first wrong one have no verdict.
        """
        if isinstance(plan, SteadyPlan):
            return self.steady.note(plan, table, times)
        if isinstance(plan, LonePlan):
            return self.alone.note(plan, table, times)
        self.by_draft.note(plan, table, times)
