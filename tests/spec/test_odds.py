"""Odds of drafts: they approach what verdicts say, by the drafter's word and by request."""

import math
import random

import numpy as np
import pytest

from peregrine.spec.odds import ALIKE, DEPTH_PRIOR, FIRST_GUESS, HOPE, Odds, RequestOdds, calibration_error
from spec.verdicts import judge_counts

NOTHING = math.nan


def feed(odds: Odds, own: RequestOdds, said: float, truth: float, count: int, dice: random.Random) -> None:
    """Let `count` drafts of the first depth be judged and made."""
    right = np.array([dice.random() < truth for _ in range(count)], np.int64)
    drafts = np.tile([1.0, said], (count, 1))
    odds.judge_chains(np.ones(count, np.int64), right, drafts, drafts, own)


@pytest.mark.parametrize("said", [NOTHING, 0.95])
def test_a_chance_becomes_the_share_that_was_right(said: float) -> None:
    odds, dice = Odds(), random.Random(1)
    for _ in range(40):
        feed(odds, RequestOdds(), said, 0.3, 20, dice)
    chance = odds.chances_by_depth(1)[-1] if math.isnan(said) else odds.guess(0, said, RequestOdds()).chance
    assert chance == pytest.approx(0.3, abs=0.06)
    assert odds.expect(0, RequestOdds()) == pytest.approx(0.3, abs=0.1)


def test_what_the_drafter_says_separates_drafts_of_one_depth() -> None:
    odds, dice = Odds(), random.Random(2)
    for _ in range(40):
        feed(odds, RequestOdds(), 0.95, 0.9, 10, dice)
        feed(odds, RequestOdds(), 0.25, 0.1, 10, dice)
    sure, unsure = (odds.guess(0, said, RequestOdds()).chance for said in (0.95, 0.25))
    assert sure > 0.8
    assert unsure < 0.2
    assert calibration_error([odds]) < 0.06


def test_a_request_has_a_record_of_its_own_that_fades() -> None:
    odds, dice = Odds(), random.Random(3)
    for _ in range(30):
        feed(odds, RequestOdds(), NOTHING, 0.8, 20, dice)
    stranger = RequestOdds()
    feed(odds, stranger, NOTHING, 0.0, 30, dice)
    assert odds.expect(0, stranger) < 0.3 < 0.6 < odds.expect(0, RequestOdds())
    nothing, empty = np.zeros(200, np.int64), np.zeros((200, 1))  # rounds in which nothing was tried
    odds.judge_chains(nothing, nothing, empty, empty, stranger)
    assert stranger.factor == pytest.approx(1.0, abs=0.05)


def test_calibration_error_of_a_wrong_drafter() -> None:
    odds, dice = Odds(), random.Random(4)
    expected = 0.0
    for _ in range(10):
        expected += odds.guess(0, 0.93, RequestOdds()).chance
        feed(odds, RequestOdds(), 0.93, 0.0, 1, dice)
    assert calibration_error([odds]) == pytest.approx(expected / 10)
    assert calibration_error([Odds()]) == 0.0


def test_many_verdicts_at_once() -> None:
    """Rounds with three drafts each, of which 2, 0 and 3 are right; the last one ended the text."""
    odds, own = Odds(), RequestOdds()
    judge_counts(odds, {(3, 2): 4, (1, 0): 2, (3, 3): 1}, own)
    tried, right = [7.0, 5.0, 5.0], [5.0, 5.0, 1.0]
    expected, weight = FIRST_GUESS, DEPTH_PRIOR
    for depth in range(3):
        expected, weight = (right[depth] + weight * expected) / (tried[depth] + weight), ALIKE
        assert odds.chances_by_depth(1 + depth)[-1] == pytest.approx(expected)
    assert own.right == sum(right)
    assert own.expected == pytest.approx(FIRST_GUESS * sum(tried))
    assert sum(count for count, _, _ in odds.tenths) == sum(tried)


def test_first_drafts_are_hoped_for_while_few_were_made() -> None:
    """Who rests learns nothing: a few wrong drafts at the start must not end drafting."""
    hopes = []
    for count in (0, 10, 100, 1000):
        odds = Odds()
        if count:
            judge_counts(odds, {(1, 1): 6 * count // 10, (1, 0): 4 * count // 10}, RequestOdds())
        first, second = odds.hoped_by_depth(2)
        assert second == odds.chances_by_depth(2)[-1], "of the first alone"
        hopes.append(first - odds.chances_by_depth(1)[-1])
    assert hopes == pytest.approx([HOPE / (DEPTH_PRIOR + count) ** 0.5 for count in (0, 10, 100, 1000)])


def test_drafts_made_where_others_seemed_likely_say_nothing_of_any() -> None:
    """A second draft after a likely first one is right more often than one after any first one."""
    odds, own = Odds(), RequestOdds()
    judge_counts(odds, {(1, 1): 60, (1, 0): 40}, own)
    rounds = np.full(100, 2)
    odds.judge_chains(rounds, rounds, np.tile([2, 0.9, 0.9], (100, 1)), np.zeros((100, 1)), own)
    assert odds.chances_by_depth(2)[-1] == odds.chances_by_depth(1)[-1] < 0.9
    judge_counts(odds, {(2, 1): 80}, own)
    assert odds.chances_by_depth(2)[-1] < 0.2
    assert odds.guess(1, 0.9, own).engine_chance > 0.9, "what the drafter is sure of stays likely"
