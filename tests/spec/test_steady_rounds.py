"""One number of drafts for all rows: how it is compared with others, when another is tried, and when rows come back."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peregrine.engine.draft_number import (
    APART,
    CHANGED,
    CHANGING,
    DOUBT,
    FIRST,
    LONG_TRIAL,
    SPENT,
    SPENT_MOST,
    SPENT_ONCE,
    TRIAL,
    DraftNumber,
    best_of,
    expected_gain,
    worth_of,
)
from peregrine.engine.periods import LEAST, LEAST_NOISE, NOISE, TABLE_OFF, Compared, Periods
from peregrine.engine.plan_record import PlanRecord
from peregrine.engine.planning import WindowPlanner
from peregrine.engine.request import Request
from peregrine.engine.round_costs import PastRound, RoundCosts
from peregrine.engine.round_times import RoundTimes
from peregrine.engine.steady import BRIEF, EARLY, SteadyPlan, SteadyRounds
from peregrine.kernels.round import FINISH_NONE
from peregrine.sampling import SamplingParams
from peregrine.spec.odds import Odds, RequestOdds
from peregrine.spec.planner import plan_depths
from spec.verdicts import judge_counts

LIMIT = 999
# Milliseconds for a token, with which a draft for each of eight rows is worth 0.965 of none, if 60 of 100 are right.
NEARLY_AS_GOOD = 0.19


def some_requests(count: int, limit: int = LIMIT, **params: int) -> list[Request]:
    return [Request(i, list(range(6)), SamplingParams(temperature=0.0, **params), 0, limit) for i in range(count)]


def some_odds(right: int) -> Odds:
    """Of so many drafts in a hundred, at the first depth."""
    odds = Odds()
    judge_counts(odds, {(1, 1): right, (1, 0): 100 - right}, RequestOdds())
    return odds


def some_costs(ms_per_token: float = 0.5) -> RoundCosts:
    """Four milliseconds and half of one for a token; drafts are free, and to absorb a token takes a tenth."""
    return RoundCosts({1: 4 + ms_per_token, 64: 4 + 64 * ms_per_token}, {1: 0.1, 2: 0.2}, {1: 0.0}, 3)


def compare(periods: Periods, plain: float, drafted: float) -> None:
    """Eight rows rest, have a draft each, and rest again; these are the times of their rounds."""
    for drafts in (0, 1, 0):
        periods.begin((8, drafts), goes_on=True)
        note(periods, [drafted if drafts else plain] * 16)
    periods.begin(None, goes_on=True)


def note(periods: Periods, times: list[float]) -> None:
    for ms in times:
        periods.note(ms)


def alternate(periods: Periods, times: list[float], drafts: int = 1) -> None:
    """Four rows have no drafts, so many each, none and so on, in rounds of such times."""
    for number, ms in enumerate(times):
        periods.begin((4, drafts * (number % 2)), goes_on=True)
        note(periods, [ms] * 16)
    periods.begin(None, goes_on=True)


@given(plain=st.floats(1, 9), ratio=st.floats(1.1, 3), growth=st.floats(0.8, 1.2))
def test_rounds_are_compared_with_those_on_both_sides(plain: float, ratio: float, growth: float) -> None:
    """There and back again, so that what grows with the texts cancels, and a machine that becomes slower."""
    periods = Periods()
    alternate(periods, [plain * growth**number * (ratio if number % 2 else 1) for number in range(5)])
    assert periods.num_changes(4, 0, 1) == 2
    assert periods.fit(4, [1.0, ratio]).times == pytest.approx([1.0, ratio])
    assert ratio < periods.fit(4, [1.0, 2 * ratio]).times[1] < 1.1 * ratio, "the table counts less"
    assert periods.fit(3, [1.0, 1.7]).times == pytest.approx([1.0, 1.7])


@given(disturbed=st.integers(0, 10), slower=st.floats(0.2, 5))
def test_a_disturbed_period_does_not_change_what_is_known(disturbed: int, slower: float) -> None:
    """Another program runs for a while: by a mean, plain decoding would seem twice as slow, or drafts to be free."""
    periods = Periods()
    times = [9.0 if number % 2 else 6.0 for number in range(11)]
    times[disturbed] *= slower
    alternate(periods, times)
    assert periods.fit(4, [6.0, 9.0]).times == pytest.approx([6.0, 9.0])


def test_drafts_that_seem_to_cost_less_than_none_were_not_compared() -> None:
    """More drafts are never read sooner: whatever ran beside the plain rounds slowed them."""
    periods = Periods()
    alternate(periods, [12.0, 9.0, 12.0], drafts=3)
    assert periods.fit(4, [1.0, 2.0, 3.0, 4.0]).times == pytest.approx([1.0, 2.0, 3.0, 4.0])


@given(st.lists(st.floats(1, 3), min_size=2, max_size=9))
def test_what_was_compared_often_and_alike_is_sure(ratios: list[float]) -> None:
    """One comparison may be off by more than the table's step; alike ones leave less doubt than unlike ones."""
    table = [1.0, 2.0, 3.0]
    assert Compared({}, 3).fit(table).doubt(0, 1) == pytest.approx(TABLE_OFF)
    assert Compared({}, 3).fit(table).doubt(0, 2) == pytest.approx(2**0.5 * TABLE_OFF)
    once, often, unlike = (Compared({(0, 1): each}, 3).fit(table) for each in ([2.0], [2.0] * len(ratios), ratios))
    assert often.doubt(0, 1) < once.doubt(0, 1) < min(TABLE_OFF, NOISE)
    assert often.doubt(0, 1) <= unlike.doubt(0, 1) + 1e-12
    assert once.doubt(0, 1) > LEAST_NOISE
    assert often.doubt(1, 2) == pytest.approx(TABLE_OFF), "of which nothing is known but by the table"
    assert often.doubt(1, 0) == often.doubt(0, 1)


