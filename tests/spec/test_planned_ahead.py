"""Rounds in parts, planned before the drafts are known, as a GPU has them; here without a recording.

The plans are random: any size, any windows that fill it, drafts of any depth. They change no token.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.interpreted import needs_interpreter, send_to_triton
from peregrine.engine import window_choice
from peregrine.engine.ahead_planner import AheadCosts, AheadPlanner
from peregrine.llm import engine_config
from peregrine.sampling import SamplingParams
from peregrine.spec.ahead import MARGIN, Choice, RowCosts, allot, choose_size, gains, token_sizes, window_width
from peregrine.spec.depth_odds import DepthOdds
from peregrine.spec.registry import DRAFTERS as BY_NAME
from peregrine.spec.registry import DraftSource
from peregrine.spec.windows import WindowBuffer, Windows
from spec.any_plans import ahead
from spec.block_heads import block_head, calm_model
from spec.harness import Case, build, check_pages, run, tokens
from spec.harness import cases as harness_cases
from spec.test_grammar_identity import MIXED
from spec.test_identity import plain
from spec.test_planned_rounds import DRAFTERS, SOME


@pytest.mark.parametrize("name", DRAFTERS)
def test_any_plan_changes_no_token(name: str) -> None:
    engine, planner = ahead(1, row_sizes=(2, 4), **DRAFTERS[name])
    outputs = run(engine, SOME, [0, 0, 0, 3, 5, 9, 9, 12, 30, 31])
    assert tokens(outputs) == plain(SOME)
    assert len(planner.seen) > 8
    if name in ("noisy model", "itself"):
        assert sum(output.stats.correct for output in outputs) > 20


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_any_plan_on_any_schedule(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(DRAFTERS)))
    some = data.draw(st.lists(st.sampled_from(SOME), min_size=1, max_size=4))
    arrivals = [data.draw(st.integers(0, 12)) for _ in some]
    sizes = {
        "page_size": 8,
        "num_pages": 90,
        "max_rows": data.draw(st.integers(1, 4)),
        "lag": data.draw(st.integers(0, 2)),
    }
    engine, _ = ahead(data.draw(st.integers(0, 99)), **(DRAFTERS[name] | sizes))
    assert tokens(run(engine, some, arrivals)) == plain(some)
    check_pages(engine)


def test_rows_with_grammars_come_and_go() -> None:
    some = [MIXED[0], MIXED[3], MIXED[4], SOME[1]]
    expected = tokens(run(build().engine, some))
    for name in ("noisy model", "ngram"):
        engine, _ = ahead(2, **(DRAFTERS[name] | {"num_drafts": 6}))
        assert tokens(run(engine, some, [0, 4, 9, 0])) == expected


def test_block_heads() -> None:
    expected = tokens(run(build(calm_model()).engine, SOME[:4]))
    options = {"drafter": str(block_head("deepspec", "vanilla", True)), "confidence_threshold": 1e-9}
    engine, _ = ahead(3, model=calm_model(), num_drafts=4, **options)
    assert tokens(run(engine, SOME[:4])) == expected


def test_what_is_reported_of_rounds() -> None:
    """Log-probabilities are those of plain decoding; drafts that are reported are those that were verified."""
    asked = SamplingParams(temperature=1.0, seed=3, max_tokens=30, logprobs=3, report_drafts=True)
    some = [Case(case.prompt, asked) for case in SOME[:3]]
    wanted = [output.logprobs for output in run(build().engine, some)]
    outputs = run(ahead(4, **DRAFTERS["itself"])[0], some)
    assert [output.logprobs for output in outputs] == wanted
    for output in outputs:
        assert output.stats.drafted > 0


def test_a_perfect_drafter_stays_perfect() -> None:
    """Whatever was read without drafting, and however windows were cut, the drafter has read every token."""
    case = Case((5, 9, 200), SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
    output = run(ahead(7, **DRAFTERS["itself"])[0], [case])[0]
    assert output.stats.drafted > 40
    assert output.stats.drafted - output.stats.correct < 6, "only the last window may reach past the end"


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_on_the_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head with confidences: the device chooses the windows itself."""
    some = harness_cases(2, max_tokens=2, seed=7)
    expected = tokens(run(build(calm_model()).engine, some))
    drafter = str(block_head("deepspec", "vanilla", confidence=True))
    options = {"drafter": drafter, "num_drafts": 2, "confidence_threshold": 1e-9}
    engine, _ = ahead(5, model=calm_model(), attention="triton", **options)
    send_to_triton(monkeypatch)
    with torch.inference_mode():
        assert tokens(run(engine, some)) == expected


