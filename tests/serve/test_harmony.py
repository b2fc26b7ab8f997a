"""Chats in harmony's channels: what the prompt says, what grammars allow, and which fields the answer has."""

import json
from dataclasses import replace

import pytest
from tokenizers import Tokenizer as Backend

from peregrine.engine.output import Delta, Output
from peregrine.errors import RequestError
from peregrine.grammar import GrammarCompiler, MatcherLimits
from peregrine.serve.choices import ChatWriter
from peregrine.serve.job import Job, chat_job
from peregrine.serve.protocol import ChatBody
from peregrine.text.stream import TextStream
from serve.conftest import Served

MARKS = tuple(f"<|{word}|>" for word in ("return", "constrain", "channel", "start", "end", "message", "call"))
TEMPLATE = """<|start|>system<|message|>Reasoning: {{ reasoning_effort | default("medium") }}<|end|>
{%- for tool in tools or [] %}{{ "// " + tool.function.description + tool.function.name }}{% endfor %}
{%- for m in messages %}
{%- if m.tool_calls %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{{ m.tool_calls[0].function | tojson }}
{%- if m.content %}{{ raise_exception("one of them") }}{% endif %}
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}<|start|>assistant"""
USER = {"role": "user", "content": "Fly to Rome."}
PLACE = {"type": "object", "properties": {"to": {"enum": ["Oslo", "Rome"]}}, "required": ["to"]}
FLY = {"type": "function", "function": {"name": "fly", "parameters": PLACE}}
LAND = {"type": "function", "function": {"name": "land"}}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.fly <|constrain|>json<|message|>{"to":"Oslo"}'
FINAL = "<|channel|>final<|message|>"


class Model:
    """An LLM as far as a job looks at it: merlin's tokenizer with harmony's special tokens and a template."""

    def __init__(self, server: Served) -> None:
        self.engine, self.sampling, plain = server.llm.engine, server.llm.sampling, server.llm.tokenizer
        backend = Backend.from_str(plain.backend.to_str())
        backend.add_special_tokens(list(MARKS))
        special = plain.special_ids | {backend.token_to_id(mark) for mark in MARKS}
        size = backend.get_vocab_size(with_added_tokens=True)
        self.tokenizer = replace(
            plain, backend=backend, vocab_size=size, special_ids=special, chat_templates={"default": TEMPLATE}
        )

    def job(self, **asked: object) -> Job:
        return chat_job(ChatBody.model_validate({"messages": [USER], **asked}), self)  # type: ignore[arg-type]

    def prompt(self, job: Job) -> str:
        return self.tokenizer.decode(job.prompts[0], skip_special=False)


@pytest.fixture(scope="module")
def model(server: Served) -> Model:
    return Model(server)


def fields_of(model: Model, job: Job, text: str) -> tuple[dict[str, object], list[dict[str, object]]]:
    """The whole choice, and the deltas of a stream, of an answer whose tokens come one by one."""
    stream = TextStream(model.tokenizer, job.prompts[0], skip_special=job.params[0].skip_special_tokens)
    pieces = [stream.push([token]) for token in model.tokenizer.encode(text, add_special=False)] + [stream.finish()]
    output = Output(0, [], "".join(pieces), [], "stop")
    deltas = [*(Delta(0, text=piece) for piece in pieces[:-1]), Delta(0, text=pieces[-1], output=output)]
    writer = ChatWriter(job, 0, model.tokenizer)
    chunks = [writer.write([delta], whole=False)["delta"] for delta in deltas]
    return ChatWriter(job, 0, model.tokenizer).write(deltas, whole=True), chunks  # type: ignore[return-value]


@pytest.mark.parametrize("skip", [None, True])
def test_channels_become_fields_of_the_message(model: Model, skip: bool | None) -> None:
    job = model.job(tools=[FLY, LAND], skip_special_tokens=skip)
    preamble = "<|channel|>commentary<|message|>So.<|end|><|start|>assistant"
    whole, chunks = fields_of(model, job, f"{THOUGHT}{preamble}{CALL}")
    message = whole["message"]
    assert isinstance(message, dict)
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "fly", "arguments": '{"to":"Oslo"}'}
    assert (whole["finish_reason"], message["content"], message["reasoning_content"]) == ("tool_calls", "So.", "Hm.")
    assert "".join(chunk.get("reasoning", "") for chunk in chunks) == "Hm."  # type: ignore[misc]
    assert "".join(chunk["content"] or "" for chunk in chunks) == "So."  # type: ignore[misc]
    calls = [call for chunk in chunks for call in chunk.get("tool_calls", ())]  # type: ignore[attr-defined]
    assert [call["function"].get("name") for call in calls][:2] == ["fly", None]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"to":"Oslo"}'
    whole, _ = fields_of(model, model.job(), f"{THOUGHT}{FINAL}Four.")
    message = {"role": "assistant", "content": "Four.", "reasoning": "Hm.", "reasoning_content": "Hm."}
    assert (whole["message"], whole["finish_reason"]) == (message, "stop")


SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes"]}}}}
STRICT = {"tools": [{**FLY, "function": {**FLY["function"], "strict": True}}, LAND]}  # type: ignore[dict-item]
NAMED = {"type": "function", "function": {"name": "fly"}}
BERN = CALL.replace("Oslo", "Bern")
# What is asked -> texts, and whether they are legal.
LEGAL: list[tuple[dict[str, object], dict[str, bool]]] = [
    (SCHEMA, {f'{THOUGHT}{FINAL}"yes"': True, f'{FINAL}"yes"': True, f'{FINAL}"no"': False, '"yes"': False}),
    ({"regex": r"\d/[a-c]+"}, {f"{THOUGHT}{FINAL}1/abc": True, f"{FINAL}1/d": False}),
    ({"guided_choice": ["a\nb", "c|d"]}, {f"{FINAL}a\nb": True, f"{FINAL}c|d": True, f"{FINAL}c": False}),
    ({"response_format": {"type": "json_object"}}, {f'{FINAL}{{"a":1}}': True, f"{FINAL}[]": False}),
    (STRICT, {THOUGHT + CALL: True, BERN: False, f"{THOUGHT}{FINAL}Hi.": True}),
    ({**STRICT, **SCHEMA}, {CALL: True, f"{FINAL}Hi.": False, f'{FINAL}"yes"': True}),
    ({"tools": [FLY, LAND], "tool_choice": "required"}, {THOUGHT + CALL: True, BERN: False, f"{FINAL}Hi.": False}),
    ({"tools": [LAND, FLY], "tool_choice": NAMED}, {CALL: True, CALL.replace("fly", "land"): False}),
]


@pytest.mark.parametrize(("asked", "texts"), LEGAL)
def test_grammars_are_on_the_final_message_and_on_calls(
    model: Model, asked: dict[str, object], texts: dict[str, bool]
) -> None:
    constraint = model.job(**asked).params[0].constraint
    assert constraint is not None
    ends = frozenset({int(model.tokenizer.backend.token_to_id("<|return|>"))})
    grammars = GrammarCompiler(model.tokenizer, model.tokenizer.vocab_size, tuple(ends))
    for text, legal in texts.items():
        matcher = grammars.matcher(constraint, MatcherLimits(ends, ends, 0, None))
        ids = model.tokenizer.encode(text, add_special=False)
        assert (matcher.advance(ids) == len(ids) and matcher.state.is_accepting()) == legal, text


def test_answers_end_where_the_format_says(model: Model) -> None:
    ends = {model.tokenizer.backend.token_to_id(mark) for mark in ("<|return|>", "<|call|>")}
    assert set(model.job(stop_token_ids=[3]).params[0].stop_token_ids) == {3, *ends}
    assert model.job(ignore_eos=True).params[0].stop_token_ids == ()
    assert model.job().params[0].constraint is None


def test_the_template_gets_effort_descriptions_and_thoughts(model: Model) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "fly", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "So.", "reasoning": "Hm.", "tool_calls": [call]}
    job = model.job(messages=[USER, turn], tools=[FLY], reasoning_effort="high")
    assert "Reasoning: high<|end|>// fly" in model.prompt(job)
    assert "<|channel|>analysis<|message|>Hm.\nSo.<|end|>" in model.prompt(job)
    assert "Reasoning: medium" in model.prompt(model.job(reasoning_effort="none"))


def test_what_channels_cannot_honour_is_refused(model: Model, server: Served) -> None:
    with pytest.raises(RequestError, match=r"ebnf=.* use a JSON schema, a regex or a choice"):
        model.job(ebnf='root ::= "a"')
    with pytest.raises(RequestError, match=r"response_format.json_schema.schema"):
        model.job(response_format={"type": "json_schema", "json_schema": {"schema": json.dumps([1])}})
    with pytest.raises(RequestError, match=r"reasoning_effort='extreme': .* use low, medium, high"):
        model.job(reasoning_effort="extreme")
    with pytest.raises(RequestError, match=r"reasoning_effort='low': .* no such switch"):
        chat_job(ChatBody.model_validate({"messages": [USER], "reasoning_effort": "low"}), server.llm)
