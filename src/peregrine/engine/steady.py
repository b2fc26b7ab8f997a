"""Rounds with as many drafts for every row, whatever the drafter says of them.

To plan a round draft by draft takes a CPU some hundred microseconds: a twentieth of a small model's round. Where the
better choice of drafts does not give that back, one number of drafts is chosen for many rounds, and they run as they
would with fixed windows: the same plan is repeated, and verdicts are taken in together when it is chosen anew.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from peregrine.engine.request import Request
from peregrine.engine.round_costs import RoundCosts
from peregrine.engine.round_times import FixedPlan, RoundTimes
from peregrine.kernels.round import FINISH_NONE
from peregrine.spec.odds import MOST, Odds

OddsOf = Callable[[Request], Odds]
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


class SteadyRounds:
    """Chooses the number of drafts, and learns from the rounds that have it."""

    def __init__(self, measured: RoundCosts) -> None:
        self.measured = measured
        self._rounds: list[tuple[SteadyPlan, Sequence[list[int]], RoundTimes]] = []  # verdicts and times to take in

    def choose(self, requests: Sequence[Request], odds_of: OddsOf, most: int) -> tuple[int, float]:
        """The number of drafts that gives the most tokens per millisecond, and how many these are.

        Chances are by depth alone, and of a request by its own record.
        """
        rows, kinds = len(requests), [odds_of(request) for request in requests]
        factors = [request.odds.factor_with(OWN_PRIOR) for request in requests]
        survivals, won, best, highest = [1.0] * rows, float(rows), 0, 0.0
        for depth in range(1, most + 1):
            for row, (odds, factor) in enumerate(zip(kinds, factors, strict=True)):
                survivals[row] *= min(MOST, odds.chance_at(depth - 1) * factor)
            won += sum(survivals)
            rate = won / self.measured.steady_ms(rows, depth)
            if rate < highest:
                break
            best, highest = depth, rate
        return best, highest

    def note(self, plan: SteadyPlan, lines: Sequence[list[int]], times: RoundTimes) -> None:
        """Keep the lines of a round's verdict, and its times."""
        self._rounds.append((plan, lines, times))

    def learn(self, odds_of: OddsOf) -> tuple[float, float]:
        """Take in the rounds that were kept; returns the milliseconds that they should take, and did."""
        total = took = 0.0
        verdicts: dict[Request, Counter[tuple[int, int]]] = defaultdict(Counter)
        for plan, lines, times in self._rounds:
            lens = plan.windows.lens
            for request, length, line in zip(plan.requests, lens, lines, strict=True):
                right, ended = line[1], line[3] != FINISH_NONE
                verdicts[request][min(length - 1, right + (not ended)), right] += 1
            total += self.measured.learn_steady(sum(lens), len(lens), plan.drafts or 0, times)
            took += times.ms
        for request, counts in verdicts.items():
            odds_of(request).judge_all(counts, request.odds)
        self._rounds.clear()
        return total, took
