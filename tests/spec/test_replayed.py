"""Rounds that are replayed from recorded calls against the same rounds called one by one: the same bits everywhere."""

from collections.abc import Hashable
from pathlib import Path

import pytest
import torch

from peregrine.engine.engine import Engine
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.kernels.runtime.cpu_graph import CpuGraph
from peregrine.sampling import SamplingParams
from peregrine.spec.replayed import ReplayedRounds
from spec.harness import Case, build, eagle3_head, mtp_model, noisy_model, prompts, run, tiny_model, tokens

pytestmark = pytest.mark.skipif(not NUMBA_PRESENT, reason="needs numba")

WAYS = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"logprobs": 2})
CASES = [
    Case(prompt, SamplingParams(max_tokens=24 + i, seed=i, **WAYS[i % 4]))  # type: ignore[arg-type]
    for i, prompt in enumerate(prompts(12, seed=8))
]


def recorded_by(rounds: ReplayedRounds) -> dict[tuple[int, Hashable], CpuGraph]:
    """All graphs, by rows and name. Of what they compute, only what drafts begin with stays in use between rounds."""
    assert not rounds._graphs.arena._blocks
    assert len(rounds._drafts.arena._blocks) == len(rounds._hidden)
    both = rounds._graphs._graphs, rounds._drafts._graphs
    return {(rows, name): graph for each in both for rows, made in each.items() for name, graph in made.items()}


def replayed_and_not(model: Path, options: dict[str, object]) -> tuple[Engine, Engine]:
    """Two engines; the second calls its kernels from Python."""
    both = tuple(build(model, max_rows=4, **options).engine for _ in range(2))
    assert both[1].runner.rounds.replayed is not None
    both[1].runner.rounds.replayed = None
    return both[0], both[1]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (tiny_model(), {"drafter": "none"}),
        (tiny_model(), {"drafter": "none", "lag": 2}),
        (tiny_model(), {"drafter": str(eagle3_head()), "num_drafts": 3, "windows": "fixed"}),
        (tiny_model(), {"drafter": str(eagle3_head()), "num_drafts": 2, "windows": "fixed", "lag": 1}),
        (mtp_model(), {"drafter": "mtp", "num_drafts": 2, "windows": "fixed"}),
        (tiny_model(), {"drafter": str(noisy_model()), "num_drafts": 3, "windows": "fixed"}),
        (tiny_model(), {"drafter": "ngram", "windows": "fixed"}),
    ],
    ids=["plain", "plain, two behind", "eagle3", "eagle3, one behind", "mtp", "draft model", "ngram"],
)
def test_replayed_rounds_have_the_same_bits(model: Path, options: dict[str, object]) -> None:
    replayed, called = replayed_and_not(model, options)
    arrivals = [3 * (i // 3) for i in range(len(CASES))]
    first, second = (run(engine, CASES, arrivals) for engine in (replayed, called))
    assert tokens(first) == tokens(second)
    assert [output.logprobs for output in first] == [output.logprobs for output in second]
    assert [output.stats for output in first] == [output.stats for output in second]
    stores = [engine.runner.target.store for engine in (replayed, called)]
    assert torch.equal(stores[0].keys, stores[1].keys)
    assert torch.equal(stores[0].values, stores[1].values)
    assert replayed.runner.rounds.replayed is not None
    recorded = recorded_by(replayed.runner.rounds.replayed)
    assert all(graph.complete for graph in recorded.values())
    assert len(recorded) >= 4, "of several numbers of rows"


@pytest.mark.parametrize("options", [{"drafter": "none"}, {"drafter": str(eagle3_head()), "windows": "fixed"}])
@pytest.mark.parametrize("params", [{"repetition_penalty": 1.3}, {"min_tokens": 5}, {"regex": "[a-e]{3,9}"}])
def test_scores_that_torch_adjusts_are_replayed_up_to_the_logits(
    options: dict[str, object], params: dict[str, object]
) -> None:
    replayed, called = replayed_and_not(tiny_model(), options)
    some = [Case(case.prompt, SamplingParams(max_tokens=12, temperature=0.0, **params)) for case in CASES[:3]]  # type: ignore[arg-type]
    assert tokens(run(replayed, some)) == tokens(run(called, some))
    assert replayed.runner.rounds.replayed is not None
    recorded = recorded_by(replayed.runner.rounds.replayed)
    assert any("scored" in name for _, name in recorded)  # type: ignore[operator]
    assert all(graph.complete for graph in recorded.values())


def test_rounds_larger_than_a_graph_are_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peregrine.models.decoder.MAX_GRAPH_BYTES", 0)
    engine = build(tiny_model(), drafter="none").engine
    run(engine, CASES[:2])
    assert engine.runner.rounds.replayed is not None
    assert not engine.runner.rounds.replayed._rounds