def test_rounds_next_to_a_change_are_compared() -> None:
    """Not those long before or after it: texts grow, and the machine's speed changes."""
    periods = Periods()
    for drafts, ms in ((0, [9.0] * 40 + [5.0] * 9), (1, [10.0] * 9 + [30.0] * 40)):
        periods.begin((4, drafts), goes_on=True)
        for each in ms:
            periods.note(each)
    periods.compare()
    known = Compared({(0, 1): [2.0]}, 2).fit([1.0, 1.5])
    assert periods.fit(4, [1.0, 1.5]).times == pytest.approx(known.times)


def test_rounds_are_compared_as_soon_as_there_are_enough() -> None:
    """Once: asked again, or when the next change comes, the same rounds do not count twice."""
    periods = Periods()
    for drafts, ms in ((0, 5.0), (1, 10.0)):
        periods.begin((4, drafts), goes_on=True)
        note(periods, [ms] * (LEAST - 1))
        periods.compare()
        assert not periods.num_changes(4, 0, 1)
        note(periods, [ms])
        periods.compare()
        assert periods.num_changes(4, 0, 1) == drafts
    periods.compare()
    periods.begin((4, 0), goes_on=True)
    assert periods.num_changes(4, 0, 1) == 1
    assert periods.fit(4, [6.0, 12.0]).times == pytest.approx([6.0, 12.0])


def test_rounds_of_other_requests_are_not_compared() -> None:
    """Nor those that an interruption leaves too few of."""
    periods = Periods()
    periods.begin((4, 0), goes_on=False)
    note(periods, [5.0] * 16)
    periods.begin((4, 1), goes_on=False)
    note(periods, [9.0] * 16)
    periods.begin((4, 0), goes_on=True)
    note(periods, [5.0] * (LEAST - 1))
    periods.begin((4, 1), goes_on=True)
    assert not periods.num_changes(4, 0, 1)


def test_what_was_compared_corrects_the_table() -> None:
    """5 ms became 10, and 5 again, twice: what is compared once counts for about as much as the table, then for more.

    Steps that were not compared are the table's.
    """
    costs, times = some_costs(), []
    foreseen = [costs.steady_ms(4, drafts) for drafts in range(3)]
    costs.periods.begin((4, 0), goes_on=True)
    for drafts in (1, 0, 1, 0, 1):
        note(costs.periods, [5.0 if drafts else 10.0] * 16)
        costs.periods.begin((4, drafts), goes_on=True)
        times.append(costs.steady_times(4, 2))
    assert times[0] == pytest.approx(foreseen)
    assert foreseen[1] < times[1][1] < times[-1][1] < 2 * foreseen[0]
    assert times[-1][1] == pytest.approx(2 * foreseen[0], rel=0.06)
    for after in times:
        assert after[0] == foreseen[0]
        assert after[2] / after[1] == pytest.approx(foreseen[2] / foreseen[1])


