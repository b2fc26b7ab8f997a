"""Windows of unlike length of a request alone: rounds that follow each other correct what the table says of them."""

import random

import pytest

from peregrine.engine.lone_windows import TRIED, LoneWindows
from peregrine.engine.round_costs import PastRound, RoundCosts
from peregrine.engine.round_times import RoundTimes
from peregrine.spec.planner import Costs

REAL = {1: 4.0, 2: 4.2, 3: 4.4, 4: 4.7}  # milliseconds by tokens
BUSY = {1: 4.0, 2: 4.2, 3: 6.6, 4: 7.0, 8: 9.0}  # as they were timed: three tokens when the machine was busy


def windows(table: dict[int, float]) -> LoneWindows:
    return LoneWindows(Costs(tuple(table.items()), ((1, 0.0),), ((1, 0.5),), 8))


def times(lone: LoneWindows, hoped: bool = False) -> list[float]:
    return [(lone.hoped if hoped else lone.table).verify_ms(size) for size in REAL]


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_rounds_that_follow_each_other_correct_the_table(slower: float) -> None:
    """By what they compare, not by how fast the machine is; one that was interrupted changes nothing."""
    lone, dice = windows(BUSY), random.Random(0)
    for number in range(200):
        size = dice.choice(list(REAL))
        lone.note(size, slower * REAL[size] * (3.0 if number % 20 == 19 else 1.0))
    lone.correct()
    assert times(lone) == pytest.approx(list(REAL.values()), rel=0.02)
    assert lone.table.verify_ms(8) < BUSY[8], "longer ones that were not seen are as much cheaper"


def test_one_length_alone_corrects_nothing() -> None:
    """However long its rounds take: that is the machine's speed."""
    lone = windows(BUSY)
    before = times(lone)
    for _ in range(100):
        lone.note(3, 100.0)
    lone.correct()
    assert times(lone) == pytest.approx(before)


def test_a_length_that_was_hardly_tried_is_hoped_to_be_cheap_until_it_was() -> None:
    """The shortest such length: three tokens after one and two, then four."""
    lone = windows(BUSY)
    for new in (3, 4):
        for number in range(2 * TRIED):
            size = number % (new - 1) + 1
            lone.note(size, REAL[size])
        lone.correct()
        hoped = times(lone, hoped=True)
        assert hoped[new - 1] == hoped[new - 2]
        assert hoped[new - 1] < times(lone)[new - 1]
        for _ in range(TRIED):
            lone.note(1, REAL[1])
            lone.note(new, REAL[new])
        lone.correct()
        assert times(lone, hoped=True)[:new] == pytest.approx(times(lone)[:new])


def test_costs_of_a_row_alone_follow_its_rounds_and_those_of_others_do_not() -> None:
    costs = RoundCosts(BUSY, {1: 0.0}, {1: 0.5}, 8)
    several = costs.steady_ms(4, 0)
    for number in range(120):
        size = number % len(REAL) + 1
        usual = number % 3 > 0
        took = RoundTimes(REAL[size] if usual else 9.0, 0.5, [], usual=usual)  # others recorded a new size
        costs.learn_steady([PastRound(size, 1, 1, took, 1, None)])
    alone = costs.replayed()
    assert [alone.verify_ms(size) for size in REAL] == pytest.approx(list(REAL.values()), rel=0.03)
    assert costs.steady_ms(4, 0) == several


def test_rounds_that_all_recorded_something_correct_nothing() -> None:
    costs = RoundCosts(BUSY, {1: 0.0}, {1: 0.5}, 8)
    before = costs.replayed()
    costs.learn_steady([PastRound(2, 1, 1, RoundTimes(4.2, 0.5, [], usual=False), 1, None)])
    assert costs.replayed().verify_ms(3) == before.verify_ms(3)
