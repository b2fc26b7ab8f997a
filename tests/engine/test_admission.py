"""Bad input is refused at admission with the field, the value and the remedy, and does not disturb other requests."""

import math

import pytest

from peregrine.config import EngineConfig, TreeShape
from peregrine.errors import CheckpointError, ConfigError, RequestError
from peregrine.llm import LLM, engine_config
from peregrine.sampling import SamplingParams, sampling_params
from spec.harness import Case, build, run

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def engine():
    return build(num_pages=20).engine


@pytest.mark.parametrize(
    ("prompt", "params", "field", "says"),
    [
        ([], GREEDY, "prompt", "is empty"),
        ([1, 300], GREEDY, "prompt", "ids run from 0 to 299"),
        ([1, -1], GREEDY, "prompt", "is not a token id"),
        ([1, True], GREEDY, "prompt", "is not a token id"),
        ([1] * 768, GREEDY, "prompt", "768 tokens leave no room in the context of 768"),
        ([1] * 700, SamplingParams(max_tokens=69), "max_tokens", "use at most 68"),
        ([1] * 300, GREEDY, "max_tokens", "exceed the 304 places of all pages"),
        ([1], SamplingParams(logit_bias={300: 1.0}), "logit_bias", "ids run from 0 to 299"),
        ([1], SamplingParams(stop_token_ids=[999]), "stop_token_ids", "is not a token id"),
        ([1], SamplingParams(num_drafts=1), "num_drafts", "the engine drafts 0 deep"),
    ],
)
def test_refused_with_field_and_remedy(engine, prompt, params, field, says):
    with pytest.raises(RequestError, match=field) as caught:
        engine.prepare(prompt, params)
    assert caught.value.field == field
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.inf),
        ("min_p", -1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("min_tokens", -1),
        ("logprobs", 65),
        ("stop", ""),
        ("stop", [1]),
        ("stop", 7),
        ("stop_token_ids", "7"),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 101}),
        ("num_drafts", -1),
        ("ignore_eos", 1),
    ],
)
def test_bad_sampling_values_are_named(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


def test_unknown_parameter_is_named():
    with pytest.raises(RequestError, match="temprature"):
        sampling_params(temprature=1.0)


def test_too_many_stop_strings_are_refused() -> None:
    with pytest.raises(RequestError, match="stop='65 strings': are too many; pass at most 64"):
        SamplingParams(stop=[str(i) for i in range(65)])


def test_min_tokens_above_max_tokens():
    with pytest.raises(RequestError, match="min_tokens=9: exceeds max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_pages": 0}, "num_pages=0: must be at least 2"),
        ({"page_size": 24}, "power of two"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"num_drafts": -1}, "num_drafts=-1: must be between 0 and 16"),
        ({"num_drafts": 99}, "between 0 and 16"),
        ({"tree": (3, 2)}, "is not (depth, width, nodes)"),
        ({"tree": (3, 2, 65)}, "nodes counts the window"),
        ({"tree": (0, 2, 4)}, "at least 1"),
        ({"warp": 9}, "warp=9: no such option"),
        ({"row_sizes": (2, 4)}, "row_sizes=(2, 4)"),
        ({"lag": True}, "not an integer"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(ConfigError) as caught:
        engine_config("merlin", options)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "tpu"}, "device='tpu'"),
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"attention": "magic"}, "attention='magic'"),
        ({"drafter": "oracle"}, "drafter='oracle'"),
        ({"drafter": "ngram", "tree": (2, 2, 4)}, "guesses no trees"),
        ({"max_len": 5000}, "the model's context is 768"),
        ({"simulate_accept": 9.0, "drafter": "ngram"}, "a round accepts 1 to 4 tokens"),
    ],
)
def test_what_cannot_be_built_says_why(options, says):
    with pytest.raises(ConfigError) as caught:
        build(**options)
    assert says in str(caught.value)


def test_missing_model_says_where_it_was_looked_for():
    with pytest.raises(CheckpointError, match="no such folder"):
        LLM("/no/such/folder")


def test_tree_shape_limits():
    assert TreeShape(5, 8, 64).nodes == 64
    assert EngineConfig().tree is None
    with pytest.raises(ConfigError, match="lower either"):
        TreeShape(16, 8, 64)


def test_a_refused_request_does_not_disturb_others():
    case = Case((5, 6, 7), GREEDY)
    alone = run(build().engine, [case])[0].token_ids
    built = build()
    with pytest.raises(RequestError):
        built.engine.prepare([], GREEDY)
    assert run(built.engine, [case])[0].token_ids == alone
