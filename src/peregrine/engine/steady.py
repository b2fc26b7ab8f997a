"""Rounds with as many drafts for every row, whatever the drafter says of them.

To plan a round draft by draft takes a CPU some hundred microseconds: a twentieth of a small model's round. Where the
better choice of drafts does not give that back, one number of drafts is chosen for many rounds, and they run as they
would with fixed windows: the same plan is repeated, and verdicts are taken in together when it is chosen anew.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate

from peregrine.engine.request import Request
from peregrine.engine.round_costs import PlannedRate, RoundCosts
from peregrine.engine.round_times import FixedPlan, RoundTimes
from peregrine.kernels.round import FINISH_NONE
from peregrine.spec.odds import MOST, Odds
from peregrine.spec.planner import Costs, depth_plan, plan_depths

OddsOf = Callable[[Request], Odds]
RateOf = Callable[[Sequence[Request]], PlannedRate | None]
CHANGED = 1.03  # times as many tokens, by which another number of drafts must be better: to change costs time
UNLIKE = 1.2  # times as often as another's a row's first draft is right, where rows may deserve their own numbers
PLANNING = 1.05  # times a round's time, if it is planned draft by draft
OWN_PRIOR = 24.0  # drafts for which it counts that a request is like others: one number is chosen for many rounds


class SteadyPlan(FixedPlan):
    """Windows of these lengths, then as many drafts for every row; see `spec.windows.Plan`."""

    def __init__(self, requests: Sequence[Request], lens: Sequence[int], drafts: int) -> None:
        super().__init__(lens, drafts)
        self.requests, self.drafts, self.expected = tuple(requests), drafts, 0.0  # tokens
        self.drafted = list(range(len(lens)))
        self.offered = [length - 1 for length in lens]

    def __reduce__(self) -> tuple[type["SteadyPlan"], tuple[Sequence[Request], tuple[int, ...], int]]:
        """Ranks that follow need no requests."""
        assert self.drafts is not None
        return SteadyPlan, ((), self.windows.lens, self.drafts)


def survivals(odds: Odds, factor: float, most: int) -> list[float]:
    """The chance of each of a row's drafts that it and all before it are right, whatever is said of them."""
    survival, line = 1.0, []
    for depth in range(most):
        survival *= min(MOST, odds.chance_at(depth) * factor)
        line.append(survival)
    return line


class SteadyRounds:
    """Chooses the number of drafts, and learns from the rounds that have it."""

    def __init__(self, measured: RoundCosts) -> None:
        self.measured = measured
        self._last: dict[int, int] = {}  # what was chosen for so many rows
        self._rounds: list[tuple[SteadyPlan, Sequence[list[int]], RoundTimes]] = []  # verdicts and times to take in

    def choose(self, requests: Sequence[Request], odds_of: OddsOf, most: int) -> tuple[int, float]:
        """The number of drafts that gives the most tokens per millisecond, and how many these are.

        Chances are by depth alone, and of a request by its own record.
        """
        rows, rates = len(requests), [0.0]
        lines = [survivals(odds_of(r), r.odds.factor_with(OWN_PRIOR), most) for r in requests]
        won = accumulate(map(sum, zip(*lines, strict=True)), initial=float(rows))
        rates += [tokens / self.measured.steady_ms(rows, n) for n, tokens in enumerate(won) if n]
        best = max(range(1 + most), key=rates.__getitem__)
        if (last := self._last.get(rows, best)) <= most and rates[best] < CHANGED * rates[last]:
            best = last
        self._last[rows] = best
        return best, rates[best]

    def hope(self, requests: Sequence[Request], odds_of: OddsOf, drafts: int, costs: Costs, branches: bool) -> float:
        """How many times as many tokens rows may have, if each has its own number of drafts or its chain branches.

        Not tried, it would not be learnt; but trying takes time where rows are alike and reading tokens is not cheap.
        """
        rows, gains = len(requests), [0.0]
        lines = [survivals(odds_of(r), r.odds.factor_with(OWN_PRIOR), drafts) for r in requests]
        same = depth_plan(costs, lines, [drafts] * rows)
        firsts = [line[0] for line in lines]
        if max(firsts) > UNLIKE * min(firsts):
            gains.append(plan_depths(costs, lines).rate / same.rate)
        if branches:
            more, tokens = sum(1 - first for first in firsts) / 2, rows * (1 + drafts)
            ms = costs.verify_ms(tokens + rows) - costs.verify_ms(tokens) + costs.branched
            gains.append((same.tokens + more) / (same.ms + ms) / same.rate)
        return max(gains) / PLANNING

    def note(self, plan: SteadyPlan, lines: Sequence[list[int]], times: RoundTimes) -> None:
        """Keep the lines of a round's verdict, and its times."""
        self._rounds.append((plan, lines, times))

    def learn(self, odds_of: OddsOf, rate_of: RateOf) -> tuple[float, float]:
        """Take in the rounds that were kept; returns the milliseconds that they should take, and did."""
        total = took = 0.0
        verdicts: dict[Request, Counter[tuple[int, int]]] = defaultdict(Counter)
        rounds: dict[SteadyPlan, list[Sequence[list[int]]]] = defaultdict(list)
        for plan, lines, times in self._rounds:
            lens = plan.windows.lens
            rounds[plan].append(lines)
            won, rate = sum(line[0] for line in lines), rate_of(plan.requests)
            total += self.measured.learn_steady(sum(lens), len(lens), plan.drafts or 0, times, won, rate, alone=False)
            took += times.ms
        for plan, many in rounds.items():
            for row, (request, length) in enumerate(zip(plan.requests, plan.windows.lens, strict=True)):
                for (right, end), count in Counter([(lines[row][1], lines[row][3]) for lines in many]).items():
                    verdicts[request][min(length - 1, right + (end == FINISH_NONE)), right] += count
        for request, counts in verdicts.items():
            odds_of(request).judge_all(counts, request.odds)
        self._rounds.clear()
        return total, took
