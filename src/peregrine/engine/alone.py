"""Rounds of one request alone: drafts are made, and verified, while the drafter is sure enough of them.

That is the rule of `engine/round_plan.py`, whose planning takes 0.4 ms of a small model's round of 6. Of one row the
rule is a comparison for each draft. What it compares with follows from costs and odds, and is computed for some rounds
at once (`Gates`); verdicts are taken in together, too.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from torch import Tensor

from peregrine.engine.plan_record import PlanRecord
from peregrine.engine.request import Request
from peregrine.engine.round_costs import PastRound, RoundCosts
from peregrine.engine.round_times import RoundTimes
from peregrine.engine.steady import OddsOf, RateOf
from peregrine.kernels.round import FINISH_NONE
from peregrine.spec.links import Branched
from peregrine.spec.odds import DEPTHS, EDGES, Odds, RequestOdds, survivals_of
from peregrine.spec.planner import Costs
from peregrine.spec.windows import Windows


@dataclass(frozen=True, slots=True)
class Gates:
    """What drafts are compared with in the next rounds."""

    chances: tuple[tuple[float, ...], ...]  # of a draft, by depth and by the range of what the drafter says of it
    least: tuple[float, ...]  # after one draft, two and so on: the survival above which another one is made
    spent: tuple[float, ...]  # tokens that the time to verify no draft, one, two and so on would give elsewhere

    @classmethod
    def of(cls, costs: Costs, odds: Odds, own: RequestOdds, rate: float, depth: int) -> "Gates":
        """Where time is worth `rate` tokens per millisecond, and a window holds `depth` drafts at most."""
        least = [
            rate * (costs.read_ms(2 + made) - costs.read_ms(1 + made) + costs.step_ms(1, made)) / odds.expect(made, own)
            for made in range(1, depth)
        ]
        worth = max(rate, costs.plain_rate(1))
        spent = [worth * (costs.verify_ms(1 + count) - costs.verify_ms(1)) for count in range(depth + 1)]
        return cls(odds.chances_with(own), (*least, inf), tuple(spent))

    def verified(self, survivals: Sequence[float]) -> int:
        """How many of a chain's drafts are verified: those that win the most tokens, net of their time."""
        best, count, won = 0.0, 0, 0.0
        for number, survival in enumerate(survivals, 1):
            won += survival
            if won - self.spent[number] > best:
                best, count = won - self.spent[number], number
        return count


class LonePlan:
    """The plan of one round; see `spec.windows.Plan`."""

    rests, ranks = False, 1
    drafts: int | None = None
    rows: Tensor | None = None
    branched: Branched | None = None

    def __init__(self, gates: Gates, length: int, requests: Sequence[Request] = (), read: Sequence[float] = ()) -> None:
        self.gates, self.requests, self.drafted = gates, tuple(requests), [0]
        self.windows = self.paths = Windows.of((length,))
        self.offered = [length - 1]
        self.expected = 1.0  # tokens of this round
        self.read = read  # what the drafter said of the drafts that this round verifies
        self.said: list[float] = []  # of those that it makes
        self.survivals: list[float] = []

    def __reduce__(self) -> tuple[type["LonePlan"], tuple[Gates, int]]:
        """Ranks that follow need no request."""
        return LonePlan, (self.gates, self.windows.lens[0])

    def add(self, chances: Tensor, ranked: tuple[Tensor, Tensor] | None = None) -> None:
        (said,), depth = chances.tolist(), len(self.said)
        chance = self.gates.chances[min(depth, DEPTHS - 1)][bisect(EDGES, said)]
        self.said.append(said)
        self.survivals.append(self.survivals[-1] * chance if depth else chance)

    def go_on(self) -> bool:
        return self.survivals[-1] > self.gates.least[len(self.said) - 1]

    def depths(self) -> int:
        return len(self.said)

    def force(self, forced: Tensor) -> None:
        """A request with a grammar has other plans."""


class LoneRounds:
    """Plans such rounds, and learns from them."""

    def __init__(self, measured: RoundCosts) -> None:
        self.measured = measured
        self.gates: Gates | None = None  # None: rounds are planned otherwise
        self._last: LonePlan | None = None  # whose drafts are in the window
        self._rounds: list[tuple[LonePlan, list[int], RoundTimes]] = []  # verdicts and times to take in

    def plan(self, requests: Sequence[Request], offered: int) -> LonePlan:
        """The next round of a request whose window holds so many drafts."""
        assert self.gates is not None
        last = self._last
        if last is not None and last.requests[0] is requests[0]:
            said, survivals = last.said, last.survivals
        else:
            guesses = requests[0].guesses
            said = [guess.chance if guess.said is None else guess.said for guess in guesses]
            survivals = survivals_of(guesses)
        count = self.gates.verified(survivals[:offered])
        self._last = LonePlan(self.gates, 1 + count, requests, said[:count])
        self._last.expected = 1.0 + sum(survivals[:count])
        return self._last

    def settle(self, odds_of: OddsOf) -> None:
        """The next round is planned otherwise: leave its request what is known of the drafts in its window."""
        if self._last is not None:
            (request,) = self._last.requests
            odds = odds_of(request)
            made = enumerate(self._last.said)
            request.guesses = [odds.guess(depth, said, request.odds, counts=False) for depth, said in made]
            request.ranked, self._last = [], None

    def note(self, plan: LonePlan, line: list[int], times: RoundTimes) -> None:
        """Keep the line of a round's verdict, and its times."""
        self._rounds.append((plan, line, times))

    def learn(self, odds_of: OddsOf, rate_of: RateOf, record: PlanRecord) -> None:
        """Take in the rounds that were kept.

        Their tokens count for the rate of rounds that are planned draft by draft.
        """
        past, took = list[PastRound](), 0.0
        for plan, line, times in self._rounds:
            (request,), right, ended = plan.requests, line[1], line[3] != FINISH_NONE
            known = min(len(plan.read), right + (not ended))
            odds = odds_of(request)
            odds.judge_line(plan.read[:known], right, request.odds)
            for depth, said in enumerate(plan.said):
                odds.guess(depth, said, request.odds)
            drafts, rate = len(plan.said), rate_of(plan.requests)
            past.append(PastRound(1 + len(plan.read), 1, drafts, times, right + 1, rate))
            took += times.ms
        self._rounds.clear()
        record.expected_ms += self.measured.learn_steady(past, alone=True)
        record.ms += took
