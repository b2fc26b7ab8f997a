"""Confidence heads: a threshold shortens windows by just what the head says; plans made ahead learn what it is worth.

Neither changes a token.
"""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from peregrine.engine.ahead_planner import AheadCosts, AheadPlanner, ThresholdPlanner
from peregrine.engine.ahead_rounds import AheadRounds
from peregrine.engine.engine import Engine
from peregrine.engine.runner import VARIANTS
from peregrine.engine.window_choice import parted
from peregrine.errors import ConfigError
from peregrine.sampling import SamplingParams
from peregrine.spec.ahead import token_sizes
from peregrine.spec.odds import EDGES
from peregrine.spec.said_odds import SaidOdds
from spec.block_heads import BlockReference, block_head, calm_model
from spec.harness import Case, build, cases, run, tiny_model, tokens
from spec.test_block_drafters import BIGRAMS, greedy, offered
from spec.test_planned_ahead import table

DSPARK = {"layout": "deepspec", "markov": "vanilla", "confidence": True}
DEPTH = 5


def head(**fields: Any) -> str:
    return str(block_head(**(DSPARK | fields)))


WELL = {"drafter": head(knows_bigrams=True), "num_drafts": DEPTH}  # drafts of a model whose tokens it knows


def said(reference: BlockReference, text: list[int], count: int) -> list[float]:
    """The confidence of each draft after a text, by the formula of the paper."""
    hidden, before = reference.hidden(text, count), [text[-1], *reference.drafts(text, count)]
    tensors = reference.head.tensors
    weight, bias = tensors["confidence_head.proj.weight"][0].double(), tensors["confidence_head.proj.bias"].double()
    embedding = tensors["markov_head.markov_w1.weight"].double()
    return [float(torch.sigmoid(torch.cat((hidden[k], embedding[before[k]])) @ weight + bias)) for k in range(count)]


def test_windows_end_where_confidence_falls_below_the_threshold() -> None:
    given, threshold, lens = head(), 0.3, []
    reference = BlockReference.of(Path(given), tiny_model(), "vanilla")
    options = {"drafter": given, "num_drafts": DEPTH, "confidence_threshold": threshold}
    for text, drafts in offered(options, greedy(3, 8), tiny_model()):
        products = np.cumprod(said(reference, text, DEPTH))
        if abs(products - threshold).min() > 1e-5:
            assert len(drafts) == min(len(drafts) + 1, int((products >= threshold).sum()), DEPTH)
            lens.append(len(drafts))
    assert len(set(lens)) > 2, "of all lengths"


def read_by_target(engine: Engine, some: list[Case]) -> tuple[list[list[int]], int, int]:
    """(tokens of each case, tokens that the target read in rounds, drafts verified)."""
    read, forward = 0, engine.runner.target.decoder.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal read
        read += len(hidden)
        return forward(hidden)

    engine.runner.target.decoder.logits = counted  # type: ignore[method-assign]
    outputs = run(engine, some)
    return tokens(outputs), read, sum(output.stats.drafted for output in outputs)


SOME = cases(5, max_tokens=24, seed=78)


@cache
def plain() -> list[list[int]]:
    return tokens(run(build(calm_model()).engine, SOME))


def test_thresholds_change_no_token_and_save_work() -> None:
    work = []
    for threshold, late in ((0.0, {}), (0.1, {}), (0.5, {"lag": 1, "row_sizes": (4,)}), (1.0, {})):
        engine = build(calm_model(), max_rows=4, confidence_threshold=threshold, **WELL, **late).engine  # type: ignore[arg-type]
        found, *spent = read_by_target(engine, SOME)
        assert found == plain(), threshold
        work.append(spent)
    (all_read, all_drafts), (some_read, some_drafts), _, (least_read, no_drafts) = work
    assert all_drafts > 2 * some_drafts > no_drafts == 0
    assert 0.8 * all_read > some_read > least_read


def ahead(threshold: float = 0.0, **options: object) -> tuple[Engine, AheadPlanner]:
    """An engine whose rounds run in parts, one of them queued before the last is read, with the engine's own plans."""
    given = {"lag": 1, "confidence_threshold": threshold or 1e-9}  # fixed windows without one would ask for none
    engine = build(calm_model(), **(WELL | given | options)).engine
    runner = engine.runner
    depth = runner.drafter.shape.depth
    costs = AheadCosts({rows: table(token_sizes(rows, depth), depth) for rows in range(1, 9)})
    planner = ThresholdPlanner(depth, threshold) if threshold else AheadPlanner(depth, costs, says=True)
    rounds = AheadRounds(runner.target, parted(runner.drafter), runner.judge, runner.seats, VARIANTS)
    runner.ahead = planner, rounds
    return engine, planner