def test_numbers_of_drafts_are_compared_through_others() -> None:
    """Who took one draft after none and two after one knows how two compare with none, whatever the table says."""
    periods, table = Periods(), [5.0, 6.0, 7.0]
    for drafts in (0, 1, 2, 0, 2, 1, 0):
        periods.begin((4, drafts), goes_on=True)
        note(periods, [5.0 * 1.5**drafts] * 16)
    periods.begin(None, goes_on=True)
    assert periods.fit(4, table).times == pytest.approx([5.0, 7.5, 11.25], rel=0.12)
    assert periods.fit(4, table[:2]).times[1] > 7.0


@pytest.mark.parametrize("rows", [1, 4])
def test_a_drafter_that_takes_longer_than_the_table_says_makes_rounds_with_drafts_longer(rows: int) -> None:
    """And not those without. A machine that is slower in everything changes nothing."""
    costs = RoundCosts({1: 4.0, 64: 36.0}, {1: 0.1, 2: 0.2}, {1: 0.5, 16: 1.0}, 3, {1: 1.0, 16: 2.0})
    table = [costs.steady_ms(rows, drafts) for drafts in range(4)]
    verify = [costs.costs().verify_ms(rows * (1 + drafts)) for drafts in range(4)]
    for speed, factor in ((1.5, 1.0), (1.5, 2.0)):
        times = RoundTimes(speed * verify[2], speed * factor * (table[2] - verify[2]), [])
        costs.learn_steady([PastRound(3 * rows, rows, 2, times, 2 * rows, None)] * 16)
        real = [sure + factor * (ms - sure) for ms, sure in zip(table, verify, strict=True)]
        assert [costs.steady_ms(rows, drafts) for drafts in range(4)] == pytest.approx(real)
    if rows == 1:
        assert costs.replayed().round_ms(3, [1, 1]) == pytest.approx(real[2])


def test_numbers_of_drafts_that_are_far_apart_are_compared_too() -> None:
    """By the table three drafts cost a third more than one; whoever took three after one knows that it is twice."""
    costs = some_costs()
    before = costs.steady_times(4, 4)
    for drafts in (1, 3, 1, 3, 1):
        costs.periods.begin((4, drafts), goes_on=True)
        note(costs.periods, [10.0 if drafts == 3 else 5.0] * 16)
    costs.periods.begin(None, goes_on=True)
    times = costs.steady_times(4, 4)
    assert times[:2] == pytest.approx(before[:2])
    assert before[2] < times[2] < times[3], "between them"
    assert times[3] == pytest.approx(2 * before[1], rel=0.05)
    assert times[4] / times[3] == pytest.approx(before[4] / before[3])


def test_another_number_of_drafts_is_tried_now_and_then() -> None:
    """Soon if it seems nearly as good, and ever less often the surer it is that it is not."""
    steady, requests, odds = DraftNumber(some_costs(NEARLY_AS_GOOD)), some_requests(8), some_odds(60)
    tried = []
    for number in range(0, 1 << 14, 16):
        chosen = steady.choose(requests, lambda _: odds, 1, number, goes_on=True)
        if chosen.trial:
            tried.append(number)
            assert chosen.drafts == 1
            compare(steady.measured.periods, 5.5, 8.8)
    assert tried[0] < 64
    gaps = [after - before for before, after in pairwise(tried)]
    assert gaps[FIRST:] == sorted(gaps[FIRST:])
    assert 0 < 8 * gaps[0] < gaps[-1]


@pytest.mark.parametrize(("ms_per_token", "again"), [(0.9, True), (1.0, False)])
def test_drafts_that_would_not_pay_if_nearly_all_were_right_are_tried_until_compared(
    ms_per_token: float, again: bool
) -> None:
    """Of eight rows, 1.9 tokens each in 4 + 16 x 0.95 + 1.6 ms are as good as one in 4 + 8 x 0.95, worth 1.06."""
    steady, requests, odds = DraftNumber(some_costs(ms_per_token)), some_requests(8), some_odds(60)

    def tries(first: int) -> bool:
        rounds = range(first, first + (1 << 14), 16)
        return sum(steady.choose(requests, lambda _: odds, 1, n, goes_on=True).drafts for n in rounds) > 0

    assert tries(0)
    plain, drafted = (steady.measured.steady_ms(8, drafts) for drafts in range(2))
    compare(steady.measured.periods, plain, drafted)  # as the table says
    assert tries(1 << 20) == again
    assert steady.is_trial_due(8, 1 << 30) == again


