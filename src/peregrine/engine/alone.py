"""Rounds of one request alone: drafts are made, and verified, while the drafter is sure enough of them.

That is the rule of `engine/round_plan.py`, whose planning takes 0.2 ms of a small model's round of 4. Of one row the
rule is a comparison for each draft. What it compares with follows from costs and odds, and is computed for some rounds
at once; so the drafter need not ask between its steps (`kernels/round/gate.py`), and verdicts are taken in together.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from math import inf, isnan

import numpy as np
from torch import Tensor

from peregrine.engine.plan_record import PlanRecord
from peregrine.engine.request import Request
from peregrine.engine.round_costs import PastRound, RoundCosts
from peregrine.engine.round_times import RoundTimes
from peregrine.engine.steady import OddsOf, RateOf
from peregrine.kernels.round import FINISH_NONE, HEADER, GateRule
from peregrine.spec.links import Branched
from peregrine.spec.odds import EDGES, Floats, Ints, Odds, RequestOdds, survivals
from peregrine.spec.planner import Costs
from peregrine.spec.windows import Windows


def lone_rule(costs: Costs, odds: Odds, own: RequestOdds, rate: float, depth: int) -> GateRule:
    """Where time is worth `rate` tokens per millisecond, and a window holds `depth` drafts at most."""
    least = [
        rate * (costs.read_ms(2 + made) - costs.read_ms(1 + made) + costs.step_ms(1, made)) / odds.expect(made, own)
        for made in range(1, depth)
    ]
    worth = max(rate, costs.plain_rate(1))
    spent = [worth * (costs.verify_ms(1 + count) - costs.verify_ms(1)) for count in range(depth + 1)]
    return GateRule(EDGES, odds.chances_with(own), (*least, inf), tuple(spent))


NOTHING = np.zeros(1)


def line_of(said: Sequence[float]) -> Floats:
    """How many drafts there are, and what is said of each."""
    return np.array([float(len(said)), *said])


def stacked(lines: Sequence[Floats]) -> Floats:
    """Such lines as one array [n, longest]; few rounds have lines of unlike lengths."""
    widths = set(map(len, lines))
    same = len(widths) == 1
    return np.array(lines if same else [np.pad(line, (0, max(widths) - len(line))) for line in lines])


def expected_tokens(rule: GateRule, offered: Ints, read: Floats) -> float:
    """Of rounds that verify so many [n] of the drafts in the window, of which this was said: [n, 1 + K]."""
    said = read[:, 1:]
    levels = np.minimum(np.arange(said.shape[1]), len(rule.chances) - 1)
    chances = np.array(rule.chances)[levels, np.searchsorted(rule.edges, said, side="right")]
    verified = np.arange(said.shape[1]) < offered[:, None]
    return len(read) + float((chances.cumprod(axis=1) * verified).sum())


class LonePlan:
    """The plan of one round; see `spec.windows.Plan`."""

    rests, ranks = False, 1
    drafts: int | None = None
    rows: Tensor | None = None
    branched: Branched | None = None

    def __init__(self, rule: GateRule, length: int, requests: Sequence[Request] = (), read: Floats = NOTHING) -> None:
        self.rule, self.requests, self.drafted = rule, tuple(requests), [0]
        self.windows = self.paths = Windows.of((length,))
        self.offered = [length - 1]
        # How many drafts are in the window, and what is said of each; this round verifies the first ones.
        self.read = read
        self.made = NOTHING  # the same of those that it makes

    def __reduce__(self) -> tuple[type["LonePlan"], tuple[GateRule, int]]:
        """Ranks that follow need no request."""
        return LonePlan, (self.rule, self.windows.lens[0])

    @property
    def ruled(self) -> "LonePlan":
        return self

    def take(self, passed: Floats) -> None:
        self.made = passed.copy()  # now: the next round writes over it

    def add(self, chances: Tensor, ranked: tuple[Tensor, Tensor] | None = None) -> None:
        self.made = line_of([*self.said, *chances.tolist()])

    def go_on(self) -> bool:
        survivals = self.survivals
        return survivals[-1] > self.rule.least[len(survivals) - 1]

    def depths(self) -> int:
        return self.rule.verified(self.survivals)

    @property
    def said(self) -> list[float]:
        """What is said of the drafts that it makes."""
        count, *said = self.made.tolist()
        return said[: int(count)]

    @property
    def survivals(self) -> list[float]:
        """Of the drafts that it makes."""
        return self.rule.survivals(self.said)

    @property
    def expected(self) -> float:
        """Tokens of this round."""
        return expected_tokens(self.rule, np.array(self.offered), self.read[None])

    def force(self, forced: Tensor) -> None:
        """A request with a grammar has other plans."""


class LoneRounds:
    """Plans such rounds, and learns from them."""

    def __init__(self, measured: RoundCosts) -> None:
        self.measured = measured
        self.rule: GateRule | None = None  # None: rounds are planned otherwise
        self.last: LonePlan | None = None  # whose drafts are in the window
        # Verdicts to take in, and times, if a round was timed.
        self._rounds: list[tuple[LonePlan, Ints, RoundTimes | None]] = []

    def plan(self, requests: Sequence[Request], offered: int) -> LonePlan:
        """The next round of a request whose window offers so many drafts."""
        assert self.rule is not None
        last, count = self.last, offered
        if last is not None and last.requests[0] is requests[0]:
            read = last.made
        else:
            guesses = requests[0].guesses
            read = line_of([guess.chance if isnan(guess.said) else guess.said for guess in guesses])
            count = self.rule.verified(survivals(guess.chance for guess in guesses[:offered]))
        self.last = LonePlan(self.rule, 1 + count, requests, read)
        return self.last

    def settle(self, odds_of: OddsOf) -> None:
        """The next round is planned otherwise: leave its request what is known of the drafts in its window."""
        if self.last is not None:
            (request,) = self.last.requests
            odds = odds_of(request)
            request.guesses = [odds.guess(depth, said, request.odds) for depth, said in enumerate(self.last.said)]
            request.ranked, self.last = [], None

    def note(self, plan: LonePlan, table: Ints, times: RoundTimes | None) -> None:
        """Keep a round's verdict [1, columns], and its times, if it was timed."""
        self._rounds.append((plan, table, times))

    def count(self, record: PlanRecord) -> None:
        """Count the rounds that are kept, as they will be when they are taken in."""
        for plan, table, _ in self._rounds.copy():
            record.note(plan.windows.lens, int(table[0, 0]), plan.expected)

    def learn(self, odds_of: OddsOf, rate_of: RateOf, record: PlanRecord) -> None:
        """Take in the rounds that were kept.

        Their tokens count for the rate of rounds that are planned draft by draft.
        """
        past, took = list[PastRound](), 0.0
        for (requests, _), kept in groupby(self._rounds, key=lambda kept: (kept[0].requests, id(kept[0].rule))):
            rounds = list(kept)
            plans = [plan for plan, _, _ in rounds]
            verdicts = np.concatenate([table[:, :HEADER] for _, table, _ in rounds])  # [n, HEADER]
            won, right, _, finish = verdicts.T
            offered = np.array([plan.offered[0] for plan in plans])
            known = np.minimum(offered, right + (finish == FINISH_NONE))
            (request,), rate = requests, rate_of(requests)
            read, made = stacked([plan.read for plan in plans]), stacked([plan.made for plan in plans])
            odds_of(request).judge_chains(known, right.copy(), read, made, request.odds)
            record.note_rows(Counter((1 + offered).tolist()), int(won.sum()))
            record.expected_tokens += expected_tokens(plans[0].rule, offered, read)
            for (plan, _, times), count in zip(rounds, right.tolist(), strict=True):
                if times is not None:
                    tokens, drafts = plan.windows.lens[0], int(plan.made[0])
                    past.append(PastRound(tokens, 1, drafts, times, count + 1, rate))
                    took += times.ms
        self._rounds.clear()
        record.expected_ms += self.measured.learn_steady(past)
        record.ms += took
