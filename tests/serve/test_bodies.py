"""Request bodies: supported fields reach SamplingParams, others are refused by name."""

from dataclasses import fields
from typing import Any

import pytest
from pydantic import ValidationError

from peregrine import SamplingParams
from peregrine.serve.errors import ApiError, body_error
from peregrine.serve.job import SAME_NAME, prompt_list, sampling_of
from peregrine.serve.protocol import (
    REFUSED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Generation,
    TokenizeBody,
    WithoutEffect,
)
from peregrine.serve.structured import StructuredFields

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def refusal(model: type, body: object) -> ApiError:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)  # type: ignore[attr-defined]
    return body_error(caught.value.errors())


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"prompt": "x", "colour": 1}, "colour", "colour=1: is not a field of this endpoint"),
        ({}, "prompt", "prompt=None: is missing"),
        ({"prompt": "x", "n": "2"}, "n", "n='2': is not a whole number; send one"),
        ({"prompt": "x", "n": 0}, "n", "n=0: is too small; use at least 1"),
        ({"prompt": "x", "guided_json": 5}, "guided_json", "is neither a string nor an object; send one of them"),
        ({"prompt": "x", "n" * 999: 1}, "n" * 200 + "...", "n..."),
        ({"prompt": "x", "a\nb": 1}, "a\\nb", "a\\nb=1: is not a field"),
        ({"prompt": "x", "metadata": {"k" * 999: 1}}, "metadata." + "k" * 191 + "...", "is not a string"),
        ({"prompt": "x", "n": 500}, "n", "n=500: is too large; use at most 128"),
        ({"prompt": "x", "n": True}, "n", "n=True: is not a whole number"),
        ({"prompt": "x", "stream": 1}, "stream", "stream=1: is neither true nor false"),
        ({"prompt": "x", "temperature": "hot"}, "temperature", "is not a number; send one"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature", "finite number"),
        ({"prompt": "x", "seed": -1}, "seed", "use at least 0"),
        ({"prompt": {"a": 1}}, "prompt", "is neither a string nor a list; send one of them"),
        ({"prompt": "x", "stop": ["a", 1]}, "stop[1]", "stop[1]=1: is not a string; send one"),
        ({"prompt": "x", "speculation": {"num_drafts": -1}}, "speculation.num_drafts", "num_drafts=-1"),
        ({"prompt": "x", "speculation": {"num_drafts": 1, "trees": 1}}, "speculation.trees", "is not a field"),
        ({"prompt": "x", "speculation": {"tree": "oak"}}, "speculation.tree", "tree='oak'"),
        ({"prompt": "x", "stream_options": {}}, "stream_options", "stream_options={}: needs stream"),
        ({"prompt": "x", "metadata": {"a": 1}}, "metadata.a", "is not a string"),
        ([1], None, "the body is not a JSON object"),
        ({"prompt": [1] * 9 + ["a"] * 9}, "prompt[9]", "is not a whole number"),
        ({"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(600)), "a")}, "logit_bias", "600 entries"),
    ],
)
def test_wrong_completion_bodies(body: object, param: str | None, said: str) -> None:
    error = refusal(CompletionBody, body)
    assert (error.status, error.param) == (400, param)
    assert said in str(error)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "assistant", "content": "x", "tool_calls": [1]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "content": "x", "colour": 1}, "messages[0].colour"),
    ],
)
def test_wrong_messages(message: dict[str, Any], param: str) -> None:
    assert refusal(ChatBody, {"messages": [message]}).param == param


def test_a_message_may_come_back_as_it_was_sent() -> None:
    """What clients make of a response, null fields included, is a message of the next request."""
    nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content"))
    for message in (nulls, {**nulls, "tool_calls": [], "annotations": []}):
        body = {"messages": [{"role": "assistant", "content": "Hello", **message}]}
        assert ChatBody.model_validate(body).messages[0].text == "Hello"
    empty = ChatBody.model_validate({"messages": [{"role": "assistant", "content": None}]})
    assert empty.messages[0].text == ""


def test_routers_may_add_their_defaults() -> None:
    """What sglang-router and vllm-router write into every body, as their values that ask for nothing."""
    added = {
        "no_stop_trim": False,
        "return_hidden_states": False,
        "continue_final_message": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "include_reasoning": True,
    }
    assert ChatBody.model_validate({**CHAT, **added}) == ChatBody.model_validate(CHAT)
    for name, value in added.items():
        assert refusal(ChatBody, {**CHAT, name: not value}).param == name


