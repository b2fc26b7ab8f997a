"""The planner against brute force, and what must hold of every plan."""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peregrine.engine.planned_rates import PlannedRate
from peregrine.engine.round_costs import PlannedRound
from peregrine.engine.round_times import RoundTimes
from peregrine.engine.start_costs import measure_costs
from peregrine.spec.planner import Costs, depth_plan, ms_at, paying_depths, plan_depths, trim_windows
from peregrine.spec.windows import Windows

chances = st.floats(0.01, 0.99)
rows = st.lists(st.lists(chances, max_size=3), min_size=1, max_size=4)


def falling(lines: Sequence[Sequence[float]]) -> list[list[float]]:
    """Survivals from chances: products along each row."""
    made = []
    for line in lines:
        survival, out = 1.0, []
        for chance in line:
            survival *= chance
            out.append(survival)
        made.append(out)
    return made


@st.composite
def straight_costs(draw: st.DrawFn) -> Costs:
    """Costs that are straight lines; at least one row always costs something."""
    base, token, absorb, step, row = (draw(st.floats(0.01, 3)) for _ in range(5))
    steps = draw(st.integers(0, 3))
    return Costs(
        verify=((1, base + token), (101, base + 101 * token)),
        absorb=((1, absorb), (101, absorb + 0.1 * token)),
        step=((1, step + row), (101, step + 101 * row)),
        steps=steps,
    )


@settings(max_examples=150, deadline=None)
@given(straight_costs(), rows)
def test_plans_are_as_good_as_brute_force(costs: Costs, lines: list[list[float]]) -> None:
    survivals = falling(lines)
    every = product(*(range(len(line) + 1) for line in survivals))
    best = max(depth_plan(costs, survivals, depths).rate for depths in every)
    assert plan_depths(costs, survivals).rate == pytest.approx(best, rel=1e-6)


@settings(max_examples=150, deadline=None)
@given(straight_costs(), rows, st.floats(0.05, 2))
def test_what_is_verified_is_as_good_as_brute_force(costs: Costs, lines: list[list[float]], faster: float) -> None:
    survivals, count = falling(lines), len(lines)
    rate = (1 + faster) * count / costs.verify_ms(count)

    def net(depths: Sequence[int]) -> float:
        won = sum(sum(line[:depth]) for line, depth in zip(survivals, depths, strict=True))
        return won - rate * costs.verify_ms(count + sum(depths))

    every = product(*(range(len(line) + 1) for line in survivals))
    assert net(trim_windows(costs, survivals, rate)) == pytest.approx(max(map(net, every)), rel=1e-6, abs=1e-9)


steps_up = st.lists(st.floats(0.01, 5), min_size=3, max_size=12)


@settings(max_examples=150, deadline=None)
@given(steps_up, steps_up, rows, st.floats(0, 3))
def test_no_plan_is_expected_to_be_slower_than_plain(
    verify: list[float], step: list[float], lines: list[list[float]], rate: float
) -> None:
    """Whatever the costs: stairs included."""
    points = tuple((size, sum(verify[: size + 1])) for size in range(1, len(verify)))
    steps = tuple((size, sum(step[: size + 1])) for size in range(1, len(step)))
    costs, survivals = Costs(points, points, steps, 3), falling(lines)
    plain = depth_plan(costs, survivals, [0] * len(lines)).rate
    assert plan_depths(costs, survivals).rate >= plain * (1 - 1e-9)
    trimmed = trim_windows(costs, survivals, rate)
    won = sum(sum(line[:depth]) for line, depth in zip(survivals, trimmed, strict=True))
    ms = costs.verify_ms(len(lines) + sum(trimmed))
    assert (len(lines) + won) / ms >= len(lines) / costs.verify_ms(len(lines)) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(straight_costs(), st.lists(st.lists(chances, max_size=3), min_size=2, max_size=5), st.randoms())
