"""Rounds that are planned draft by draft: each row's window has the drafts that pay, by what the drafter says of them.

Verdicts are taken in when the next windows are chosen, which depend on them; what rounds took, some rounds at a time.
"""

from collections import Counter, deque
from collections.abc import Sequence

from peregrine.engine.branching import Branching
from peregrine.engine.draft_rows import DraftRows
from peregrine.engine.plan_record import PlanRecord
from peregrine.engine.request import Request
from peregrine.engine.round_costs import PlannedRound, RoundCosts
from peregrine.engine.round_plan import RoundPlan
from peregrine.engine.round_times import RoundTimes
from peregrine.engine.steady import RateOf
from peregrine.spec.links import Branched
from peregrine.spec.odds import Floats, Ints
from peregrine.spec.planner import Costs

LATEST = 16  # timed rounds that are taken in together; earlier ones are forgotten


class RoundsByDraft:
    """Keeps what is known of their rows, and learns from them."""

    def __init__(self, measured: RoundCosts, odds: Floats, depth: int, branching: Branching | None) -> None:
        self.measured, self.branching = measured, branching
        self.ranked = False  # whether requests hold the tokens that the drafts in their windows were among
        self._odds, self._depth = odds, depth
        self.rows: DraftRows | None = None  # of the rounds at the moment
        self._last: tuple[RoundPlan, Ints] | None = None  # a round whose verdicts are still to be taken in
        # Of the rounds that are not counted yet: windows, and whether they branch; tokens, and how many were expected.
        self._windows: list[tuple[tuple[int, ...], bool]] = []
        self._won, self._expected = 0, 0.0
        self._timed: deque[tuple[RoundPlan, RoundTimes]] = deque(maxlen=LATEST)

    def rows_of(self, requests: Sequence[Request]) -> DraftRows:
        """What is known of these rows; that of others is left to their requests."""
        if self.rows is None or self.rows.requests != requests:
            self.leave()
            self.rows = DraftRows.of(requests, self._odds, self._depth)
            self.ranked = self.branching is not None and any(request.ranked for request in requests)
        return self.rows

    def leave(self) -> None:
        """Rounds are planned otherwise, or are of other requests."""
        self.tell()
        self.rows = None

    def tell(self) -> None:
        """Give the requests what is known of them."""
        if self.rows is not None:
            self._settle()
            self.rows.tell()

    def rest(self, rounds: int) -> None:
        """The rows have rested for so many rounds."""
        if self.rows is not None:
            self._settle()
            self.rows.rest(rounds)

    def choose(
        self, rows: DraftRows, costs: Costs, offered: Sequence[int], rate: float, whole: bool
    ) -> tuple[tuple[int, ...], float]:
        """`DraftRows.choose`, after the verdicts that are still to be taken in."""
        if self._last is None:
            lens, expected, _ = rows.choose(costs, offered, rate, whole)
            return lens, expected
        plan, verdicts = self._last
        self._last = None
        lens, expected, plan.won = rows.choose(costs, offered, rate, whole, verdicts)
        self._won += plan.won
        return lens, expected

    def branch(
        self, rows: DraftRows, costs: Costs, lens: tuple[int, ...], won: float, rate: float
    ) -> tuple[tuple[int, ...], float, Branched | None]:
        """The same with branches, if they pay: chains, the tokens that drafts are expected to give, and the windows."""
        assert self.branching is not None
        chances = [rows.chances(row) for row in range(len(lens))]
        chains, branched, gain = self.branching.choose(costs, rows.requests, lens, chances, rate)
        return chains, (won if chains == lens else rows.won(chains)) + gain, branched

    def note(self, plan: RoundPlan, table: Ints, times: RoundTimes | None) -> None:
        """Keep a round's verdict [R, columns], and its times, if it was timed."""
        self._last = plan, table
        self._windows.append((plan.windows.lens, plan.branched is not None))
        self._expected += plan.expected
        if times is not None:
            self._timed.append((plan, times))
        if self.ranked or plan.ranked:
            self._settle()

    def _settle(self) -> None:
        """Take in the verdicts of the last round."""
        if self._last is not None:
            plan, verdicts = self._last
            plan.judge(verdicts, self.branching)
            self._won += plan.won
            self._last, self.ranked = None, len(plan.ranked) > 0

    def count(self, record: PlanRecord) -> None:
        """Count the rounds that are not counted, as they will be."""
        for (lens, branched), rounds in Counter(self._windows).items():
            for length, rows in Counter(lens).items():
                record.windows[length] += rows * rounds
            plain, same = max(lens) == 1, min(lens) > 1
            record.rounds["tree" if branched else "plain" if plain else "drafts" if same else "mixed"] += rounds
        record.tokens += self._won
        record.expected_tokens += self._expected
        if (last := self._last) is not None:
            record.tokens += len(last[1]) + int(last[1][:, 1].sum())

    def learn(self, rate_of: RateOf, record: PlanRecord) -> None:
        """Take in what rounds took; the tokens of those that drafted for all rows count for their rate."""
        self._settle()
        self.count(record)
        self._windows.clear()
        self._won, self._expected = 0, 0.0
        rounds, requests, known = [], None, None
        for plan, times in self._timed:
            if plan.requests is not requests:
                requests, known = plan.requests, rate_of(plan.requests)
            usual, branches = plan.rows is None and not plan.probe, plan.branched is not None
            rate = known if usual and plan.stamps else None
            rounds.append(PlannedRound(plan.windows, plan.steps, branches, usual, times, plan.won, rate))
            record.ms += times.ms
        self._timed.clear()
        record.expected_ms += self.measured.learn_planned(rounds)