@pytest.mark.parametrize("threshold", [0.0, 0.1, 1.0])
def test_plans_made_ahead_change_no_token(threshold: float) -> None:
    engine, planner = ahead(threshold)
    outputs = run(engine, SOME, [0, 0, 2, 9, 20])
    assert tokens(outputs) == plain()
    drafted = sum(output.stats.drafted for output in outputs)
    if threshold == 1.0:
        assert drafted == 0
        assert planner.record.rounds["plain"] > planner.record.rounds["mixed"], "rounds shrink to one token a row"
        return
    whole = run(build(calm_model(), **WELL, confidence_threshold=threshold).engine, SOME)
    share = 0.8 if threshold else 0.4  # without a threshold, of what pays
    assert drafted > share * sum(output.stats.drafted for output in whole) > 20
    assert len(planner.record.windows) > 2, "windows of all lengths"


def test_what_is_said_is_calibrated_for_each_kind_of_request() -> None:
    """Of greedy requests drafts of 0.85 are right and those of 0.35 wrong; of sampled ones the other way round."""
    odds, sampled = SaidOdds(2), np.array([0, 0, 1, 1])
    lines, good, bad = odds.lines([1, 2, 3, 4]), EDGES.index(0.8) + 1, EDGES.index(0.3) + 1
    heard = np.array([[[0.85, 0.85], [0.35, 0.35]] * 2])
    right = np.array([[2, 0, 0, 2]])
    for _ in range(60):
        odds.hear(lines, sampled, (np.full((1, 4), 2), right, np.zeros((1, 4), np.int64)), heard, [True])
    chances = odds.table(odds.lines([5, 6, 7, 8]), sampled)[:, 0]  # of requests that are new
    assert chances[0, good] > 0.9 > 0.1 > chances[0, bad]
    assert chances[2, bad] > 0.9 > 0.1 > chances[2, good]
    assert odds.calibration_error < 0.2


def test_the_size_of_rounds_follows_what_was_said_last() -> None:
    """Half of the drafts are right: those of which the head was sure. Then it speaks, and nothing is verified."""
    requests: list[Any] = [SimpleNamespace(id=i, params=SamplingParams(), num_tokens=9) for i in range(4)]
    sizes = []
    for last in (0.95, 0.05):
        costs = AheadCosts({4: table(token_sizes(4, 3), 3, token_ms=0.15, step_ms=0.0)})
        planner = AheadPlanner(3, costs, says=True)
        for number in range(80):
            plan = planner.plan(requests, 4)
            sure = (number % 2 if number < 60 else last > 0.5) > 0
            drafts = np.minimum(np.array(plan.lens) - 1, plan.drafted) * (number < 60)
            verdict = np.stack((1 + drafts * sure, drafts * sure, drafts, 0 * drafts), axis=1)
            planner.learn(plan, verdict, np.full((4, 3), 0.95 if sure else 0.05))
        sizes.append(planner.plan(requests, 4).tokens)
    assert sizes[0] > sizes[1] == 4


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"confidence_threshold": 1.5}, "confidence_threshold=1.5: is a product of chances; pass 0 to 1"),
        ({"confidence_threshold": -0.1}, "confidence_threshold=-0.1: is not a number of 0 to 1"),
        ({"confidence_threshold": "high"}, "confidence_threshold='high': is not a number"),
        ({"confidence_threshold": 0.5, "tree": (3, 2, 8)}, "confidence_threshold=0.5: it shortens chains; leave tree"),
        ({"confidence_threshold": 0.5, "drafter": "ngram"}, "drafter='ngram' has no confidence head; choose a DSpark"),
        ({"confidence_threshold": 0.5, "drafter": str(block_head(**BIGRAMS))}, "has no confidence head"),
    ],
)
def test_a_threshold_that_cannot_be_served_is_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build(calm_model(), **({"drafter": head()} | options))


def test_it_is_a_decision() -> None:
    made = {d.field: d for d in build(drafter=head(), confidence_threshold=0.5, windows="auto").decisions}
    assert made["windows"].value == "fixed"
    assert "confidence_threshold=0.5" in made["windows"].because