def test_what_was_seldom_compared_is_tried_sooner() -> None:
    """Of the table alone, or one comparison that something disturbed, it is not known what a trial loses."""
    requests, odds, waits = some_requests(8), some_odds(60), list[int]()
    for compared in range(FIRST + 1):
        steady = DraftNumber(some_costs(0.8))
        for _ in range(compared):
            compare(steady.measured.periods, *(steady.measured.steady_ms(8, drafts) for drafts in range(2)))
        numbers = range(0, 1 << 16, 16)
        waits.append(next(n for n in numbers if steady.choose(requests, lambda _: odds, 1, n, goes_on=True).trial))
    assert 0 < waits[0] == waits[1] < waits[2] / 4


@given(gap=st.floats(0, 0.5), doubt=st.floats(0.005, 0.3))
def test_what_may_be_gained_is_the_mean_of_what_is_better(gap: float, doubt: float) -> None:
    """Against the integral of what is above 0, over a normal distribution."""
    errors = np.linspace(-8, 8, 4001)
    density = np.exp(-(errors**2) / 2) / math.sqrt(2 * math.pi)
    gains = np.maximum(0.0, doubt * errors - gap)
    assert expected_gain(gap, doubt) == pytest.approx(np.trapezoid(gains * density, errors), abs=1e-6)


def test_drafts_are_compared_with_none_at_first() -> None:
    """Even if two or three are the best by the table: to be never slower than plain decoding, it must be timed."""
    steady, requests, odds = DraftNumber(some_costs(0.3)), some_requests(4), some_odds(95)
    judge_counts(odds, {(3, 3): 300, (3, 2): 10}, RequestOdds())
    tried = list[int]()
    for number in range(0, 1 << 12, 16):
        chosen = steady.choose(requests, lambda _: odds, 4, number, goes_on=True)
        assert chosen.usual > 1
        if chosen.trial and chosen.drafts not in tried:
            tried.append(chosen.drafts)
    assert 0 in tried


def test_new_requests_have_rounds_to_compare_a_trial_with() -> None:
    """Rounds before and after it are compared; an answer's first rounds are not like others."""
    steady, requests, odds = DraftNumber(some_costs()), some_requests(4), some_odds(60)
    first, tried, then = (
        steady.choose(requests, lambda _: odds, 3, 10_000, goes_on) for goes_on in (False, True, True)
    )
    assert first.drafts == then.drafts != tried.drafts
    assert first.trial == tried.trial == TRIAL
    assert not then.trial


@pytest.mark.parametrize("ms_per_token", [0.7, 1.0])
def test_a_size_that_has_to_be_recorded_is_tried_later(ms_per_token: float) -> None:
    """Once: what its first round takes more is spent then."""
    first, again, requests, odds = [], [], some_requests(8), some_odds(60)
    for first_ms in (40.0, 80.0):
        steady = DraftNumber(some_costs(ms_per_token))
        steady.measured.recording_ms = first_ms
        tried = [n for n in range(1 << 14) if steady.choose(requests, lambda _: odds, 1, n, goes_on=True).trial]
        first.append(tried[0])
        again.append(tried[1] - tried[0])
    rounds = 40.0 / steady.measured.steady_ms(8, 0) / SPENT_ONCE
    assert first[1] - first[0] == pytest.approx(rounds, abs=1)
    assert again[1] == pytest.approx(again[0], abs=1)


@given(ragged=st.floats(0, 9))
def test_windows_of_unlike_length_are_hoped_for_with_what_they_cost(ragged: float) -> None:
    """A row that is always right and one that never is deserve their own numbers of drafts, if that is cheap."""
    measured, requests, odds = some_costs(), some_requests(2), some_odds(60)
    requests[0].odds, requests[1].odds = RequestOdds(10.0, 60.0), RequestOdds(60.0, 0.0)
    costs = replace(measured.costs(), ragged=ragged)
    hope = DraftNumber(measured).hope(requests, lambda _: odds, 1, costs, branches=False)
    free = DraftNumber(measured).hope(requests, lambda _: odds, 1, replace(costs, ragged=0.0), branches=False)
    ms = plan_depths(costs, [[0.9], [0.1]]).ms
    assert hope == pytest.approx(free * ms / (ms + ragged))


