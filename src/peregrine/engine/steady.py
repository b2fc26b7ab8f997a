"""Rounds with as many drafts for every row, whatever the drafter says of them.

To plan a round draft by draft takes a CPU some hundred microseconds: a twentieth of a small model's round. Where the
better choice of drafts does not give that back, one number of drafts is chosen for many rounds, and they run as they
would with fixed windows: the same plan is repeated, and verdicts are taken in together when it is chosen anew.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np

from peregrine.engine.missed import Missed
from peregrine.engine.periods import Fit
from peregrine.engine.plan_record import PlanRecord
from peregrine.engine.planned_rates import PlannedRate
from peregrine.engine.request import Request
from peregrine.engine.round_costs import PastRound, RoundCosts
from peregrine.engine.round_times import FixedPlan, RoundTimes
from peregrine.kernels.round import FINISH_NONE, HEADER
from peregrine.spec.odds import MOST, Ints, Odds, survivals
from peregrine.spec.planner import Costs, depth_plan, plan_depths
from peregrine.spec.state import Rows

OddsOf = Callable[[Request], Odds]
RateOf = Callable[[Sequence[Request]], PlannedRate | None]
CHANGED = 1.005  # times as many tokens, by which another number of drafts must be better: to change costs time
# By what share drafts must be better than none, for every doubling of the rows: with drafts they get on unequally, so
# that requests that began together end one after another, and the last rounds have fewer rows.
APART = 0.02
# By what share every draft after the first must make rounds better: the more drafts, the more unequally rows get on,
# and the more their chances, which are those after an answer's beginning, promise too much.
DOUBT = 0.03
LIKELY = 0.9  # the chance of drafts that are nearly all right
TRIAL, LASTING = 9, 4  # rounds for which another number is tried, and how many times as many tokens must be left
# Rounds for which rows that rest try a draft: what comes of the first tokens says little of others. The first trials
# only time such rounds and have TRIAL of them: if they cost too much, the long ones are saved.
LONG_TRIAL = 64
CHANGING = 1.0  # rounds that a trial takes in any case: it is decided twice
# What share of their time rounds of so many rows may spend on trials of a number of drafts: what it may give more by
# what is known, so many times and once more seldom for each comparison there was; the least and the most.
# The first ones may cost the most: a table was seen to be off by a fifth, and one comparison by a half.
EAGER, SPENT, SPENT_MOST, FIRST = 10.0, 4e-4, 5e-2, 2
SPENT_ONCE = 1e-1  # the share that the first round of a size may take, which is recorded: it is spent once for all
UNSURE = 0.01  # by what share the tokens of rounds may be off
EARLY = 16  # tokens, or the first quarter of an answer: drafts are right less often there, and do not count
UNLIKE = 1.2  # times as often as another's a row's first draft is right, where rows may deserve their own numbers
OWN_PRIOR = 48.0  # drafts for which it counts that a request is like others: one number is chosen for many rounds


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


class Chosen(NamedTuple):
    """How many drafts every row has from now on."""

    drafts: int
    tokens: float  # of a round
    rate: float  # tokens per millisecond of the best number of drafts, if not none
    trial: int  # rounds after which it is chosen anew, since this is tried, or another will be; 0: it is the best
    usual: int  # drafts that as many requests have, if they have just begun


class SteadyRounds:
    """Chooses the number of drafts, and learns from the rounds that have it."""

    def __init__(self, measured: RoundCosts, missed: Missed | None = None) -> None:
        self.measured, self.missed = measured, missed or Missed(measured)
        self._last: dict[int, int] = {}  # what was the best for so many rows
        self._present: int | None = None  # what was the best of all
        self._tries = False  # whether another number is tried now
        self._taken: dict[int, int] = {}  # what so many rows had last
        # Rows, drafts and more drafts: the round of so many rows before which one was last taken after the other.
        self._changed: dict[tuple[int, int, int], int] = {}
        self._due: dict[int, float] = {}  # the round before which so many rows try another one, if nothing was missed
        self._ran: set[tuple[int, int]] = set()  # rows and drafts of rounds that there were
        # Verdicts to take in, and times, if a round was timed.
        self._rounds: list[tuple[SteadyPlan, Ints, RoundTimes | None]] = []

    def choose(self, requests: Sequence[Request], odds_of: OddsOf, most: int, number: int, goes_on: bool) -> Chosen:
        """How many drafts every row has from now on, at most so many.

        Chances are by depth alone, and of a request by its own record. It is the number with the most tokens per
        millisecond, or no draft if that is not worth it any more for what these requests have left; or another one that
        was not tried for long, since nothing is learnt of what is not tried. `number` is that of the round among those
        of as many rows. Requests that are about to end try nothing, nor those that have just changed and were not
        drafted for. Rows that are drafted for first have some rounds of the best, to compare with: an answer's first
        round takes longer than others.
        """
        rows, last = len(requests), self._last.get(len(requests), self._present)
        if last is not None:
            most = min(most, last + 2)
        lines = expected_lines(requests, odds_of, most)
        rooms = [request.limit - request.num_tokens - 1 for request in requests]  # for drafts, in the next round
        fit = self.measured.steady_fit(rows, most)
        times = fit.times
        usual = [tokens / ms for tokens, ms in zip(added(lines, [most] * rows), times, strict=True)]
        self._last[rows] = self._present = best = best_of(usual, rows, last)
        won = added(lines, rooms)
        rates = [tokens / ms for tokens, ms in zip(won, times, strict=True)]
        rates[1:] = self.missed.net(requests, rates[1:])
        drafts = now = best_of(rates, rows, best)
        trial = self._trial_rounds(rows, now)
        least = min(LASTING * trial, LONG_TRIAL)
        lasts = all(r.limit - r.num_tokens >= least for r in requests)
        if lasts and (goes_on or all(r.missed is None for r in requests)):
            hoped = list(accumulate(LIKELY**depth for depth in range(most + 1)))  # tokens of a row
            hopes = worth_of([rows * tokens / ms for tokens, ms in zip(hoped, times, strict=True)], rows)
            if not self._tries:
                drafts = self._trial(requests, worth_of(usual, rows), fit, hopes, now, number, trial)
        will_try = drafts != now and now > 0 and not goes_on
        if will_try:
            drafts = now
        self._tries = drafts != now  # then the best again: rounds are compared on the way there and back
        before, self._taken[rows] = self._taken.get(rows, drafts), drafts
        self._changed[rows, min(before, drafts), max(before, drafts)] = number
        self._ran.add((rows, drafts))
        return Chosen(drafts, won[drafts], max(rates[1:], default=0.0), trial * (will_try or self._tries), best)

    def is_trial_due(self, rows: int, number: int) -> bool:
        """Whether as many new requests would try another number of drafts."""
        return number >= self._due.get(rows, 0)

    def _trial_rounds(self, rows: int, best: int) -> int:
        """For how many rounds another number of drafts than the best is tried."""
        return LONG_TRIAL if not best and self.measured.periods.num_changes(rows, 0, 1) >= FIRST else TRIAL

    def _trial(
        self,
        requests: Sequence[Request],
        worth: Sequence[float],
        fit: Fit,
        hopes: Sequence[float],
        best: int,
        number: int,
        rounds: int,
    ) -> int:
        """One draft more or less than the best, or none, if its trial is due, or the best.

        The less often the more it costs, and the more often the more it may give: the less sure it is how their times
        compare. Later if rounds of its size have to be recorded first. If it would give less than the best even if
        nearly all drafts were right, it is tried until such rounds were compared, and never again: the table may have
        been timed while the machine was busy.
        """
        rows, measured, due = len(requests), self.measured, math.inf
        plain_ms = measured.steady_ms(rows, 0)
        missed = self.missed.ms(requests) / plain_ms  # rounds to read it
        for drafts in sorted({0, best - 1, best + 1}):
            if drafts == best or not 0 <= drafts < len(worth) or (drafts and self.missed.tokens_at_once(requests)):
                continue
            pair = rows, min(best, drafts), max(best, drafts)
            if drafts > best and hopes[drafts] < worth[best] and measured.periods.num_changes(*pair):
                continue
            if drafts < best and self._taken.get(rows) != best:  # first the best itself: who drafts less learns less
                continue
            lost = CHANGING + rounds * max(0.0, 1 - worth[drafts] / worth[best])
            if not drafts:  # what is missed in the trial is read after it
                lost += measured.missed_ms(rounds * rows) / plain_ms
            doubt = math.hypot(fit.doubt(best, drafts), UNSURE)
            gain, changes = (
                expected_gain(math.log(worth[best] / worth[drafts]), doubt),
                measured.periods.num_changes(*pair),
            )
            share = SPENT_MOST if changes < FIRST else min(SPENT_MOST, max(SPENT, EAGER * gain / (1 + changes)))
            once = 0.0 if (rows, drafts) in self._ran else measured.recording_ms / plain_ms / SPENT_ONCE
            last = self._changed.get(pair, 0)
            if number >= last + (lost + missed) / share + once:
                return drafts
            due = min(due, last + lost / share + once)
        self._due[rows] = due
        return best

    def hope(self, requests: Sequence[Request], odds_of: OddsOf, drafts: int, costs: Costs, branches: bool) -> float:
        """How many times as many tokens rows may have, if each has its own number of drafts or its chain branches.

        Not tried, it would not be learnt; but trying takes time where rows are alike and reading tokens is not cheap.
        """
        rows, rates = len(requests), [0.0]
        lines = expected_lines(requests, odds_of, drafts)
        same = depth_plan(costs, lines, [drafts] * rows)
        firsts = [line[0] for line in lines]
        if max(firsts) > UNLIKE * min(firsts):
            own = plan_depths(costs, lines)
            if min(own.depths) < max(own.depths):
                rates.append(own.tokens / (own.ms + costs.ragged))
        if branches:
            more, tokens = sum(1 - first for first in firsts) / 2, rows * (1 + drafts)
            ms = costs.verify_ms(tokens + rows) - costs.verify_ms(tokens) + costs.branched
            rates.append((same.tokens + more) / (same.ms + ms))
        return max(rates) * self.measured.steady_ms(rows, drafts) / same.tokens

    def note(self, plan: SteadyPlan, table: Ints, times: RoundTimes | None) -> None:
        """Keep a round's verdict: [R, columns]; and its times, if it was timed."""
        self._rounds.append((plan, table[:, :HEADER], times))

    def count(self, record: PlanRecord) -> None:
        """Count the rounds that are kept, as they will be when they are taken in."""
        for plan, table, _ in self._rounds.copy():
            record.note(plan.windows.lens, int(table[:, 0].sum()), plan.expected)

    def learn(self, odds_of: OddsOf, rate_of: RateOf, record: PlanRecord) -> None:
        """Take in the rounds that were kept."""
        self.measured.periods.compare()
        past, took = list[PastRound](), 0.0
        for requests, kept in groupby(self._rounds, key=lambda kept: kept[0].requests):
            rounds = list(kept)
            plans = [(plan, len(list(same))) for plan, same in groupby(plan for plan, _, _ in rounds)]
            offered = np.repeat([plan.offered for plan, _ in plans], [count for _, count in plans], axis=0)  # [n, R]
            verdicts = np.concatenate([table for _, table, _ in rounds]).reshape(*offered.shape, HEADER)
            won, right, _, finish = verdicts.transpose(2, 0, 1)  # [n, R]
            known = np.minimum(offered, right + (finish == FINISH_NONE))
            begun = np.array([request.num_generated for request in requests]) - won[::-1].cumsum(axis=0)[::-1]
            counted = begun >= [min(EARLY, (r.limit - len(r.prompt)) // 4) for r in requests]
            counts = deeper(np.stack((known * counted, right * counted)), offered.max())
            kinds = [odds_of(request) for request in requests]
            for odds in {id(kind): kind for kind in kinds}.values():
                rows = [row for row, kind in enumerate(kinds) if kind is odds]
                tried, good = counts[:, rows]
                odds.judge_rounds(len(rounds), tried, good, [requests[row].odds for row in rows])
            rate, tokens, first = rate_of(requests), won.sum(axis=1).tolist(), 0
            for plan, count in plans:
                record.note(plan.windows.lens, sum(tokens[first : first + count]), plan.expected, count)
                first += count
            for (plan, _, times), count in zip(rounds, tokens, strict=True):
                if times is not None:
                    lens = plan.windows.lens
                    past.append(PastRound(sum(lens), len(lens), plan.drafts or 0, times, count, rate))
                    took += times.ms
        self._rounds.clear()
        record.expected_ms += self.measured.learn_steady(past)
        record.ms += took


def expected_lines(requests: Sequence[Request], odds_of: OddsOf, most: int) -> list[list[float]]:
    """The survivals of each row's drafts, whatever is said of them."""
    hoped, lines = dict[Odds, list[float]](), list[list[float]]()
    for request in requests:
        odds, factor = odds_of(request), request.odds.factor_with(OWN_PRIOR)
        if odds not in hoped:
            hoped[odds] = odds.hoped_by_depth(most)
        lines.append(survivals([min(MOST, chance * factor) for chance in hoped[odds]]))
    return lines


def best_of(rates: Sequence[float], rows: int, present: int | None) -> int:
    """The number of drafts with the most tokens per millisecond; the present one, unless that is better by CHANGED."""
    worth = worth_of(rates, rows)
    best = max(range(len(worth)), key=worth.__getitem__)
    if present is None or present >= len(worth):
        return best
    return present if worth[best] < CHANGED * worth[present] else best


def worth_of(rates: Sequence[float], rows: int) -> list[float]:
    """What so many tokens per millisecond with no draft, one, two and so on are worth, if so many rows have them."""
    return [rates[0] * (1 + APART * math.log2(rows)), *(rate * (1 - DOUBT) ** n for n, rate in enumerate(rates[1:]))]


def expected_gain(gap: float, doubt: float) -> float:
    """What the better of two gives more than the first, if the second seems worse by `gap`, by normal errors."""
    off = gap / doubt
    return doubt * (math.exp(-off * off / 2) / math.sqrt(2 * math.pi) - off * math.erfc(off / math.sqrt(2)) / 2)


def added(lines: Sequence[Sequence[float]], rooms: Sequence[int]) -> list[float]:
    """Tokens of a round with no draft, one, two and so on, of these survivals, where rows have room for so many."""
    more = (sum(line[n] for line, room in zip(lines, rooms, strict=True) if n < room) for n in range(len(lines[0])))
    return list(accumulate(more, initial=float(len(lines))))


def deeper(drafts: Ints, most: int) -> Ints:
    """In how many rounds a row had more drafts than 0, 1, ... most - 1, of two kinds: [2, n, R] -> [2, R, most]."""
    counts: Ints = (drafts[..., None] > np.arange(most)).sum(axis=1)
    return counts
