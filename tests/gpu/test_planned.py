"""Planned windows on a GPU: recorded in parts, of any size and depth in any order, they change no token."""

import re

import pytest
import torch

from gpu.random_models import VOCAB, disturbed, llama, qwen3
from gpu.test_identity import ROWS, build, cases, count_equal, right_drafts
from gpu.test_round import cases_of, facts
from peregrine.engine.runner import VARIANTS
from spec.any_plans import plan_anything
from spec.harness import run, tokens

SIZES = (1, 4, ROWS)


def planned(model: str, drafter: str, **options: object):  # type: ignore[no-untyped-def]
    return build(model, **({"drafter": drafter, "row_sizes": SIZES, "windows": "auto"} | options))


@pytest.mark.parametrize("model", [llama, qwen3], ids=["llama", "qwen3"])
def test_any_plan_changes_no_token(model, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    """50,000 tokens of each model by random plans, and by the engine's own, against plain decoding."""
    folder, some, compared = str(model()), cases(VOCAB), 0
    expected = tokens(run(build(folder).engine, some))
    engine = planned(folder, str(disturbed(model()))).engine
    own = engine.runner.ahead
    assert own is not None
    outputs = run(engine, some)
    compared += count_equal("own plans", tokens(outputs), expected)
    assert right_drafts(outputs) > 100
    planner = plan_anything(engine, 0)
    for seed in range(6):
        planner.dice.seed(seed)
        arrivals = [planner.dice.randint(0, 60) for _ in some]
        compared += count_equal(f"any plan, {seed}", tokens(run(engine, some, arrivals)), expected)
    assert len(planner.seen) > 80, "sizes and depths of all kinds"
    with capsys.disabled():
        print(f"\nplanned windows, {model.__name__}: {compared} tokens compared, no difference")
    assert compared >= 50_000


@pytest.mark.parametrize("drafter", ["eagle3", "ngram"])
def test_the_embedded_model(drafter: str) -> None:
    """With its trained head, and with look-up."""
    some = cases(8192)
    expected = tokens(run(build("merlin").engine, some))
    engine = planned("merlin", drafter).engine
    count_equal("own plans", tokens(run(engine, some)), expected)
    plan_anything(engine, 3)
    outputs = run(engine, some)
    count_equal("any plan", tokens(outputs), expected)
    assert right_drafts(outputs) > 0


def test_every_variant_is_that_of_whole_windows() -> None:
    """Tokens and log-probabilities of every part of the sampling law."""
    model, draft = str(llama()), str(disturbed(llama()))
    whole, engine = planned(model, draft, windows="fixed").engine, planned(model, draft).engine
    plan_anything(engine, 4)
    for variant in VARIANTS:
        results = [[fact[:2] for fact in facts(run(one, cases_of(variant)))] for one in (whole, engine)]  # type: ignore[index]
        assert results[0] == results[1], variant


def test_costs_are_timed_and_graphs_counted() -> None:
    built = planned(str(llama()), str(disturbed(llama())))
    made = {decision.field: decision for decision in built.decisions}
    assert made["windows"].value == "auto"
    assert re.search(r"\d+ MiB, [\d.]+ s", made["recorded"].because)
    assert built.engine.runner.ahead is not None
    costs = built.engine.runner.ahead[0].costs.by_rows
    assert set(costs) == set(SIZES)
    for rows, table in costs.items():
        assert table.sizes[0] == rows
        assert table.verify[0] + table.key_ms * rows * 256 > 0
        assert table.draft[-1] > table.draft[1] > 0
    torch.cuda.synchronize()