def test_what_is_best_comes_before_less_is_tried() -> None:
    """Else the first trial is of what teaches least, and costs the reading of what was missed."""
    steady, requests, odds = DraftNumber(some_costs(2.2)), some_requests(2), some_odds(60)
    due = 1 << 14
    first, second = (steady.choose(requests, lambda _: odds, 1, number, goes_on=True) for number in (due, due + 16))
    assert (first.drafts, first.trial) == (1, 0)
    assert (second.drafts, second.trial) == (0, TRIAL)


def test_trials_cost_a_small_share_of_the_time() -> None:
    """Rows that rest try a draft for long, but at first only for as long as it takes to time such rounds."""
    requests, odds = some_requests(8), some_odds(60)
    steady, tried, lengths = DraftNumber(some_costs(0.8)), [-16], []
    plain, drafted = (steady.measured.steady_ms(8, drafts) for drafts in range(2))
    for number in range(0, 1 << 17, 16):
        chosen = steady.choose(requests, lambda _: odds, 1, number, goes_on=True)
        if chosen.trial:
            tried, lengths, tokens = [*tried, number], [*lengths, chosen.trial], chosen.tokens
            compare(steady.measured.periods, plain, drafted)  # as the table says
        elif number > tried[-1] + 16:  # the best follows a trial, whatever is due
            assert not steady.is_trial_due(8, number)
    assert lengths[:FIRST] == [TRIAL] * FIRST, "only timed: if they cost too much, long ones are saved"
    assert set(lengths[FIRST:]) == {LONG_TRIAL}, "what comes of the first tokens says little of others"
    without, given = worth_of([count / ms for count, ms in ((8, plain), (tokens, drafted))], 8)
    gaps = [after - before - 16 for before, after in pairwise(tried)]  # since the rounds after a trial
    spent = [(CHANGING + rounds * (1 - given / without)) / gap for rounds, gap in zip(lengths, gaps, strict=True)]
    assert all(0.7 * SPENT_MOST < share <= SPENT_MOST for share in spent[:FIRST])
    assert spent[-1] == pytest.approx(SPENT, rel=0.05)


@pytest.mark.parametrize(
    ("rounds", "generated", "limit", "counted"),
    [(11, 0, 99, 0), (11, EARLY - 8, 99, 3), (11, EARLY, 99, 11), (11, 0, 22, 6), (BRIEF, 0, 99, BRIEF)],
)
def test_a_few_rounds_at_the_beginning_of_an_answer_do_not_count(
    rounds: int, generated: int, limit: int, counted: int
) -> None:
    """Of the first tokens, or the first quarter of a short answer: a first draft is right less often there.

    So many rounds of a token each, all of whose drafts are wrong; the request has taken their tokens.
    """
    steady, odds, record = SteadyRounds(some_costs()), Odds(), PlanRecord()
    (request,) = some_requests(1, limit=6 + limit)
    plan = SteadyPlan([request], [2], 1)
    request.tokens += [0] * generated
    for _ in range(rounds):
        steady.note(plan, np.array([[1, 0, 0, FINISH_NONE]]), None)
        request.tokens.append(0)
    steady.learn(lambda _: odds, lambda _: None, record)
    assert odds.depths[0, 1] == counted
    assert request.odds.right == 0.0
    assert record.tokens == rounds


def test_rows_come_back_if_there_is_enough_left_to_win() -> None:
    """What was missed has to be read first."""
    odds = some_odds(75)
    for left, drafts in ((4000, 1), (3, 0)):
        requests = some_requests(2, limit=100 + left)
        for request in requests:
            request.tokens += [0] * (100 - request.num_tokens)
            request.missed = 10
        assert DraftNumber(some_costs()).choose(requests, lambda _: odds, 1, 0, goes_on=False).drafts == drafts


