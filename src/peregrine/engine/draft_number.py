"""How many drafts every row has for many rounds (`steady.py`): the number that gives the most tokens per millisecond.

What is not tried is not learnt, so another number than the best is tried now and then, as often as it may pay.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from peregrine.engine.missed import Missed
from peregrine.engine.periods import Fit
from peregrine.engine.request import Request
from peregrine.engine.round_costs import RoundCosts
from peregrine.engine.steady import OddsOf
from peregrine.spec.odds import MOST, Floats, Odds
from peregrine.spec.planner import Costs, depth_plan, plan_depths

CHANGED = 1.015  # times as many tokens, by which another number of drafts must be better: to change costs time
# By what share drafts must be better than none, for every doubling of the rows: with drafts they get on unequally, so
# that requests that began together end one after another, and the last rounds have fewer rows.
APART = 0.02
# By what share every draft after the first must make rounds better: the more drafts, the more unequally rows get on,
# and the more their chances promise too much.
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
UNLIKE = 1.2  # times as often as another's a row's first draft is right, where rows may deserve their own numbers
OWN_PRIOR = 48.0  # drafts for which it counts that a request is like others: one number is chosen for many rounds


class Chosen(NamedTuple):
    """How many drafts every row has from now on."""

    drafts: int
    tokens: float  # of a round
    rate: float  # tokens per millisecond of the best number of drafts, if not none
    trial: int  # rounds after which it is chosen anew, since this is tried, or another will be; 0: it is the best
    usual: int  # drafts that as many requests have, if they have just begun


class DraftNumber:
    """Chooses the number of drafts that all rows have, and knows which were tried."""

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
        lines, left = expected_lines(requests, odds_of, most), [r.limit - r.num_tokens for r in requests]
        fit = self.measured.steady_fit(rows, most)
        usual = per_ms(added(lines), fit.times)
        self._last[rows] = self._present = best = best_of(usual, rows, last)
        won = added(lines, [tokens - 1 for tokens in left])
        rates = per_ms(won, fit.times)
        rates[1:] = self.missed.net(requests, rates[1:])
        drafts = now = best_of(rates, rows, best)
        trial = self._trial_rounds(rows, now)
        lasts = min(left) >= min(LASTING * trial, LONG_TRIAL)
        if lasts and not self._tries and (goes_on or all(r.missed is None for r in requests)):
            drafts = self._trial(requests, worth_of(usual, rows), fit, now, number, trial)
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
        self, requests: Sequence[Request], worth: Sequence[float], fit: Fit, best: int, number: int, rounds: int
    ) -> int:
        """One draft more or less than the best, or none, if its trial is due, or the best.

        The less often the more it costs, and the more often the more it may give: the less sure it is how their times
        compare. Later if rounds of its size have to be recorded first. If it would give less than the best even if
        nearly all drafts were right, it is tried until such rounds were compared, and never again: the table may have
        been timed while the machine was busy.
        """
        rows, measured, due = len(requests), self.measured, math.inf
        plain_ms = fit.times[0]
        missed = self.missed.ms(requests) / plain_ms  # rounds to read it
        hoped = list(accumulate(LIKELY**depth for depth in range(len(worth))))  # tokens of a row
        hopes = worth_of(per_ms([rows * tokens for tokens in hoped], fit.times), rows)
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
            gain = expected_gain(math.log(worth[best] / worth[drafts]), doubt)
            changes = measured.periods.num_changes(*pair)
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
        lines: list[list[float]] = expected_lines(requests, odds_of, drafts).tolist()
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


def expected_lines(requests: Sequence[Request], odds_of: OddsOf, most: int) -> Floats:
    """The survivals of each row's drafts, whatever is said of them: [R, most]."""
    hoped, lines = dict[Odds, list[float]](), list[list[float]]()
    for request in requests:
        odds = odds_of(request)
        if odds not in hoped:
            hoped[odds] = odds.hoped_by_depth(most)
        lines.append(hoped[odds])
    factors = [request.odds.factor_with(OWN_PRIOR) for request in requests]
    found: Floats = np.minimum(MOST, np.array(lines) * np.array(factors)[:, None]).cumprod(axis=1)
    return found


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


def added(lines: Floats, rooms: Sequence[int] | None = None) -> list[float]:
    """Tokens of a round with no draft, one, two and so on, of these survivals; rows have room for all, or so many."""
    rows, most = lines.shape
    if rooms is not None and min(rooms) < most:
        lines = lines * (np.arange(most) < np.array(rooms)[:, None])
    return [float(rows), *(rows + lines.sum(axis=0).cumsum()).tolist()]


def per_ms(tokens: Sequence[float], times: Sequence[float]) -> list[float]:
    """Of rounds with no draft, one, two and so on."""
    return [count / ms for count, ms in zip(tokens, times, strict=True)]
