"""Rows that are planned draft by draft: what is decided for them and learnt of them, with numba and without."""

import importlib
import random
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

from peregrine.engine import draft_rows
from peregrine.engine.draft_rows import NO_VERDICTS, DraftRows
from peregrine.engine.request import Request
from peregrine.kernels.round import FINISH_NONE, FINISH_STOP
from peregrine.kernels.runtime import cpu
from peregrine.kernels.runtime.arrays import Arrays
from peregrine.sampling import SamplingParams
from peregrine.spec import rows_cpu
from peregrine.spec.links import Branched
from peregrine.spec.odds import PRIOR, Floats, Guess, Odds, RequestOdds, odds_by_kind
from peregrine.spec.planner import Costs

DEPTH = 4
COSTS = Costs(((1, 1.0), (64, 7.3)), ((1, 0.0),), ((1, 0.1),), DEPTH, ragged=0.1)
PLAIN = (
    "peregrine.kernels.runtime.host_jit",
    "peregrine.spec.planner_cpu",
    "peregrine.spec.odds_cpu",
    "peregrine.spec.rows_cpu",
)


def requests_of(count: int, temperature: float = 0.0) -> list[Request]:
    return [Request(i, [1, 2, 3], SamplingParams(temperature=temperature), 0, 99) for i in range(count)]


