"""Bad input is refused at admission with the field, the value and the remedy, and does not disturb other requests."""

import math

import numpy as np
import pytest

from peregrine.config import EngineConfig, TreeShape
from peregrine.errors import CheckpointError, ConfigError, RequestError
from peregrine.llm import LLM, engine_config
from peregrine.sampling import SamplingParams, sampling_params
from spec.harness import Case, build, run, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def engine():
    return build(num_pages=60).engine


@pytest.mark.parametrize(
    ("prompt", "params", "field", "says"),
    [
        ([], GREEDY, "prompt", "is empty"),
        ([1, 300], GREEDY, "prompt", "ids run from 0 to 299"),
        ([1, -1], GREEDY, "prompt", "is not a token id"),
        ([1, True], GREEDY, "prompt", "is not a token id"),
        ([1] * 768, GREEDY, "prompt", "768 tokens leave no room in the context of 768"),
        ([1] * 700, SamplingParams(max_tokens=69), "max_tokens", "use at most 68"),
        ([1], SamplingParams(logit_bias={300: 1.0}), "logit_bias", "ids run from 0 to 299"),
        ([1], SamplingParams(stop_token_ids=[999]), "stop_token_ids", "is not a token id"),
        ([1], SamplingParams(num_drafts=1), "num_drafts", "the engine drafts 0 deep"),
        ([1], SamplingParams(tree="tree"), "tree", "this engine drafts chains: there is no drafter"),
        ([1] * 700, SamplingParams(max_tokens=None, min_tokens=69), "min_tokens", "use at most 68"),
        ([1], SamplingParams(n=2), "n", "use LLM.generate"),
    ],
)
def test_refused_with_field_and_remedy(engine, prompt, params, field, says):
    with pytest.raises(RequestError, match=field) as caught:
        engine.prepare(prompt, params)
    assert caught.value.field == field
    assert says in str(caught.value)


def test_a_request_has_the_context_that_all_pages_hold(caplog: pytest.LogCaptureFixture) -> None:
    """It is announced, is the default of max_tokens, and a request that fills it ends."""
    with LLM(tiny_model(), drafter="none", num_pages=3) as llm:
        (decision,) = [d for d in llm.decisions if d.field == "max_len"]
        assert decision.value == llm.engine.limits.max_len == 31
        assert "num_pages=3 hold 32 tokens, 1 of them for a round's window; the context is 768" in decision.because
        assert "max_len=31: num_pages=3" in caplog.text
        with pytest.raises(RequestError, match="31 tokens leave no room in the context of 31; shorten it to 30"):
            llm.generate([[1] * 31])
        (output,) = llm.generate([[1] * 4], {"max_tokens": None, "ignore_eos": True})
        assert len(output.token_ids) == 27
    with pytest.raises(ConfigError, match="holds no token beside 16 of a round's window; ask for 3 or more"):
        LLM(tiny_model(), drafter="ngram", num_pages=2, num_drafts=15, windows="fixed")


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
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**63),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-45),
        ("repetition_penalty", 1e9),
        ("temperature", 10**400),
        ("presence_penalty", 3),
        ("frequency_penalty", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", 2.0),
        ("max_tokens", 2**63),
        ("min_tokens", -1),
        ("min_tokens", 2**63),
        ("n", 0),
        ("n", 2**63),
        ("logprobs", 65),
        ("stop", ""),
        ("stop", [1]),
        ("stop", 7),
        ("stop", "x" * 1025),
        ("stop", b"x"),
        ("stop_token_ids", "7"),
        ("stop_token_ids", [2**63]),
        ("stop_token_ids", [1.0]),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {2**63: 1.0}),
        ("logit_bias", {1: 10**400}),
        ("num_drafts", -1),
        ("num_drafts", 2**63),
        ("tree", "oak"),
        ("tree", True),
        ("ignore_eos", 1),
    ],
)
def test_bad_sampling_values_are_named(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


def test_a_number_too_long_to_write_is_still_refused_in_a_line():
    with pytest.raises(RequestError, match="top_k=<int>: is above"):
        SamplingParams(top_k=10**5000)


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"top_k": None}, {"top_k": 0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": np.int64(5)}, {"top_k": 5}),
        ({"temperature": np.float32(0.5)}, {"temperature": 0.5}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": None, "top_p": None, "n": None}, {"temperature": 1.0, "top_p": 1.0, "n": 1}),
        ({"stop": None}, {"stops": ()}),
        ({"stop_token_ids": None}, {"stop_token_ids": ()}),
        ({"stop_token_ids": [np.int32(4)]}, {"stop_token_ids": (4,)}),
        ({"logit_bias": None}, {"logit_bias": {}}),
        ({"logit_bias": {np.int64(3): np.float64(1)}}, {"logit_bias": {3: 1.0}}),
        ({"max_tokens": None, "min_tokens": None, "seed": None}, {"max_tokens": None, "min_tokens": 0, "seed": None}),
        ({"seed": np.uint32(7)}, {"seed": 7}),
    ],
)
def test_none_is_the_default_and_numbers_of_numpy_are_numbers(given, taken):
    params = SamplingParams(**given)
    for name, value in taken.items():
        assert getattr(params, name) == value
        assert type(getattr(params, name)) is type(value)


def test_generations_differ_by_their_seeds_alone():
    last = 2**63 - 1
    made = SamplingParams(n=3, seed=last, top_k=4).generations()
    assert [p.seed for p in made] == [last, 0, 1]
    assert {p.n for p in made} == {1}
    assert {p.top_k for p in made} == {4}
    drawn = [p.seed for p in SamplingParams(n=3).generations()]
    assert [s - drawn[0] for s in drawn] == [0, 1, 2]
    assert drawn[0] < 2**53, "JavaScript rounds the seed that is reported"


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
        ({"num_pages": 0}, "num_pages=0: must be between 2 and"),
        ({"page_size": 24}, "power of two"),
        ({"max_rows": -1}, "max_rows=-1: must be between 0 and 4096"),
        ({"num_drafts": -1}, "num_drafts=-1: must be between 0 and 16"),
        ({"num_drafts": 99}, "between 0 and 16"),
        ({"tree": (3, 2)}, "is not (depth, width, nodes)"),
        ({"tree": (3, 2, 65)}, "nodes counts the window"),
        ({"tree": (0, 2, 4)}, "at least 1"),
        ({"warp": 9}, "warp=9: no such option"),
        ({"row_sizes": (2, 4), "max_rows": 8}, "row_sizes=(2, 4)"),
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
    with pytest.raises(CheckpointError, match=r"model='/no/such\.gguf': no such file"):
        LLM("/no/such.gguf")


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
