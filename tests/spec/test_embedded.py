"""Identity on the embedded model and its trained head."""

import math
from collections import Counter
from functools import cache
from importlib import import_module
from struct import unpack_from

import pytest
import torch

from peregrine.engine.alone import LonePlan
from peregrine.engine.folders import ASSETS
from peregrine.engine.output import Output
from peregrine.engine.round_times import FixedPlan
from peregrine.kernels.round import GateRule
from peregrine.kernels.runtime.cpu_graph import CpuGraph
from peregrine.kernels.sampling import Features
from peregrine.sampling import SamplingParams
from peregrine.spec.odds import DEPTHS, EDGES
from peregrine.text.chat import encode_chat
from spec.harness import Case, accept_length, build, run, tokens

MERLIN = ASSETS / "merlin"
STORIES = ("Once upon a time", "Lily and Ben were playing in the garden when", "Sara had a new doll. She")
CHATS = (
    "Tell me a story about a dragon who loves soup.",
    "What is 12 + 30?",
    "Write a Python function that reverses a string.",
)
PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.1},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.3},
)


def requests(max_tokens: int) -> list[Case]:
    tokenizer = build(MERLIN).tokenizer
    prompts = [tokenizer.encode(text) for text in STORIES]
    prompts += [encode_chat(tokenizer, [{"role": "user", "content": text}]) for text in CHATS]
    return [
        Case(tuple(prompt), SamplingParams(**PARAMS[i % len(PARAMS)], seed=i, max_tokens=max_tokens))  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts)
    ]


@cache
def plain() -> list[Output]:
    return run(build(MERLIN).engine, requests(72))


@pytest.mark.parametrize(
    "options",
    [{"num_drafts": 3}, {"num_drafts": 6, "lag": 1, "page_size": 64}, {"tree": (5, 4, 24)}],
    ids=["chain of 3", "chain of 6, one behind", "tree of 24"],
)
def test_the_embedded_head_changes_no_token(options: dict[str, object]) -> None:
    drafted = run(build(MERLIN, drafter="eagle3", **options).engine, requests(72))
    assert tokens(drafted) == tokens(plain())
    assert [o.text for o in drafted] == [o.text for o in plain()]
    assert accept_length(drafted) > 1.8, "the head should be worth having"


def body(file: str, kernel: str) -> int:
    """The address that calls of a compiled kernel begin with."""
    address: int = getattr(import_module(f"peregrine.kernels.{file}"), kernel)._address
    return address


@pytest.mark.parametrize("rule", [None, GateRule(EDGES, ((0.5,) * 11,) * DEPTHS, (0.4, math.inf), (0.0, 0.0, 0.0))])
def test_what_the_model_and_the_head_do_is_one_replay_each(
    monkeypatch: pytest.MonkeyPatch, rule: GateRule | None
) -> None:
    """One operation that a CPU graph cannot replay, and all runs call by call: slower, and nothing else shows."""
    pytest.importorskip("numba")
    made: list[CpuGraph] = []
    record = CpuGraph.__init__

    def note(graph: CpuGraph, *arguments: object) -> None:
        record(graph, *arguments)  # type: ignore[arg-type]
        made.append(graph)

    rounds = build(MERLIN, drafter="eagle3", num_drafts=2, windows="fixed").engine.runner.rounds
    plan = FixedPlan([3], 2) if rule is None else LonePlan(rule, 3)
    monkeypatch.setattr(CpuGraph, "__init__", note)
    with torch.inference_mode():
        rounds.run(rounds.seats.rows(1, 1), Features(), plan)
    assert len(made) == 3
    assert all(graph.complete for graph in made)
    called = [Counter(unpack_from("q", words)[0] for _, words, _ in graph._replay._calls) for graph in made]
    attention, pick = body("attention.cpu", "_attend"), body("sampling.cpu", "_choose_nodes")
    target = Counter({attention: 10, body("round.places_cpu", "_window"): 1, body("round.cpu", "_commit"): 1})
    assert target <= called[0], "the model's part of a round, from places to the verdict"
    last = Counter({body("round.cpu", "_keep"): 1} if rule is None else {body("round.cpu", "_gate"): 2})
    assert Counter({body("round.places_cpu", "_path"): 1, attention: 1}) <= called[1], "the head reads the path"
    assert Counter({attention: 1, pick: 2}) + last <= called[2], "and makes its drafts, up to the window"