def test_the_order_of_rows_changes_nothing(costs: Costs, lines: list[list[float]], dice: object) -> None:
    survivals = falling(lines)
    order = list(range(len(lines)))
    dice.shuffle(order)  # type: ignore[attr-defined]
    one, other = plan_depths(costs, survivals), plan_depths(costs, [survivals[row] for row in order])
    assert one.rate == pytest.approx(other.rate)
    assert [one.depths[row] for row in order] == list(other.depths) or one.tokens == pytest.approx(other.tokens)


@settings(max_examples=60, deadline=None)
@given(straight_costs(), rows, st.floats(1.1, 5))
def test_dearer_drafts_are_fewer(costs: Costs, lines: list[list[float]], dearer: float) -> None:
    survivals, rate = falling(lines), 0.3
    step = tuple((size, ms * dearer) for size, ms in costs.step)
    changed = Costs(costs.verify, costs.absorb, step, costs.steps)
    assert sum(paying_depths(changed, survivals, rate)) <= sum(paying_depths(costs, survivals, rate))


@settings(max_examples=80, deadline=None)
@given(st.floats(2, 8), st.floats(0.05, 0.6), rows)
def test_a_blocks_drafts_pay_for_its_step_together(step: float, token: float, lines: list[list[float]]) -> None:
    """The first draft alone does not."""
    costs = Costs(((1, 4.0), (101, 4.0 + 100 * token)), ((1, 0.5),), ((1, step), (101, step + 100)), steps=1)
    survivals = falling(lines)
    every = product(*(range(len(line) + 1) for line in survivals))
    best = max(depth_plan(costs, survivals, depths).rate for depths in every)
    assert plan_depths(costs, survivals).rate == pytest.approx(best, rel=1e-6)
    assert plan_depths(costs, [[0.9, 0.9, 0.9, 0.9]]).depths == (4,)


def test_likely_rows_get_long_windows() -> None:
    costs = Costs(
        verify=((1, 1.0), (2, 1.3), (20, 6.7)), absorb=((1, 0.1), (20, 0.1)), step=((1, 0.1), (8, 0.2)), steps=5
    )
    plan = plan_depths(costs, falling([[0.95] * 5, [0.05] * 5]))
    assert plan.depths[0] >= 3
    assert plan.depths[1] == 0
    assert plan_depths(costs, falling([[0.05] * 5] * 4)).depths == (0, 0, 0, 0)


def test_costs_between_and_beyond_measured_sizes() -> None:
    points = ((1, 1.0), (3, 2.0), (5, 6.0))
    assert [ms_at(points, size) for size in (1, 2, 3, 4, 6)] == [1.0, 1.5, 2.0, 4.0, 8.0]
    assert ms_at(((4, 3.0),), 9) == 3.0
    costs = Costs(points, points, points, 1)
    assert costs.round_ms(3, [1, 1]) == 2.0 + 2.0 + 1.0  # only the first step is paid for
    assert costs.round_ms(3, []) == 2.0  # nothing is absorbed while no row drafts
    assert costs.to_json()["verify"] == [[1, 1.0], [3, 2.0], [5, 6.0]]


def test_windows_of_one_length_are_taken_where_others_cost_more() -> None:
    """Two drafts pay in the first row and one in the second, at 0.2 tokens each; then all rows have two, or one."""
    costs = Costs(verify=((1, 1.0), (9, 1.8)), absorb=((1, 0.0),), step=((1, 0.0),), steps=8)
    survivals = [[0.9, 0.5], [0.9, 0.1]]
    assert trim_windows(costs, survivals, rate=2.0) == [2, 1]
    assert trim_windows(replace(costs, ragged=0.04), survivals, rate=2.0) == [2, 1], "1.7 - 0.08 against 1.6"
    assert trim_windows(replace(costs, ragged=0.06), survivals, rate=2.0) == [2, 2]
    assert trim_windows(replace(costs, ragged=0.06), [[0.9, 0.3], [0.9, 0.0]], rate=2.0) == [1, 1]
    assert trim_windows(replace(costs, ragged=9.0), [[0.9], []], rate=2.0) == [0, 0]