def test_an_engine_with_its_own_plans() -> None:
    """Costs are timed, drafts that are right are made, and requests whose drafts are wrong end them."""
    engine, _ = ahead(0, **DRAFTERS["itself"])
    runner = engine.runner
    assert runner.ahead is not None
    rounds = runner.ahead[1]
    with torch.inference_mode():
        costs = rounds.measure(range(1, 5), None)
    assert all(c.verify[0] >= 0 and c.draft[-1] > 0 for c in costs.by_rows.values())
    cheap = {rows: table(token_sizes(rows, 6), depth=6) for rows in range(1, 5)}
    planner = AheadPlanner(6, AheadCosts(cheap))
    runner.ahead = planner, rounds
    some = [Case(case.prompt, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)) for case in SOME[:3]]
    outputs = run(engine, some)
    assert tokens(outputs) == plain(some)
    assert sum(output.stats.correct for output in outputs) > 100
    assert planner.record.rounds["drafts"] > 5
    assert planner.calibration_error < 0.5


def test_a_row_that_rests_is_looked_at_now_and_then() -> None:
    """One request alone, whose drafts were all wrong, is drafted for again when its drafts have become right."""
    engine, _ = ahead(0, **DRAFTERS["itself"])
    runner = engine.runner
    assert runner.ahead is not None
    planner = AheadPlanner(6, AheadCosts({rows: table(token_sizes(rows, 6), depth=6) for rows in range(1, 5)}))
    planner.odds.right[:], planner.odds.tried[:] = 0.0, 500.0
    runner.ahead = planner, runner.ahead[1]
    case = Case((5, 9, 200), SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
    output = run(engine, [case])[0]
    assert output.stats.correct > 20
    assert planner.record.rounds["plain"] > 4


def test_what_is_never_found_is_not_waited_for() -> None:
    """Look-ups that find nothing end up with windows of one token, though no draft was ever wrong."""
    planner = AheadPlanner(3, AheadCosts({2: table(token_sizes(2, 3), depth=3)}), looks_up=True)
    requests: list[Any] = [SimpleNamespace(id=i, params=SamplingParams(), num_tokens=9) for i in range(2)]
    for _ in range(60):
        planner.learn(planner.plan(requests, 2), np.array([[1, 0, 0, 0]] * 2))
    assert planner.record.rounds["plain"] > planner.record.rounds["drafts"] + planner.record.rounds["mixed"]


def table(sizes: Sequence[int], depth: int, token_ms: float = 0.05, step_ms: float = 0.1) -> RowCosts:
    """Costs that grow evenly."""
    verify = tuple(1 + token_ms * size for size in sizes)
    depths = tuple(range(depth + 1))
    none = (0.0,) * len(sizes)
    return RowCosts(tuple(sizes), verify, none, none, depths, tuple(step_ms * d for d in depths), 0.0)


def survivals_of(chances: Sequence[float], depth: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    return np.array([[chance ** (d + 1) for d in range(depth)] for chance in chances])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.0, 0.99), min_size=1, max_size=5), st.floats(0.001, 1.0), st.floats(0.0, 1.0))
def test_the_choice_is_the_best_there_is(chances: list[float], token_ms: float, step_ms: float) -> None:
    """Against brute force over sizes, depths and the drafts that are read."""
    rows, depth = len(chances), 3
    costs = table(token_sizes(rows, depth), depth, token_ms, step_ms)
    survivals = survivals_of(chances, depth)
    best = 0.0
    for d in range(depth + 1):
        ranked = sorted((float(x) for x in survivals[:, :d].flat), reverse=True)
        for size, ms in zip(costs.sizes, costs.verify, strict=True):
            if size == rows or d:
                best = max(best, (rows + sum(ranked[: size - rows])) / (ms + step_ms * d))
    choice = choose_size(costs, survivals, rows, keys=0)
    assert choice.rate == pytest.approx(best)
    assert choice.rate >= rows / costs.verify[0] * (1 - 1e-9), "never worse than plain decoding"
    for size in costs.sizes:
        for d in costs.depths:
            kept = choose_size(costs, survivals, rows, 0, Choice(size, d, 1.0, 1.0))
            assert kept.rate >= max(choice.rate * (1 - MARGIN), rows / costs.verify[0]) * (1 - 1e-9)
            assert (kept.tokens, kept.depth) in {(size, d), (choice.tokens, choice.depth)}


def test_a_choice_stays_if_it_is_as_good() -> None:
    costs = table(token_sizes(2, 3), 3, token_ms=0.1, step_ms=0.1)
    survivals = survivals_of([0.57, 0.57], 3)
    best = choose_size(costs, survivals, 2, 0)
    rates = [(2 + survivals[:, :d].sum()) / (1 + 0.1 * 2 * (1 + d) + 0.1 * d) for d in range(4)]
    near = min((rate, d) for d, rate in enumerate(rates) if rate > max(rates) * (1 - MARGIN))[1]
    far = int(np.argmin(rates))
    before = Choice(2 * (1 + near), near, 0.0, 1.0)
    assert choose_size(costs, survivals, 2, 0, before).depth == near != best.depth
    assert choose_size(costs, survivals, 2, 0, Choice(2 * (1 + far), far, 0.0, 1.0)) == best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.0, 0.99), min_size=1, max_size=9), st.integers(0, 8), st.integers(0, 7))