@pytest.fixture
def plain_functions(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`rows_cpu.py` as it is where numba is not installed."""
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "NUMBA_PRESENT", False)
        for name in PLAIN:
            patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module(PLAIN[-1])


def some_rounds(dice: random.Random, rounds: int) -> tuple[Floats, Floats, list[object]]:
    """What is known of three rows and of odds after random rounds, and what was decided on the way."""
    odds, _ = odds_by_kind()
    requests = [*requests_of(2), *requests_of(1, temperature=1.0)]
    rows, decided, offered = DraftRows.of(requests, odds, DEPTH), list[object](), [0, 0, 0]
    rows.begin((1, 1, 1), [])
    verdicts = np.array([[1, 0, 0, FINISH_NONE]] * 3)
    for _ in range(rounds):
        whole, late = dice.random() < 0.2, dice.random() < 0.5
        if not late:
            decided.append(rows.judge(verdicts, None)[0])
        lens, expected, won = rows.choose(COSTS, offered, 0.4, whole, verdicts if late else NO_VERDICTS)
        drafted = [row for row in range(3) if dice.random() < 0.9]
        rows.begin(lens, drafted)
        decided += [lens, round(expected, 9), won]
        made = dice.randint(1, DEPTH) if drafted else 0
        for depth in range(1, made + 1):
            said = torch.tensor([dice.random() for _ in drafted])
            if dice.random() < 0.3:
                rows.add(said, first=depth == 1)
            else:
                decided.append(rows.add_and_want(said, depth, COSTS, tokens=3 + depth, rate=0.4))
        if dice.random() < 0.2:
            rows.force([dice.randint(0, 2) for _ in requests], first=not made)
        offered = [dice.randint(count, DEPTH) if dice.random() < 0.2 else count for count in rows.made]
        right = [dice.randint(0, length - 1) for length in lens]
        ends = [dice.choice((FINISH_NONE, FINISH_NONE, FINISH_STOP)) for _ in lens]
        table = [[1 + correct, correct, 0, end] for correct, end in zip(right, ends, strict=True)]
        verdicts = np.array(table)
    return rows.table, odds, decided


def test_without_numba_the_same_is_decided_and_learnt(
    plain_functions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu.NUMBA_PRESENT:
        assert not hasattr(plain_functions.judge_windows, "py_func")
    table, odds, decided = some_rounds(random.Random(1), 60)
    monkeypatch.setattr(draft_rows, "_compiled", plain_functions)
    plain_table, plain_odds, plain = some_rounds(random.Random(1), 60)
    assert decided == plain
    assert np.allclose(table, plain_table, rtol=1e-12, equal_nan=True)
    assert np.allclose(odds, plain_odds, rtol=1e-12)


def test_compiled_functions_find_arrays_by_one_address(plain_functions: ModuleType) -> None:
    dice = np.random.default_rng(1)
    table, numbers, odds = dice.random((3, 5)), dice.integers(9, size=(4, 3)), dice.random((2, 7))
    arrays = Arrays(table, numbers, odds)
    for found in (rows_cpu.state_at(arrays.address), plain_functions.state_at(arrays.address)):
        for one, other in zip(found, (table, numbers, odds.reshape(-1)), strict=True):
            assert np.array_equal(one, other)
            assert np.shares_memory(one, other), "what is written there is seen here"
    with pytest.raises(AssertionError):
        Arrays(table[:, :2])


@pytest.mark.parametrize(
    ("right", "finish", "counted"), [(0, FINISH_NONE, 1), (1, FINISH_NONE, 2), (1, FINISH_STOP, 1)]
)
def test_drafts_after_the_first_wrong_one_or_past_the_end_have_no_verdict(
    right: int, finish: int, counted: int
) -> None:
    """Three drafts of which the drafter says 0.95 each: by the counts, and by the request's own record."""
    odds, by_kind = odds_by_kind()
    rows = DraftRows.of(requests_of(1), odds, DEPTH)
    rows.begin((1,), [0])
    for depth in range(3):
        rows.add(torch.tensor([0.95]), first=depth == 0)
    rows.judge(np.array([[1, 0, 0, FINISH_NONE]]), None)  # nothing was verified; the drafts are in the window
    expected = pytest.approx(sum(0.935**n for n in (1, 2, 3)))
    assert rows.choose(COSTS, [3], rate=0.4, whole=True) == ((4,), expected, 0)
    assert rows.judge(np.array([[1 + right, right, 3, finish]]), None)[0] == 1 + right
    tried = by_kind[False].counts[..., 1] - PRIOR
    assert tried.sum() == counted
    assert by_kind[False].counts[..., 0].sum() - Odds().counts[..., 0].sum() == pytest.approx(right)
    assert by_kind[True].num_judged == 0, "another class of requests"
    rows.tell()
    assert rows.requests[0].odds.right == right
    assert rows.requests[0].odds.expected == pytest.approx(0.935 * counted, rel=0.1)


def test_of_a_path_through_a_branch_only_the_chains_drafts_are_right() -> None:
    """A chain of two drafts, with a branch at its first place: nodes 0, 1, 2 and the branch, 3."""
    odds, by_kind = odds_by_kind()
    rows = DraftRows.of(requests_of(1), odds, DEPTH)
    rows.begin((1,), [0])
    for depth in range(2):
        rows.add(torch.tensor([0.95]), first=depth == 0)
    rows.judge(np.array([[1, 0, 0, FINISH_NONE]]), None)
    rows.begin((3,), [0])
    branched = Branched.of([[5, 6, 7]], [[(0, 8)]])
    table = np.array([[2, 1, 3, FINISH_NONE, 8, 9, -1, -1, 0, 3, -1, -1]])  # tokens, then the path
    won, right = rows.judge(table, branched)
    assert (won, right.tolist()) == (2, [0])
    assert by_kind[False].counts[0, 9].tolist() == pytest.approx([PRIOR * 0.935, PRIOR + 1])


def test_what_is_known_goes_from_requests_to_rows_and_back() -> None:
    odds, _ = odds_by_kind()
    requests = requests_of(2)
    requests[0].odds = RequestOdds(3.0, 2.0)
    requests[1].guesses = [Guess(0.9, 0.8, 0.7), Guess(float("nan"), 0.5, 0.4)]
    rows = DraftRows.of(requests, odds, DEPTH)
    assert rows.chances(1) == [0.8, 0.5]
    rows.rest(2)
    rows.tell()
    assert requests[0].odds == RequestOdds(pytest.approx(3.0 * 0.97**2), pytest.approx(2.0 * 0.97**2))
    assert requests[0].guesses == []
    assert requests[1].guesses[0] == (0.9, 0.8, 0.7)
    assert np.isnan(requests[1].guesses[1].said)


def test_a_row_has_no_drafts_past_its_end() -> None:
    """It may generate 96 tokens; a draft more than are left would be thrown away."""
    odds, _ = odds_by_kind()
    rows = DraftRows.of(requests_of(1), odds, DEPTH)
    assert rows.cap(0) == DEPTH
    rows.rest(93)
    assert rows.cap(0) == 2
    rows.begin((2,), [])
    rows.judge(np.array([[2, 1, 1, FINISH_NONE]]), None)
    assert rows.cap(0) == 0
    assert rows.choose(COSTS, [3], rate=0.01, whole=False)[0] == (1,)


def test_verdicts_are_taken_in_with_the_next_choice_as_before_it() -> None:
    """Whatever is offered then: what was made, or more."""
    for offered in ([1, 1], [2, 1]):
        tables = []
        for late in (False, True):
            odds, _ = odds_by_kind()
            rows = DraftRows.of(requests_of(2), odds, DEPTH)
            rows.begin((1, 1), [0, 1])
            rows.add(torch.tensor([0.95, 0.5]), first=True)
            assert rows.made == [1, 1]
            verdicts = np.array([[1, 0, 0, FINISH_NONE]] * 2)
            if not late:
                assert rows.judge(verdicts, None)[0] == 2
            lens, _, won = rows.choose(COSTS, offered, 0.4, True, verdicts if late else NO_VERDICTS)
            assert lens == tuple(1 + count for count in offered)
            assert won == (2 if late else 0)
            tables.append((rows.table, odds))
        assert np.array_equal(tables[0][0], tables[1][0], equal_nan=True)
        assert np.array_equal(tables[0][1], tables[1][1])


def test_what_is_said_may_lie_anywhere_in_memory() -> None:
    """The drafts of a block are columns, and may be of another dtype."""
    odds, _ = odds_by_kind()
    rows = DraftRows.of(requests_of(2), odds, DEPTH)
    rows.begin((1, 1), [0, 1])
    said = torch.tensor([[0.25, 0.5], [0.75, 0.125]])
    rows.add(said[:, 1], first=True)
    rows.add_and_want(said.T[0].double(), 2, COSTS, tokens=4, rate=0.4)
    rows.judge(np.array([[1, 0, 0, FINISH_NONE]] * 2), None)
    rows.tell()
    assert [[guess.said for guess in request.guesses] for request in rows.requests] == [[0.5, 0.25], [0.125, 0.75]]