def test_the_cost_of_windows_that_differ_is_timed() -> None:
    def timed(lens: Sequence[int], drafts: int) -> RoundTimes:
        return RoundTimes(1.0, 0.5 + 0.25 * (len(set(lens)) > 1), [])

    assert measure_costs(timed, max_rows=4, depth=4, steps=4).costs().ragged == pytest.approx(0.25)
    assert measure_costs(timed, max_rows=1, depth=4, steps=4).costs().ragged == 0.0


def test_a_busy_machine_leaves_no_size_untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is one of processor time: other processes take the clock's, and a short table is a wrong one."""
    clock = count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    costs = measure_costs(lambda lens, drafts: RoundTimes(float(sum(lens)), 0.0, []), 2, depth=4, steps=4).costs()
    assert costs.verify == tuple((size, float(size)) for size in (1, 2, 3, 4, 5, 6, 8, 10))


@pytest.mark.parametrize("max_rows", range(1, 18))
def test_any_number_of_rows_has_a_table_of_what_was_timed(max_rows: int) -> None:
    """Rows that are no power of two are timed as they are: a size in the table is the number of tokens that ran."""
    costs = measure_costs(lambda lens, drafts: RoundTimes(float(sum(lens)), 1.0, [1.0]), max_rows, 4, 4).costs()
    assert all(size == ms for size, ms in costs.verify)
    assert max_rows in dict(costs.verify)


