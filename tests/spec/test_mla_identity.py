"""Speculation, batching and paging change no token of a model with MLA and experts."""

from functools import cache
from pathlib import Path

import pytest

from peregrine.errors import ConfigError
from peregrine.sampling import SamplingParams
from spec.harness import Case, accept_length, build, cases, disturbed, mla_model, run, tokens

SOME = cases(8, max_tokens=40)


@cache
def noisy_mla() -> Path:
    """The MLA model with noise in its weights: a draft model that is often right and often wrong."""
    return disturbed(mla_model(), 0.05)


@cache
def plain() -> list[list[int]]:
    return tokens(run(build(mla_model()).engine, SOME))


def test_the_text_varies() -> None:
    assert len({tuple(text) for text in plain()}) == len(SOME)
    assert len({token for text in plain() for token in text}) > 60


CHAIN = {"drafter": str(noisy_mla()), "num_drafts": 3}
TREE = {"drafter": str(noisy_mla()), "tree": (3, 3, 13)}
OPTIONS: dict[str, dict[str, object]] = {
    "ngram": {"drafter": "ngram", "num_drafts": 4},
    "chain": CHAIN,
    "tree": TREE,
    "tree, page size 1, one behind": {"page_size": 1, "num_pages": 4000, "lag": 1, **TREE},
    "chunks of 8, padded rows": {"prefill_chunk": 8, "row_sizes": (3, 8), **CHAIN},
    "no prefix cache, few rows": {"prefix_cache": False, "max_rows": 2, **TREE},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_speculation_and_batches_change_no_token(name: str) -> None:
    outputs = run(build(mla_model(), **OPTIONS[name]).engine, SOME, [0, 0, 2, 5, 5, 9, 20, 21])
    assert tokens(outputs) == plain()
    if "drafter" in OPTIONS[name] and name != "ngram":
        assert accept_length(outputs) > 1.2, "a drafter that is never right tests nothing"


def test_preemption_changes_no_token() -> None:
    outputs = run(build(mla_model(), page_size=8, num_pages=40, **TREE).engine, SOME)
    assert sum(output.stats.preemptions for output in outputs) > 0
    assert tokens(outputs) == plain()


def test_a_prefix_hit_changes_no_token() -> None:
    """Pages that prompts and rounds have written serve later requests."""
    prompt = tuple(range(1, 90))
    params = SamplingParams(temperature=0, max_tokens=30)
    engine = build(mla_model(), **TREE).engine
    first = Case(prompt, params)
    text = tokens(run(build(mla_model()).engine, [first]))[0]
    second = Case((*prompt, *text[:20], 7), params)
    outputs = run(engine, [first, second], [0, 99])  # one after the other
    assert tokens(outputs) == [text, *tokens(run(build(mla_model()).engine, [second]))]
    assert [output.stats.cached_tokens for output in outputs] == [0, 96]


def test_poisoned_pages_change_nothing() -> None:
    """NaN in every unwritten slot, including the scratch page and all table tails."""
    engine = build(mla_model(), row_sizes=(3, 8), **TREE).engine
    for store in (engine.runner.target.store, engine.runner.drafter.reader.model.store):
        store.keys.fill_(float("nan"))
    assert tokens(run(engine, SOME)) == plain()


def test_a_page_holds_keys_alone() -> None:
    engine = build(mla_model(), num_pages=10, page_size=16).engine
    assert engine.runner.target.store.num_bytes == 10 * 16 * 3 * (32 + 8) * 4


def test_latents_in_float8_are_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype='float8': latents \(MLA\) are held .*; use auto") as raised:
        build(mla_model(), drafter="ngram", kv_dtype="float8")
    assert "backend" not in str(raised.value)
