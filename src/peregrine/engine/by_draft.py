"""Rounds that are planned draft by draft: each row's window has the drafts that pay, by what the drafter says of them.

Verdicts are taken in at once, since the next windows depend on them; what rounds took, some rounds at a time.
"""

from collections import Counter
from collections.abc import Sequence

from peregrine.engine.branching import Branching
from peregrine.engine.draft_rows import DraftRows
from peregrine.engine.plan_record import PlanRecord
from peregrine.engine.request import Request
from peregrine.engine.round_costs import PlannedRound, RoundCosts
from peregrine.engine.round_plan import RoundPlan
from peregrine.engine.round_times import RoundTimes
from peregrine.engine.steady import RateOf
from peregrine.spec.odds import Floats, Ints

REFRESH = 16  # timed rounds after which plans see them


class RoundsByDraft:
    """Keeps what is known of their rows, and learns from them."""

    def __init__(self, measured: RoundCosts, odds: Floats, depth: int, branching: Branching | None) -> None:
        self.measured, self.branching = measured, branching
        self._odds, self._depth = odds, depth
        self._rows: DraftRows | None = None
        # Rounds that were not counted: their windows, and whether these branch.
        self._seen: Counter[tuple[tuple[int, ...], bool]] = Counter()
        self._timed: list[tuple[RoundPlan, RoundTimes, int]] = []  # with the tokens they gave

    def rows_of(self, requests: Sequence[Request]) -> DraftRows:
        """What is known of these rows; that of others is left to their requests."""
        if self._rows is None or self._rows.requests != requests:
            self.leave()
            self._rows = DraftRows.of(requests, self._odds, self._depth)
        return self._rows

    def leave(self) -> None:
        """Rounds are planned otherwise, or are of other requests."""
        if self._rows is not None:
            self._rows.leave()
            self._rows = None

    def rest(self, rounds: int) -> None:
        """The rows have rested for so many rounds."""
        if self._rows is not None:
            self._rows.rest(rounds)

    @property
    def are_due(self) -> bool:
        """Whether so many rounds were timed that plans should see them."""
        return len(self._timed) >= REFRESH

    def note(self, plan: RoundPlan, table: Ints, times: RoundTimes | None, record: PlanRecord) -> None:
        """Take in a round's verdict [R, columns], and keep its times, if it was timed."""
        won = plan.judge(table, self.branching)
        record.tokens += won
        record.expected_tokens += plan.expected
        self._seen[plan.windows.lens, plan.branched is not None] += 1
        if times is not None:
            self._timed.append((plan, times, won))

    def count(self, record: PlanRecord) -> None:
        """Count the windows of the rounds that were not counted, as they will be."""
        for (lens, branched), rounds in self._seen.items():
            for length, rows in Counter(lens).items():
                record.windows[length] += rows * rounds
            plain, same = max(lens) == 1, min(lens) > 1
            record.rounds["tree" if branched else "plain" if plain else "drafts" if same else "mixed"] += rounds

    def learn(self, rate_of: RateOf, record: PlanRecord) -> None:
        """Take in what rounds took; the tokens of those that drafted for all rows count for their rate."""
        self.count(record)
        self._seen.clear()
        rounds, requests, known = [], None, None
        for plan, times, won in self._timed:
            if plan.requests is not requests:
                requests, known = plan.requests, rate_of(plan.requests)
            usual = plan.rows is None and not plan.probe
            rate = known if usual and plan.steps else None
            rounds.append(PlannedRound(plan.windows, plan.steps, plan.branched is not None, usual, times, won, rate))
            record.ms += times.ms
        self._timed.clear()
        record.expected_ms += self.measured.learn_planned(rounds)