@pytest.mark.parametrize("max_rows", [1, 2, 4, 8])
def test_steps_in_what_rounds_cost_are_seen_with_few_rows_too(max_rows: int) -> None:
    """Kernels take four rows at a time: a fifth token costs as much as four more."""

    def timed(lens: Sequence[int], drafts: int) -> RoundTimes:
        assert max(lens) <= 6
        return RoundTimes(float(-(-sum(lens) // 4)), 0.5, [0.1] * (drafts - 1))

    costs = measure_costs(timed, max_rows, depth=5, steps=5).costs()
    assert [costs.verify_ms(tokens) for tokens in (1, 3, 4, 5, 6)] == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("max_rows", [1, 2])
def test_the_longest_windows_of_one_and_two_rows_are_timed(max_rows: int) -> None:
    """Kernels take four rows at a time: 10 and 12 tokens cost the same, and 16 more."""
    costs = measure_costs(lambda lens, drafts: RoundTimes(float(-(-sum(lens) // 4)), 0.5, []), max_rows, 7, 7).costs()
    assert costs.verify_ms(8 * max_rows) == 2 * max_rows


@pytest.mark.parametrize("max_rows", [4, 8, 16])
def test_a_step_does_not_make_larger_rounds_look_free(max_rows: int) -> None:
    """Kernels take eight rows at a time: 9 to 16 tokens cost the same, and 48 cost three times as much."""
    costs = measure_costs(lambda lens, drafts: RoundTimes(float(-(-sum(lens) // 8)), 0.5, []), max_rows, 5, 5).costs()
    assert costs.verify_ms(48) == pytest.approx(6.0)


def steady(lens: Sequence[int], drafts: int) -> RoundTimes:
    """A first draft follows from what was absorbed; every further one takes a step of the network."""
    rows, tokens = len(lens), sum(lens)
    return RoundTimes(2.0 + 0.1 * tokens, 0.5 + 0.02 * tokens + 0.3 * rows, [0.9 * rows] * (drafts - 1))


def test_the_first_draft_has_a_cost_of_its_own() -> None:
    costs = measure_costs(steady, max_rows=2, depth=4, steps=4).costs()
    assert [costs.step_ms(2, level) for level in range(1, 5)] == pytest.approx([1.8, 1.8, 1.8, 0.0])
    assert costs.round_ms(8, [2, 2]) == pytest.approx(2.8 + (0.5 + 0.16 + 0.6) + 1.8)
    assert plan_depths(costs, [[0.6, 0.5]]).depths == (1,), "a second one would pay at the mean of the two costs"
    block = measure_costs(steady, max_rows=2, depth=4, steps=1).costs()
    assert block.step_ms(1, 1) == 0.0
    assert block.round_ms(2, [2, 2]) == pytest.approx(2.2 + 0.5 + 0.04 + 0.6), "one step drafts all levels"


def test_a_disturbed_round_does_not_make_drafts_look_free() -> None:
    """Each part is timed by itself: the difference of two rounds, one of them disturbed, could be anything."""
    disturbed = count()

    def timed(lens: Sequence[int], drafts: int) -> RoundTimes:
        more = 3.0 if next(disturbed) % 7 else 0.0
        times = steady(lens, drafts)
        return RoundTimes(times.verify_ms + more, times.first_ms + more / (1 + drafts), times.steps_ms)

    costs = measure_costs(timed, max_rows=4, depth=4, steps=4).costs()
    assert costs.step_ms(4, 1) == pytest.approx(3.6)
    assert costs.round_ms(4, [4, 4]) == pytest.approx(2.4 + (0.5 + 0.08 + 1.2) + 3.6)


def test_rounds_tell_how_the_drafter_compares_with_the_verification() -> None:
    """A drafter twice as slow as in the table costs twice as much; a machine half as fast costs nothing more."""
    measured = measure_costs(steady, max_rows=4, depth=4, steps=4)
    before = measured.costs()
    for number in range(12):
        times = steady([2, 2], 3)
        off = 9.0 if number % 4 == 1 else 1.0  # interrupted, or it recorded a new size
        slow = RoundTimes(off * 2 * times.verify_ms, 4 * times.first_ms, [4 * ms for ms in times.steps_ms])
        usual = PlannedRound(Windows.of((2, 2)), [2, 2, 2], False, True, slow, 0, None)
        some = RoundTimes(2 * 2.5, 9.0, [])
        measured.learn_planned([usual, PlannedRound(Windows.of((5,)), [2, 2, 2], False, False, some, 0, None)])
    after = measured.costs()
    assert after.verify == before.verify
    assert after.step_ms(4, 0) == pytest.approx(2 * before.step_ms(4, 0))
    assert after.step_ms(4, 1) == pytest.approx(2 * before.step_ms(4, 1))


def test_planned_rounds_that_give_less_are_left_and_tried_again_later() -> None:
    """Rounds planned draft by draft whose rate is nine tenths of what one number of drafts gives."""
    rate, steady = PlannedRate(), 0.5
    assert rate.value(steady, hope=1.08) > steady, "they are tried where one may hope"
    assert rate.value(steady) == steady
    for _ in range(80):
        rate.note(tokens=2, ms=2 / (0.9 * steady))
    assert rate.value(steady, hope=1.08) == pytest.approx(0.9 * steady)
    assert rate.value(0.4) > 0.4, "where one number of drafts gives less, they are worth having"
    rate.fade(100)
    assert rate.value(steady, hope=1.08) < steady
    rate.fade(2000)
    assert rate.value(steady, hope=1.08) > steady
    for _ in range(100):
        rate.note(tokens=3, ms=3 / (1.2 * steady))
    assert rate.value(steady) > 1.1 * steady


def test_kernels_that_are_compiled_first_leave_no_size_untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a new machine: the first round and the first of several rows take seconds."""
    clock, seen = [0.0], set[bool]()

    def time_round(lens: Sequence[int], drafts: int) -> RoundTimes:
        clock[0] += 0.001 if (len(lens) > 1) in seen else 5.0
        seen.add(len(lens) > 1)
        return RoundTimes(1.0 * sum(lens), 1.0, [0.5] * (drafts - 1))

    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    sizes = [size for size, _ in measure_costs(time_round, 16, 8, 8).costs().verify]
    assert sizes == [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 32]
