"""A grammar is one more step of sampling: speculation, other rows and schedules change no token of a constrained text.

The oracle shares no code with the engine: it reads the whole text for every token, and asks a fresh matcher of the
library for one mask at a time.
"""

import itertools
import json
import re
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peregrine.engine import masks
from peregrine.engine.masks import MaskWriter
from peregrine.errors import RequestError
from peregrine.sampling import SamplingParams
from spec import reference
from spec.harness import Case, build, eagle3_head, noisy_model, run, tiny_model, tokens
from spec.test_identity import naive_logits

CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "call"},
        "args": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}, "unit": {"enum": ["C", "K"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "args"],
    "additionalProperties": False,
}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": -20, "maximum": 300}, "maxItems": 4}
TREE = 'start: node\nnode: "(" node* ")" | /[a-c]{1,2}/'
# What is asked of the text, and how it is sampled.
ASKED: tuple[dict[str, object], ...] = (
    {"json_schema": CALL, "temperature": 0.0},
    {"json_schema": json.dumps(CALL), "temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
    {"json_schema": NUMBERS, "temperature": 1.5, "min_tokens": 6},
    {"regex": r"[a-z]{2,6}(-\d{2}){1,3}", "temperature": 1.0, "top_k": 3},
    {"regex": "(ab|a|b)+", "temperature": 0.0, "frequency_penalty": 0.5, "logit_bias": {65: 3.0}},
    {"grammar": TREE, "temperature": 1.2, "min_p": 0.01},
    {"choice": ["yes", "no", 'perhaps "so"\n'], "temperature": 1.0},
    {"json_object": True, "temperature": 0.8, "presence_penalty": 0.4},
)
FREE = {"temperature": 1.0, "top_p": 0.95}


def case(index: int, asked: dict[str, object], max_tokens: int = 56) -> Case:
    prompt = tuple((7 * index + 3 * i) % 250 + 1 for i in range(5 + 9 * (index % 4)))
    return Case(prompt, SamplingParams(**{"seed": index, "max_tokens": max_tokens, **asked}))  # type: ignore[arg-type]


CASES = [case(index, asked) for index, asked in enumerate(ASKED)]
MIXED = [*CASES, *(case(index, FREE, 30) for index in (20, 21, 22))]
NOISY_CHAIN = {"drafter": str(noisy_model()), "num_drafts": 4}
NOISY_TREE = {"drafter": str(noisy_model()), "tree": (4, 3, 14)}


@cache
def plain() -> list[list[int]]:
    """The tokens of plain decoding, each request alone."""
    return [tokens(run(build().engine, [one]))[0] for one in MIXED]


def legal_ids(tokenizer: llguidance.LLTokenizer, params: SamplingParams, made: Sequence[int]) -> list[int]:
    """The tokens that a fresh matcher of the library allows after these."""
    library = llguidance.LLMatcher
    if params.json_schema is not None or params.json_object:
        schema = params.json_schema or {"type": "object"}
        source = library.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    elif params.regex is not None:
        source = library.grammar_from_regex(params.regex.replace(r"\d", "[0-9]"))
    elif params.grammar is not None:
        source = library.grammar_from_lark(params.grammar)
    else:
        source = library.grammar_from_regex("|".join(map(re.escape, params.choice)))
    matcher = library(tokenizer, source)
    assert matcher.consume_tokens(list(made))
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


@pytest.mark.parametrize("index", range(len(CASES)))
def test_plain_decoding_equals_an_oracle_that_asks_for_one_mask_at_a_time(index: int) -> None:
    built, one = build(), CASES[index]
    engine, params = built.engine, one.params
    (eos,) = engine.limits.eos_ids
    tokenizer = llguidance.LLTokenizer(built.tokenizer.backend.to_str(), engine.limits.vocab_size, eos)
    logits, made = naive_logits(engine), list[int]()
    while eos not in made and len(made) < (params.max_tokens or 0):
        text = [*one.prompt, *made]
        legal = legal_ids(tokenizer, params, made)
        if len(made) < params.min_tokens and legal != [eos]:
            legal = [token for token in legal if token != eos]
        banned = set(range(engine.limits.vocab_size)) - set(legal)
        made.append(reference.choose(logits(text).astype(np.float64), text, made, params, banned))
    assert plain()[index] == made


OPTIONS: dict[str, dict[str, object]] = {
    "noisy chain": NOISY_CHAIN,
    "noisy tree": NOISY_TREE,
    "itself": {"drafter": str(tiny_model()), "num_drafts": 6},
    "ngram": {"drafter": "ngram", "num_drafts": 4},
    "eagle3 over a part of the vocabulary": {"drafter": str(eagle3_head())},
    "tree, one behind": {"lag": 1, **NOISY_TREE},
    "padded rows": {"row_sizes": (3, 16), "max_rows": 16, **NOISY_TREE},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_speculation_and_other_rows_change_no_token(name: str) -> None:
    """Constrained and free requests side by side, each as alone and without drafts."""
    arrivals = [0, 0, 1, 2, 2, 3, 5, 8, 0, 4, 9]
    assert tokens(run(build(**OPTIONS[name]).engine, MIXED, arrivals)) == plain()


def test_masks_that_are_not_as_deep_as_windows_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts behind the masks that were computed in time are not offered."""
    rng, write, cut = np.random.default_rng(0), MaskWriter.write, [0]
    clock = itertools.accumulate(rng.choice([0.0, 0.05], 100_000))

    def write_in_time(writer: MaskWriter, *given: Any) -> None:
        writer.bounded = True
        write(writer, *given)
        cut[0] += bool((writer._rows[: len(given[0])] % writer._forced.shape[1]).any())

    monkeypatch.setattr(masks, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(MaskWriter, "write", write_in_time)
    outputs = run(build(**NOISY_TREE).engine, MIXED)
    assert tokens(outputs) == plain()
    assert sum(output.stats.accepted for output in outputs) > 1.2 * sum(output.stats.rounds for output in outputs)
    assert cut[0] > 10


def test_preemption_and_aborts_change_no_token() -> None:
    outputs = run(build(page_size=8, num_pages=44, lag=1, **NOISY_TREE).engine, MIXED, aborts={2: 6, 8: 9})
    assert sum(output.stats.preemptions for output in outputs) > 0
    for output, expected in zip(outputs, plain(), strict=True):
        assert output.token_ids == expected[: len(output.token_ids)]
        assert output.finish_reason == "abort" or output.token_ids == expected


def test_prefix_hits_change_no_token() -> None:
    long = tuple(range(1, 60))
    some = [Case((*long, n), CASES[n % len(CASES)].params) for n in range(5)]
    outputs = run(build(**NOISY_CHAIN).engine, some, range(0, 500, 100))  # one after another
    assert [output.stats.cached_tokens for output in outputs[1:]] == [48] * 4
    assert tokens(outputs) == [tokens(run(build().engine, [one]))[0] for one in some]


SCHEDULES = st.fixed_dictionaries(
    {
        "arrivals": st.lists(st.integers(0, 12), min_size=len(MIXED), max_size=len(MIXED)),
        "aborts": st.dictionaries(st.integers(0, len(MIXED) - 1), st.integers(0, 20), max_size=2),
        "max_rows": st.integers(1, 6),
        "lag": st.integers(0, 2),
        "num_pages": st.sampled_from([14, 600]),
        "drafter": st.sampled_from([NOISY_CHAIN, NOISY_TREE, {"drafter": "ngram"}]),
    }
)


@settings(max_examples=4, deadline=None)
@given(SCHEDULES)
def test_any_schedule_changes_no_token(plan: dict[str, object]) -> None:
    options = {name: plan[name] for name in ("max_rows", "lag", "num_pages")}
    engine = build(**options, **plan["drafter"]).engine  # type: ignore[arg-type]
    outputs = run(engine, MIXED, plan["arrivals"], plan["aborts"])  # type: ignore[arg-type]
    for output, expected in zip(outputs, plain(), strict=True):
        assert output.token_ids == expected[: len(output.token_ids)]
        assert output.finish_reason == "abort" or output.token_ids == expected


def test_texts_are_what_was_asked_for() -> None:
    outputs = run(build(**NOISY_TREE).engine, CASES)
    assert [output.finish_reason for output in outputs[:2]] == ["stop"] * 2
    for output in outputs[:2]:
        call = json.loads(output.text)
        assert call["name"] == "call"
        assert len(call["args"]["city"]) <= 4
    assert all(-20 <= number <= 300 for number in json.loads(outputs[2].text))
    assert re.fullmatch(r"[a-z]{2,6}(-\d{2}){1,3}", outputs[3].text)
    assert outputs[6].text in ("yes", "no", 'perhaps "so"\n')


@pytest.mark.parametrize(
    "options",
    [{"drafter": "ngram", "num_drafts": 5}, {"drafter": str(eagle3_head()), "num_drafts": 5}, NOISY_TREE],
    ids=["ngram", "eagle3", "tree"],
)
def test_forced_tokens_are_drafts_that_are_always_right(options: dict[str, object]) -> None:
    schema = {"const": {"a rather long key": [1, 2, 3], "and another": "value"}}
    one = [Case((5, 9, 200), SamplingParams(temperature=1.0, seed=1, max_tokens=80, json_schema=schema))]
    output = run(build(**options).engine, one)[0]
    assert json.loads(output.text) == schema["const"]
    depth = len(output.stats.accept_histogram) - 1
    # All but the first rounds, which have no drafts yet, and the last, which the end token cuts, are full.
    assert output.stats.accept_histogram[depth] >= output.stats.rounds - 4
    assert output.stats.rounds <= len(output.token_ids) // (depth + 1) + 4


def test_min_tokens_gives_way_where_the_text_is_complete() -> None:
    ends = {"temperature": 0.0, "min_tokens": 30, "max_tokens": 40}
    some = [case(1, {"regex": "a{3}", **ends}), case(2, {"regex": "[a-c]+", **ends})]
    three, many = run(build(**NOISY_CHAIN).engine, some)
    assert (three.text, three.finish_reason) == ("aaa", "stop")
    assert len(many.token_ids) >= 31
    assert re.fullmatch("[a-c]+", many.text)


def test_stop_strings_and_the_requests_own_end_tokens() -> None:
    built = build(**NOISY_CHAIN)
    plus = case(3, {"regex": "(ab){4}", "temperature": 0.0, "stop": "abab"})
    assert run(built.engine, [plus])[0].text == ""
    (eos,) = built.engine.limits.eos_ids
    biased = {"regex": "[ab]+", "temperature": 0.0, "logit_bias": {eos: -100.0}, "min_tokens": 2}
    letter = built.tokenizer.encode("b", add_special=False)[0]
    output = run(built.engine, [case(4, {**biased, "stop_token_ids": [letter]})])[0]
    assert output.token_ids[-1] == letter or output.finish_reason == "length"
    assert letter not in output.token_ids[:-1]


def test_a_grammar_may_begin_after_a_token() -> None:
    mark = 40
    asked = {"regex": "[0-9]{4}", "grammar_after": mark, "logit_bias": {mark: 6.0}, "temperature": 1.0}
    some = [case(index, asked, 60) for index in range(3)]
    expected = [tokens(run(build().engine, [one]))[0] for one in some]
    built = build(lag=1, **NOISY_TREE)
    outputs = run(built.engine, some)
    assert tokens(outputs) == expected
    for output in outputs:
        begun = output.token_ids.index(mark) + 1
        assert begun > 1 or output.token_ids[0] == mark
        assert re.fullmatch("[0-9]{4}", built.tokenizer.decode(output.token_ids[begun:]))


def test_a_grammar_that_exceeds_its_limits_ends_its_own_request_alone() -> None:
    wide = {"type": "object", "properties": {f"key{i}": {"type": "null"} for i in range(600)}}
    late = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 3}, "b": wide},
        "required": ["a", "b"],
    }
    some = [case(5, {"json_schema": late, "temperature": 0.0}), MIXED[-1], CASES[0]]
    for options in ({}, NOISY_TREE):
        failed, free, call = run(build(**options).engine, some)
        assert failed.finish_reason == "error"
        assert "grammar" in str(failed.error)
        assert re.fullmatch('{"a":"[^"]{3}', failed.text)
        assert [free.token_ids, call.token_ids] == [plain()[-1], plain()[0]]


def test_a_choice_may_have_thousands_of_texts() -> None:
    texts = [f"bird {number}" for number in range(5000)]
    (output,) = run(build().engine, [case(3, {"choice": texts, "temperature": 1.0})])
    assert (output.finish_reason, output.text in texts) == ("stop", True)


@pytest.mark.parametrize("text", ["a\x7fb", "\x00", '\t"\\ ', "é\u2028"])
def test_a_choice_may_have_any_character(text: str) -> None:
    (output,) = run(build().engine, [case(3, {"choice": [text], "temperature": 1.0})])
    assert (output.finish_reason, output.text) == ("stop", text)


REFUSED: dict[str, dict[str, object]] = {
    "regex='(a': cannot be read: unclosed group; correct it": {"regex": "(a"},
    "look-around": {"regex": "(?=a)b"},
    "backreferences": {"regex": r"(a)\1"},
    "no text can satisfy it": {"regex": r"[^\s\S]"},
    "regex='': is not a non-empty text": {"regex": ""},
    "unknown name": {"grammar": "start: foo"},
    'Unimplemented keys: ["not"]': {"json_schema": {"not": {}}},
    'Unimplemented keys: ["uniqueItems"]': {"json_schema": {"type": "array", "uniqueItems": True}},
    "Unknown format: klingon": {"json_schema": {"type": "string", "format": "klingon"}},
    "oneOf constraints are not supported": {"json_schema": {"oneOf": [{"type": "object"}, {"type": "object"}]}},
    "minimum (5) is greater than maximum (3)": {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
    "required property 'a' is unsatisfiable": {
        "json_schema": {"type": "object", "required": ["a"], "additionalProperties": False}
    },
    "http://x.y/z.json": {"json_schema": {"$ref": "http://x.y/z.json"}},
    "is too complex": {
        "json_schema": {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"c": {"$ref": "#/$defs/n"}},
                    "required": ["c"],
                    "additionalProperties": False,
                }
            },
        }
    },
    "is not valid JSON": {"json_schema": "{"},
    "is not a JSON object": {"json_schema": "[1]"},
    "json_schema=False: is not a JSON object": {"json_schema": False},
    "regex=0: is not a non-empty text": {"regex": 0},
    "is nested too deeply": {"json_schema": '{"not":' * 9999 + "{}" + "}" * 9999},
    "is too large": {"json_schema": {"description": "x" * (1 << 20)}},
    "is not a list of non-empty texts": {"choice": ["a", ""]},
    "json_schema was given, too": {"regex": "a", "json_schema": {}},
    "ends by an end token": {"regex": "a", "ignore_eos": True},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_cannot_be_honoured_is_refused_with_the_reason(problem: str) -> None:
    with pytest.raises(RequestError, match=re.escape(problem)):
        refusing().prepare([1], SamplingParams(**REFUSED[problem]))  # type: ignore[arg-type]


@cache
def refusing():  # type: ignore[no-untyped-def]
    return build().engine