def test_windows_fill_their_size(chances: list[float], drafted: int, which: int) -> None:
    rows, depth = len(chances), 8
    sizes = token_sizes(rows, depth)
    size = sizes[which % len(sizes)]
    width = window_width(rows, size, depth)
    survivals = survivals_of(chances, depth)
    lens = allot(survivals, drafted, size, width)
    assert sum(lens) == size
    assert 1 <= min(lens) <= max(lens) <= width
    # No draft that was left out is likelier than one that was taken.
    known = [survivals[r, : min(drafted, width - 1)] for r in range(rows)]
    left = [x for r in range(rows) for x in known[r][lens[r] - 1 :]]
    taken = [x for r in range(rows) for x in known[r][: lens[r] - 1]]
    assert not left or not taken or max(left) <= min(taken) + 1e-12
    backwards = allot(survivals[::-1], drafted, size, width)[::-1]
    again = [x for r in range(rows) for x in known[r][: backwards[r] - 1]]
    assert sum(again) == pytest.approx(sum(taken)), "the order of rows changes nothing"


def test_rows_that_deserve_them_get_the_drafts() -> None:
    survivals = survivals_of([0.1, 0.9, 0.1, 0.9], 8)
    assert allot(survivals, 8, 12, window_width(4, 12, 8)) == [1, 5, 1, 5]
    assert gains(survivals, np.array([0, 1]), np.array([4, 6])).tolist() == [[0.0, 0.0], [0.0, 1.8]]


def test_odds_tell_requests_apart() -> None:
    odds, ids = DepthOdds(4), [7, 8]
    lines, sampled = odds.lines(ids), np.zeros(2, dtype=np.int64)
    for _ in range(40):
        odds.learn(lines, sampled, np.array([[3, 3]]), np.array([[3, 0]]), np.zeros((1, 2), dtype=np.int64))
    good, bad = odds.chances(lines, sampled, hope=False)
    assert good[0] > 0.9 > 0.1 > bad[0]
    again = odds.chances(odds.lines([7, 9]), sampled, hope=False)
    assert again[0, 0] == good[0]
    assert bad[0] < again[1, 0] < good[0], "a new request starts with the engine's mean"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), min_size=2, max_size=8))
def test_odds_count_every_verdict_of_several_rounds(verdicts: list[tuple[int, int, bool]]) -> None:
    """Drafts after the first wrong one have no verdict, nor has the one at which a row ended."""
    odds, rows = DepthOdds(4), 2
    whole = verdicts[: len(verdicts) // rows * rows]
    verified, correct, ended = (np.array([v[i] for v in whole]).reshape(-1, rows).astype(np.int64) for i in range(3))
    correct = np.minimum(correct, verified)
    right, tried = odds.right[0].copy(), odds.tried[0].copy()
    for count, good, end in zip(verified.flat, correct.flat, ended.flat, strict=True):
        for depth in range(count):
            tried[depth] += depth < good or (depth == good and not end)
            right[depth] += depth < good
    odds.learn(odds.lines([1, 2]), np.zeros(2, dtype=np.int64), verified, correct, ended)
    assert odds.right[0].tolist() == right.tolist()
    assert odds.tried[0].tolist() == tried.tolist()


def test_a_buffer_holds_the_windows_it_was_told() -> None:
    buffer = WindowBuffer(3, 6, 4, torch.device("cpu"))
    for lens in ([1, 3, 2], [4, 1, 1]):
        buffer.write(lens)
        own, longer = buffer.windows, buffer.windows.longer()
        lines = torch.arange(12).view(3, 4)
        assert own.pack(lines).tolist() == [4 * row + node for row in range(3) for node in range(lens[row])]
        assert own.deepest.tolist() == [length - 1 for length in lens]
        assert longer.starts.tolist() == Windows.of(tuple(n + 1 for n in lens)).starts.tolist()


def test_a_gpu_plans_where_rounds_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setitem(BY_NAME, "echo", lambda num_drafts, device: SimpleNamespace(propose=None))  # type: ignore[arg-type]
    monkeypatch.setattr(window_choice, "pick_graphs", lambda asked, device: (asked.graphs is not False, ""))

    def picked(drafter: str = "ngram", **options: object) -> str:
        return window_choice.pick_windows(engine_config("merlin", options), DraftSource(drafter, None), gpu)[0]

    assert picked(windows="fixed") == picked(graphs=False) == picked(tree=(3, 2, 8)) == "fixed"
    assert picked() == picked("suffix") == picked(lag=2, row_sizes=(256,)) == "auto"
    assert picked("echo") == "fixed", "it was written without parts"
