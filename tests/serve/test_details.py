"""Details of responses beside the text: log-probabilities in both formats, echo, provenance, drafts."""

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from peregrine import SamplingParams
from peregrine.engine.output import Delta, TokenLogprob
from peregrine.serve import choices, responses
from peregrine.serve.choices import joined_logprobs
from serve.conftest import Served

PROMPT = "Once upon a time, é"


def test_completion_logprobs(server: Served, client: openai.OpenAI) -> None:
    asked = {"temperature": 1.0, "seed": 8, "max_tokens": 12, "logprobs": 2}
    choice = client.completions.create(model="merlin", prompt=PROMPT, **asked).choices[0]  # type: ignore[call-overload]
    expected = server.llm.generate(PROMPT, SamplingParams(**asked))[0]  # type: ignore[arg-type]
    told = choice.logprobs
    assert told.token_logprobs == [entry.logprob for entry in expected.logprobs]
    assert "".join(told.tokens) == choice.text
    assert [choice.text[offset:].startswith(t) for offset, t in zip(told.text_offset, told.tokens, strict=True)]
    assert told.text_offset[0] == 0
    for entry, top in zip(expected.logprobs, told.top_logprobs, strict=True):
        likeliest = {server.llm.tokenizer.decode([i]): value for i, value in entry.top}
        chosen = server.llm.tokenizer.decode([entry.token_id])
        assert top == {**likeliest, chosen: entry.logprob}  # the chosen one is always there


def test_chat_logprobs(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model="merlin",
        messages=[{"role": "user", "content": "Tell me a story."}],
        seed=1,
        max_tokens=10,
        logprobs=True,
        top_logprobs=3,
    ).choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == choice.message.content
    assert [len(entry.top_logprobs) for entry in content] == [3] * 10
    assert all(entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob for entry in content)


def test_alternatives_need_logprobs_and_none_of_them_do_not(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "logprobs": False}
    assert http.post("/v1/chat/completions", json={**body, "top_logprobs": 0}).status_code == 200
    refused = http.post("/v1/chat/completions", json={**body, "top_logprobs": 1})
    assert (refused.status_code, "set logprobs to true" in refused.text) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echo_scores_the_prompt(server: Served, http: httpx.Client, stream: bool, max_tokens: int) -> None:
    ids = server.llm.encode(PROMPT)
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    choice = read_choice(http, {**body, "stream": stream})
    text = server.llm.tokenizer.decode(ids)
    told = choice["logprobs"]
    expected = server.llm.generate(
        [ids], SamplingParams(temperature=0, max_tokens=max(1, max_tokens), prompt_logprobs=1)
    )[0]
    assert choice["text"] == text + (expected.text if max_tokens else "")
    assert choice["finish_reason"] == "length"
    assert told["token_logprobs"][: len(ids)] == [None, *(entry.logprob for entry in expected.prompt_logprobs)]
    assert told["top_logprobs"][0] is None
    assert len(told["tokens"]) == len(ids) + max_tokens
    assert told["text_offset"][1] == len(server.llm.tokenizer.decode(ids[:1]))
    assert choice["usage"]["completion_tokens"] == max_tokens


def read_choice(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    """The one choice of a response, streamed or not, with the usage beside it."""
    if not body["stream"]:
        response = http.post("/v1/completions", json=body).json()
        return {**response["choices"][0], "usage": response["usage"]}
    whole: dict[str, Any] = {"text": "", "logprobs": {}, "rounds": [], "tokens": []}
    for chunk in read_events(http, {**body, "stream_options": {"include_usage": True}}):
        whole["usage"] = chunk["usage"]
        for choice in chunk["choices"]:
            whole |= {"finish_reason": choice["finish_reason"], "text": whole["text"] + choice["text"]}
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"][name] = whole["logprobs"].get(name, []) + values
    return whole


def read_events(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_speculation_is_reported(server: Served, http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "return_speculation": True}
    told = http.post("/v1/completions", json=body).json()["choices"][0]["speculation"]
    expected = server.llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40))[0]
    assert [token["id"] for token in told["tokens"]] == expected.token_ids
    assert [token["drafted"] for token in told["tokens"]] == expected.drafted
    assert [token["text"] for token in told["tokens"]] == [
        server.llm.tokenizer.decode([i], False) for i in expected.token_ids
    ]
    assert told["acceptance"]["correct"] == expected.stats.correct == sum(expected.drafted) > 0
    assert told["acceptance"]["accept_length"] == expected.stats.accept_length
    assert sum(entry["num_tokens"] for entry in told["rounds"]) == 40
    assert sum(entry["offered"] for entry in told["rounds"]) == told["acceptance"]["drafted"]
    place = 0
    for entry in told["rounds"]:
        correct = [draft["id"] for draft in entry["drafts"] if draft["correct"]]
        drafted = expected.drafted[place : place + entry["num_tokens"]]
        assert len(correct) == sum(drafted)
        assert correct == expected.token_ids[place : place + len(correct)]
        place += entry["num_tokens"]
    streamed = [
        choice["speculation"] for chunk in read_events(http, {**body, "stream": True}) for choice in chunk["choices"]
    ]
    assert [token for piece in streamed for token in piece["tokens"]] == told["tokens"]
    assert [entry for piece in streamed for entry in piece["rounds"]] == told["rounds"]
    assert streamed[-1]["acceptance"] == told["acceptance"]
    assert all("acceptance" not in piece for piece in streamed[:-1])


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_speculation_may_be_capped_and_the_text_stays(http: httpx.Client, num_drafts: int) -> None:
    body = {"prompt": PROMPT, "seed": 5, "max_tokens": 30, "return_speculation": True}
    free = http.post("/v1/completions", json=body).json()["choices"][0]
    capped = http.post("/v1/completions", json={**body, "speculation": {"num_drafts": num_drafts}}).json()
    assert capped["choices"][0]["text"] == free["text"]
    assert max(entry["offered"] for entry in capped["choices"][0]["speculation"]["rounds"]) == num_drafts
    assert max(entry["offered"] for entry in free["speculation"]["rounds"]) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_with_many_details_is_not_written_in_the_event_loop(
    server: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    threads: list[str] = []

    def noted(deltas: list[Delta], *_: object) -> list[TokenLogprob]:
        threads.append(threading.current_thread().name)
        return joined_logprobs(deltas)

    monkeypatch.setattr(choices, "joined_logprobs", noted)
    ids = server.llm.encode("Once upon a time there was a cat.")
    body = {"prompt": ids, "echo": True, "max_tokens": 4, "logprobs": 64, "temperature": 0, "stream": stream}
    told = read_choice(http, body)["logprobs"]
    assert len(told["tokens"]) == len(ids) + 4
    assert threads[0].startswith("peregrine-text")


@pytest.mark.parametrize(
    "value", [{}, [], {"a": []}, [{}, [1, {"b": "é"}]], list(range(3000)), [{"c": [[2.5]] * 40}] * 40]
)
def test_json_in_small_steps_is_the_same(value: object) -> None:
    assert responses.encode_slowly(value) == responses.encode(value)


def test_details_are_left_out_unless_asked_for(http: httpx.Client) -> None:
    choice = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}).json()["choices"][0]
    assert choice["logprobs"] is None
    assert "speculation" not in choice
