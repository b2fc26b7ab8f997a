"""The official client, unchanged: what it gets is what LLM.generate gives for the same seed."""

import asyncio

import openai
import pytest

from peregrine import SamplingParams
from serve.conftest import Served

PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": "Tell me a story about a cat."}]


def offline(server: Served, prompt: str | list[int], **params: object):
    return server.llm.generate(prompt, SamplingParams(**params))[0]  # type: ignore[arg-type]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["merlin"]
    assert client.models.retrieve("merlin").owned_by == "peregrine"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.models.retrieve("falcon")


def test_completion_equals_offline(server: Served, client: openai.OpenAI) -> None:
    asked = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": 24, "frequency_penalty": 0.3}
    response = client.completions.create(model="merlin", prompt=PROMPT, **asked)  # type: ignore[call-overload]
    expected = offline(server, PROMPT, **asked)
    [choice] = response.choices
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert choice.seed == 5
    assert response.object == "text_completion"
    assert response.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert response.usage.completion_tokens == 24
    assert response.usage.total_tokens == response.usage.prompt_tokens + 24


def test_defaults_are_openais(client: openai.OpenAI) -> None:
    response = client.completions.create(model="merlin", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert response.usage.completion_tokens == 16
    greedy = [client.completions.create(model="merlin", prompt=PROMPT, temperature=0).choices[0].text for _ in "ab"]
    assert greedy[0] == greedy[1]


def test_extra_fields_are_honoured(server: Served, client: openai.OpenAI) -> None:
    asked = {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2, "min_tokens": 3, "ignore_eos": True}
    response = client.completions.create(
        model="merlin", prompt=PROMPT, seed=3, max_tokens=30, extra_body=asked, logit_bias={"300": -50}
    )
    expected = offline(server, PROMPT, seed=3, max_tokens=30, logit_bias={300: -50}, **asked)
    assert response.choices[0].text == expected.text


def test_several_prompts_and_choices(server: Served, client: openai.OpenAI) -> None:
    prompts = [PROMPT, "The falcon"]
    response = client.completions.create(model="merlin", prompt=prompts, n=3, seed=10, max_tokens=8)
    assert [choice.index for choice in response.choices] == list(range(6))
    for choice in response.choices:
        seed = 10 + choice.index % 3
        assert choice.seed == seed
        assert choice.text == offline(server, prompts[choice.index // 3], seed=seed, max_tokens=8).text
    assert response.usage.prompt_tokens == sum(len(server.llm.encode(prompt)) for prompt in prompts)
    assert response.usage.completion_tokens == 48


def test_a_drawn_seed_is_reported_and_gives_the_same_text(client: openai.OpenAI) -> None:
    first = client.completions.create(model="merlin", prompt=PROMPT, max_tokens=20).choices[0]
    again = client.completions.create(model="merlin", prompt=PROMPT, max_tokens=20, seed=first.seed).choices[0]
    assert again.text == first.text


def test_chat_equals_offline(server: Served, client: openai.OpenAI) -> None:
    response = client.chat.completions.create(model="merlin", messages=CHAT, seed=4, max_completion_tokens=20)  # type: ignore[arg-type]
    expected = offline(server, server.llm.encode_chat(CHAT), seed=4, max_tokens=20)
    [choice] = response.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert response.object == "chat.completion"


def test_chat_goes_on_to_the_end_of_the_text(client: openai.OpenAI) -> None:
    response = client.chat.completions.create(model="merlin", messages=CHAT, temperature=0)  # type: ignore[arg-type]
    assert response.choices[0].finish_reason == "stop"
    assert response.usage.completion_tokens > 16


def test_the_next_turn_takes_the_message_of_the_last_as_it_is(server: Served, client: openai.OpenAI) -> None:
    asked = {"model": "merlin", "seed": 4, "max_completion_tokens": 12}
    system = {"role": "system", "content": "You tell stories."}
    first = client.chat.completions.create(messages=[system, *CHAT], **asked).choices[0].message  # type: ignore[call-overload]
    messages = [system, *CHAT, first.model_dump(), {"role": "user", "content": "Go on."}]
    second = client.chat.completions.create(messages=messages, **asked).choices[0].message  # type: ignore[call-overload]
    plain = [
        {"role": "user", "content": f"You tell stories.\n\n{CHAT[0]['content']}"},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "Go on."},
    ]
    assert second.content == offline(server, server.llm.encode_chat(plain), seed=4, max_tokens=12).text
    decided = {decision.field: decision.because for decision in server.llm.decisions}
    assert decided["system_message"] == "the chat template has no place for it"


def test_text_parts_are_joined(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Tell me a story"}, {"type": "text", "text": " about a cat."}]
    asked = {"model": "merlin", "seed": 4, "max_completion_tokens": 20}
    told = [
        client.chat.completions.create(messages=messages, **asked).choices[0].message.content  # type: ignore[call-overload]
        for messages in (CHAT, [{"role": "user", "content": parts}])
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize("chat", [False, True])
def test_stream_adds_up(server: Served, client: openai.OpenAI, chat: bool) -> None:
    asked = {"model": "merlin", "seed": 6, "max_tokens": 40, "n": 2, "temperature": 0.9}
    more = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    if chat:
        whole = client.chat.completions.create(messages=CHAT, **asked)  # type: ignore[call-overload]
        chunks = list(client.chat.completions.create(messages=CHAT, **more))  # type: ignore[call-overload]
        texts = [choice.message.content for choice in whole.choices]
        pieces = [(c.index, c.delta.content, c.finish_reason) for chunk in chunks for c in chunk.choices]
        assert [c.delta.role for chunk in chunks for c in chunk.choices].count("assistant") == 2
    else:
        whole = client.completions.create(prompt=PROMPT, **asked)  # type: ignore[call-overload]
        chunks = list(client.completions.create(prompt=PROMPT, **more))  # type: ignore[call-overload]
        texts = [choice.text for choice in whole.choices]
        pieces = [(c.index, c.text, c.finish_reason) for chunk in chunks for c in chunk.choices]
    for index in range(2):
        mine = [(text, reason) for at, text, reason in pieces if at == index]
        assert "".join(text for text, _ in mine) == texts[index]
        assert [reason for _, reason in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1][1] == whole.choices[index].finish_reason
    assert len(pieces) > 4
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], whole.usage.total_tokens)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_async_streams_side_by_side(server: Served) -> None:
    async def text(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.completions.create(model="merlin", prompt=PROMPT, seed=seed, max_tokens=20, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def both() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(text(client, seed) for seed in range(12)))

    expected = [offline(server, PROMPT, seed=seed, max_tokens=20).text for seed in range(12)]
    assert asyncio.run(both()) == expected


def test_stop_strings_never_leak_into_a_stream(server: Served, client: openai.OpenAI) -> None:
    text = offline(server, PROMPT, temperature=0, max_tokens=40).text
    stop = text[len(text) // 2 :][:7]  # spans tokens
    asked = {"model": "merlin", "prompt": PROMPT, "temperature": 0, "max_tokens": 40, "stop": [stop, "@@"]}
    whole = client.completions.create(**asked).choices[0]  # type: ignore[call-overload]
    pieces = [c.choices[0] for c in client.completions.create(**asked, stream=True)]  # type: ignore[call-overload]
    assert whole.text == "".join(piece.text for piece in pieces) == text[: text.index(stop)]
    assert (whole.finish_reason, whole.stop_reason, pieces[-1].finish_reason) == ("stop", stop, "stop")


def test_cached_prompt_tokens_are_reported(server: Served, client: openai.OpenAI) -> None:
    prompt = list(range(100, 164))
    first, second = (
        client.completions.create(model="merlin", prompt=prompt, max_tokens=1).usage.prompt_tokens_details
        for _ in range(2)
    )
    assert first.cached_tokens == 0
    assert second.cached_tokens == 48  # whole pages of 16, the last token read anew


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 4000}, openai.BadRequestError, "max_tokens"),
        ({"model": "gpt"}, openai.NotFoundError, "model"),
        ({"extra_body": {"tools": [{"type": "function"}]}}, openai.BadRequestError, "tools"),
        ({"extra_body": {"best": 1}}, openai.BadRequestError, "best"),
        ({"extra_body": {"speculation": {"num_drafts": 9}}}, openai.BadRequestError, "speculation.num_drafts"),
        ({"prompt": list(range(2100))}, openai.BadRequestError, "prompt"),
        ({"prompt": [9000]}, openai.BadRequestError, "prompt"),
        ({"logit_bias": {"9000": 1}}, openai.BadRequestError, "logit_bias"),
        ({"n": 1000}, openai.BadRequestError, "n"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(
    client: openai.OpenAI, asked: dict[str, object], kind: type[openai.APIStatusError], param: str, stream: bool
) -> None:
    with pytest.raises(kind) as refusal:
        client.completions.create(**{"model": "merlin", "prompt": PROMPT, "stream": stream, **asked})  # type: ignore[call-overload]
    assert refusal.value.param == param
    assert param in refusal.value.message


def test_a_prompt_that_is_too_long_is_refused_with_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"2100 tokens leave no room in the context of 2048"):
        client.completions.create(model="merlin", prompt=list(range(2100)))


def test_a_chat_that_the_template_refuses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="knows the roles user and assistant, not wizard"):
        client.chat.completions.create(model="merlin", messages=[{"role": "wizard", "content": "x"}])  # type: ignore[list-item]
