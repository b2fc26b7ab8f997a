"""Identity on the embedded model and its trained head."""

from functools import cache
from importlib import import_module
from struct import unpack_from

import pytest

from peregrine.engine.folders import ASSETS
from peregrine.engine.request import Output
from peregrine.kernels.runtime.cpu_graph import CpuGraph, record_at_once
from peregrine.sampling import SamplingParams
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


def body(folder: str, kernel: str) -> int:
    """The address that calls of a compiled kernel begin with."""
    file = "places_cpu" if folder == "round" else "cpu"
    address: int = getattr(import_module(f"peregrine.kernels.{folder}.{file}"), kernel)._address
    return address


def test_every_step_of_model_and_head_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One operation that a CPU graph cannot replay, and its step runs call by call: slower, and nothing else shows."""
    pytest.importorskip("numba")
    made: list[CpuGraph] = []
    record = CpuGraph.__init__

    def note(graph: CpuGraph, *arguments: object) -> None:
        record(graph, *arguments)  # type: ignore[arg-type]
        made.append(graph)

    monkeypatch.setattr(CpuGraph, "__init__", note)
    with record_at_once():
        run(build(MERLIN, drafter="eagle3", num_drafts=2).engine, requests(4)[:1])
    assert len(made) > 10 + 3, "more than a decoder's layers and a head's three steps"
    assert all(graph.complete for graph in made)
    called = [{unpack_from("q", words)[0] for _, words, _ in graph._replay._calls} for graph in made]
    attention = body("attention", "_attend")
    step, path = {attention, body("sampling", "_choose_nodes")}, {attention, body("round", "_path")}
    assert any(step <= calls for calls in called), "a step of the head is one replay, up to the pick"
    assert any(path <= calls for calls in called), "and so is its reading of the path"