@pytest.mark.parametrize(("missed", "watched", "waits"), [(9000, False, False), (9000, True, True), (100, True, False)])
def test_what_was_missed_holds_up_nobody_who_watches(missed: int, watched: bool, waits: bool) -> None:
    """It is read in parts, between rounds that rest, if all of it would take too long."""
    (request,), odds, stall = some_requests(1, limit=1 << 20, num_drafts=1), some_odds(75), 100.0
    request.tokens += [0] * missed
    request.missed, request.is_watched = request.num_tokens - 1 - missed, watched
    planner = WindowPlanner(3, some_costs(0.05), looks_up=False, max_stall_ms=stall)
    planner._odds = {False: odds, True: odds}
    parts = 0
    assert planner.plan([request], [0]).rests == planner.catches_up == waits
    while planner.catches_up and (tokens := planner.missed_tokens_now([request])):
        assert planner.repeat([request]) is not None, "rows rest meanwhile"
        assert planner.measured.missed_ms(tokens) <= 1.05 * stall
        request.missed, parts = request.missed + tokens, parts + 1
    assert (parts > 2) == waits
    assert planner.repeat([request]) is None or not waits
    assert not planner.plan([request], [0]).rests


@pytest.mark.parametrize(("left", "drafts"), [(1, 0), (2, 1), (40, 3)])
def test_no_draft_is_made_past_the_end(left: int, drafts: int) -> None:
    requests = some_requests(2, limit=6 + left)
    assert DraftNumber(some_costs(0.01)).choose(requests, lambda _: some_odds(90), 3, 0, goes_on=False).drafts == drafts


def test_requests_without_drafts_are_not_planned_in_every_round() -> None:
    planner, requests = WindowPlanner(3, some_costs(), looks_up=False), some_requests(4, num_drafts=0)
    planned = 0
    for _ in range(200):
        if planner.repeat(requests) is None:
            planned += 1
            assert planner.plan(requests, [0] * 4).rests
    assert planned < 10


def test_fewer_rows_at_the_end_of_answers_do_not_shorten_what_is_kept() -> None:
    """Each number of rows has its own: else every answer of four would be decided anew after 16 rounds, and 48."""
    planner, decided = WindowPlanner(3, some_costs(), looks_up=False), 0
    for _ in range(6):
        resting, drafted, decided = some_requests(4, num_drafts=0), some_requests(1), 0
        for _ in range(60):
            if planner.repeat(resting) is None:
                assert planner.plan(resting, [0] * 4).rests
                decided += 1
        assert not planner.plan(drafted, [0]).rests
    assert decided == 1


@pytest.mark.parametrize(
    ("left", "missed", "goes_on", "tries"),
    [
        (400, None, False, True),
        (400, 3, False, False),
        (400, None, True, True),
        (20, None, False, False),
        (20, None, True, False),
        (LONG_TRIAL - 1, None, True, False),
    ],
)
def test_requests_that_are_about_to_end_or_have_changed_try_nothing(
    left: int, missed: int | None, goes_on: bool, tries: bool
) -> None:
    steady, odds = DraftNumber(some_costs(NEARLY_AS_GOOD)), some_odds(60)
    requests = some_requests(8, limit=6 + left)
    requests[0].missed = missed
    for _ in range(FIRST):
        compare(steady.measured.periods, *(steady.measured.steady_ms(8, drafts) for drafts in range(2)))
    assert steady.choose(requests, lambda _: odds, 1, 1 << 14, goes_on=goes_on).trial == (LONG_TRIAL if tries else 0)


@given(rates=st.lists(st.floats(0.5, 2), min_size=1, max_size=5), rows=st.integers(1, 4), present=st.integers(0, 6))
def test_drafts_of_several_rows_must_give_clearly_more_than_none(rates: list[float], rows: int, present: int) -> None:
    fresh, kept = best_of(rates, rows, None), best_of(rates, rows, present)
    plain = rates[0] * (1 + APART * math.log2(rows))
    drafted = [rate * (1 - DOUBT) ** n for n, rate in enumerate(rates[1:])]
    if fresh:
        assert drafted[fresh - 1] == max(drafted) > plain
    else:
        assert max(drafted, default=0.0) <= plain
    assert kept in (fresh, present)
    worth = [plain, *drafted]
    assert worth[fresh] < CHANGED * worth[kept]


def test_of_numbers_that_promise_the_same_the_smaller_is_taken() -> None:
    assert best_of([1.0, 2.0, 2.0, 2.0], 1, None) == 1
    assert best_of([1.0, 2.0, 2.0, 2.2], 1, None) == 3
    assert [best_of([1.0, 1.03], rows, None) for rows in (1, 2, 4)] == [1, 1, 0]
