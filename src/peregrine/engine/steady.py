"""Rounds with as many drafts for every row, whatever the drafter says of them.

To plan a round draft by draft takes a CPU some hundred microseconds: a twentieth of a small model's round. Where the
better choice of drafts does not give that back, one number of drafts is chosen for many rounds (`draft_number.py`), and
they run as they would with fixed windows: the same plan is repeated, and verdicts are taken in together when it is
chosen anew.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from peregrine.engine.plan_record import PlanRecord
from peregrine.engine.planned_rates import PlannedRate
from peregrine.engine.request import Request
from peregrine.engine.round_costs import PastRound, RoundCosts
from peregrine.engine.round_times import FixedPlan, RoundTimes
from peregrine.kernels.round import FINISH_NONE, HEADER
from peregrine.spec.odds import Ints, Odds
from peregrine.spec.state import Rows

OddsOf = Callable[[Request], Odds]
RateOf = Callable[[Sequence[Request]], PlannedRate | None]
EARLY = 16  # tokens, or the first quarter of an answer: drafts are right less often there
BRIEF = 12  # rounds with one plan: of fewer, drafts of an answer's beginning do not count, which say little of the rest


class SteadyPlan(FixedPlan):
    """Windows of these lengths, then as many drafts for every row; see `spec.windows.Plan`."""

    def __init__(self, requests: Sequence[Request], lens: Sequence[int], drafts: int) -> None:
        super().__init__(lens, drafts)
        self.requests, self.drafts, self.expected = tuple(requests), drafts, 0.0  # tokens
        self.drafted = list(range(len(lens)))
        self.offered = [length - 1 for length in lens]
        self.lasts = False  # it will be repeated so often that its size is worth recording at once

    def of_fixed(self, rows: Rows) -> Rows:
        """The rows with windows of this length, whose rounds need no plan."""
        return Rows(rows.count, rows.places, self.windows.width)

    def __reduce__(self) -> tuple[type["SteadyPlan"], tuple[Sequence[Request], tuple[int, ...], int]]:
        """Ranks that follow need no requests."""
        assert self.drafts is not None
        return SteadyPlan, ((), self.windows.lens, self.drafts)


@dataclass(slots=True)
class KeptRounds:
    """Rounds of one plan that followed each other, until they are taken in."""

    plan: SteadyPlan
    tables: list[Ints] = field(default_factory=list)  # the verdicts of each, [R, HEADER]
    timed: list[tuple[int, RoundTimes]] = field(default_factory=list)  # which of them were timed


class SteadyRounds:
    """Keeps such rounds, and learns from them when the next number of drafts is chosen."""

    def __init__(self, measured: RoundCosts) -> None:
        self.measured = measured
        # Verdicts to take in, and times, if a round was timed.
        self._kept: list[KeptRounds] = []

    def note(self, plan: SteadyPlan, table: Ints, times: RoundTimes | None) -> None:
        """Keep a round's verdict: [R, columns]; and its times, if it was timed."""
        if not self._kept or self._kept[-1].plan is not plan:
            self._kept.append(KeptRounds(plan))
        kept = self._kept[-1]
        if times is not None:
            kept.timed.append((len(kept.tables), times))
        kept.tables.append(table[:, :HEADER])

    def count(self, record: PlanRecord) -> None:
        """Count the rounds that are kept, as they will be when they are taken in."""
        for kept in self._kept.copy():
            tables = kept.tables.copy()
            tokens = sum(int(table[:, 0].sum()) for table in tables)
            record.note(kept.plan.windows.lens, tokens, kept.plan.expected, len(tables))

    def learn(self, odds_of: OddsOf, rate_of: RateOf, record: PlanRecord) -> None:
        """Take in the rounds that were kept."""
        self.measured.periods.compare()
        past, took = list[PastRound](), 0.0
        for requests, same in groupby(self._kept, key=lambda kept: kept.plan.requests):
            runs = list(same)
            counts = [len(run.tables) for run in runs]
            offered = np.repeat([run.plan.offered for run in runs], counts, axis=0)  # [n, R]
            tables = np.concatenate([table for run in runs for table in run.tables])
            won, right, _, finish = tables.reshape(*offered.shape, HEADER).transpose(2, 0, 1)  # [n, R]
            brief = np.repeat([count < BRIEF for count in counts], counts)
            self._judge(requests, offered, won, right, finish, brief, odds_of)
            rate, tokens, first = rate_of(requests), won.sum(axis=1).tolist(), 0
            for run, count in zip(runs, counts, strict=True):
                lens, drafts = run.plan.windows.lens, run.plan.drafts or 0
                record.note(lens, sum(tokens[first : first + count]), run.plan.expected, count)
                size = sum(lens), len(lens), drafts
                past += [PastRound(*size, times, tokens[first + number], rate) for number, times in run.timed]
                took += sum(times.ms for _, times in run.timed)
                first += count
        self._kept.clear()
        record.expected_ms += self.measured.learn_steady(past)
        record.ms += took

    def _judge(
        self,
        requests: Sequence[Request],
        offered: Ints,
        won: Ints,
        right: Ints,
        finish: Ints,
        brief: NDArray[np.bool_],
        odds_of: OddsOf,
    ) -> None:
        """Learn from verdicts on drafts, [n, R] each; in `brief` rounds [n] an answer's beginning does not count."""
        known = np.minimum(offered, right + (finish == FINISH_NONE))
        begun = np.array([request.num_generated for request in requests]) - won[::-1].cumsum(axis=0)[::-1]
        counted = ~brief[:, None] | (begun >= [min(EARLY, (r.limit - len(r.prompt)) // 4) for r in requests])
        drafts = deeper(np.stack((known * counted, right * counted)), offered.max())
        kinds = [odds_of(request) for request in requests]
        for odds in {id(kind): kind for kind in kinds}.values():
            rows = [row for row, kind in enumerate(kinds) if kind is odds]
            tried, good = drafts[:, rows]
            odds.judge_rounds(len(offered), tried, good, [requests[row].odds for row in rows])


def deeper(drafts: Ints, most: int) -> Ints:
    """In how many rounds a row had more drafts than 0, 1, ... most - 1, of two kinds: [2, n, R] -> [2, R, most]."""
    counts: Ints = (drafts[..., None] > np.arange(most)).sum(axis=1)
    return counts
