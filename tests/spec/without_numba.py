"""Speculation changes no token with the torch twins. Run by test_without_numba.py in a process without numba."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from spec.expert_models import expert_model
from spec.harness import accept_length, build, cases, disturbed, mla_model, run, tiny_model, tokens
from spec.test_planned_rounds import planned

SOME = cases(10, max_tokens=5)  # greedy, sampled, and every other sampling parameter
MODELS: dict[str, Callable[[], Path]] = {"dense": tiny_model, "mla": mla_model, "experts": expert_model}
GUESSES: dict[str, dict[str, object]] = {"chain": {"num_drafts": 3}, "tree": {"tree": (3, 2, 8)}}


@cache
def plain(model: str) -> list[list[int]]:
    """Each request alone, without drafts."""
    engine = build(MODELS[model]()).engine
    return [tokens(run(engine, [case]))[0] for case in SOME]


@pytest.mark.parametrize(
    ("model", "guess"), [("dense", "chain"), ("dense", "tree"), ("mla", "chain"), ("mla", "tree"), ("experts", "chain")]
)
def test_speculation_and_batches_change_no_token(model: str, guess: str) -> None:
    assert not NUMBA_PRESENT
    any_plan = guess == "chain" and model == "mla"  # chains of any length that branch anywhere
    make = partial(planned, 4) if any_plan else build
    built = make(model=MODELS[model](), drafter=str(disturbed(MODELS[model](), 0.05)), **GUESSES[guess])
    assert built.engine.runner.target.backend.name == "torch"
    outputs = run(built.engine, SOME, [0, 0, 0, 1, 1, 2, 2, 3, 4, 5])
    assert tokens(outputs) == plain(model)
    assert any_plan or accept_length(outputs) > 1.2, "a drafter that is never right tests nothing"