def test_no_messages_at_all() -> None:
    assert refusal(ChatBody, {"messages": []}).param == "messages"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_fields_are_refused_unless_they_have_no_effect(name: str) -> None:
    neutral, remedy = REFUSED[name]
    error = refusal(ChatBody, {**CHAT, name: {"type": "something"}})
    assert error.param == name
    assert f"is not supported; {remedy}" in str(error)
    for value in (None, *neutral):
        assert ChatBody.model_validate({**CHAT, name: value}).messages


def complete(asked: dict[str, object]) -> SamplingParams:
    """As a model without sampling defaults does."""
    return SamplingParams(**asked)  # type: ignore[arg-type]


def test_fields_without_effect_change_nothing() -> None:
    values = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prediction": {"type": "content", "content": "x"},
    }
    assert set(values) == set(WithoutEffect.model_fields)
    plain = sampling_of(CompletionBody(prompt="x", seed=1), {}, complete)
    assert sampling_of(CompletionBody.model_validate({"prompt": "x", "seed": 1, **values}), {}, complete) == plain


def test_every_field_is_used_or_accepted_without_effect() -> None:
    """A field that no code reads would be silently ignored."""
    read_elsewhere = {"model", "n", "seed", "logit_bias", "stream", "stream_options", "speculation"}
    read_elsewhere |= {"return_speculation", *StructuredFields.model_fields}
    assert set(Generation.model_fields) == SAME_NAME | read_elsewhere | set(WithoutEffect.model_fields)
    assert {entry.name for entry in fields(SamplingParams)} >= SAME_NAME


def test_sampling_fields_arrive() -> None:
    body = {
        "prompt": "x",
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 4,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"42": 5},
        "stop": "end",
        "stop_token_ids": [3],
        "min_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "store": False,
        "seed": 9,
        "speculation": {"num_drafts": 1},
        "return_speculation": True,
        "n": 2,
    }
    first, second = sampling_of(CompletionBody.model_validate(body), {"max_tokens": 5, "logprobs": 2}, complete)
    assert first == SamplingParams(
        temperature=0.5,
        top_p=0.8,
        top_k=4,
        min_p=0.1,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={42: 5},
        stop="end",
        stop_token_ids=[3],
        min_tokens=2,
        ignore_eos=True,
        skip_special_tokens=False,
        store=False,
        seed=9,
        num_drafts=1,
        max_tokens=5,
        logprobs=2,
        report_drafts=True,
    )
    assert second.seed == 10


@pytest.mark.parametrize(
    ("prompt", "prompts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])]
)
def test_a_prompt_may_be_one_of_four_things(prompt: object, prompts: object) -> None:
    assert prompt_list(CompletionBody.model_validate({"prompt": prompt})) == prompts


def test_tokenizing_needs_one_source() -> None:
    for body in ({}, {"prompt": "x", "messages": CHAT["messages"]}):
        assert "give prompt or messages; send exactly one of them" in str(refusal(TokenizeBody, body))
    assert refusal(DetokenizeBody, {"tokens": ["a"]}).param == "tokens[0]"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1] * 200_000 + ["a"] * 200_000},
        {"prompt": "x", **{f"field{i}": 1 for i in range(100_000)}},
        {"prompt": "x", "stop": [1] * 200_000},
        {"prompt": "x", "logit_bias": {str(i): "a" for i in range(100_000)}},
        {"prompt": "x", "metadata": {str(i): 1 for i in range(100_000)}},
        {"messages": [{"role": 1, "content": 1}] * 50_000},
        {"messages": [{"role": "user", "content": "x"}] * 50_000},
        {"prompt": [[1]] * 50_000},
        {"prompt": ["x"] * 50_000},
        {"messages": [{"role": "user", "content": [1] * 100_000}]},
    ],
)
def test_a_large_body_is_refused_at_its_first_mistake(body: dict[str, Any]) -> None:
    """A list of all mistakes would take seconds and gigabytes, in the event loop that serves all clients."""
    with pytest.raises(ValidationError) as caught:
        (ChatBody if "messages" in body else CompletionBody).model_validate(body)
    assert caught.value.error_count() < 10
