"""Tools over HTTP: calls by grammar, calls and reasoning found in text, a loop with a real function."""

import json
from collections.abc import Sequence
from dataclasses import replace

import httpx
import openai
import pytest

from peregrine import LLM
from peregrine.engine.admission import matcher_limits
from peregrine.engine.output import Delta, Output
from peregrine.errors import RequestError
from peregrine.grammar import MatcherLimits
from peregrine.sampling import Constraint
from peregrine.serve.choices import ChatWriter
from peregrine.serve.job import Job, chat_job
from peregrine.serve.protocol import ChatBody, ToolFields
from peregrine.serve.tools import AnswerStream, tool_plan
from peregrine.text.tool_formats import bracketed
from peregrine.text.tools import auto_grammar
from serve.conftest import Served

FLY = {
    "type": "function",
    "function": {
        "name": "fly",
        "description": "Fly somewhere.",
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": ["Oslo", "Rome"]}, "km": {"$ref": "#/$defs/km"}},
            "required": ["to", "km"],
            "additionalProperties": False,
            "$defs": {"km": {"type": "integer", "minimum": 1, "maximum": 99}},
        },
    },
}
LAND = {
    "type": "function",
    "function": {"name": "land", "parameters": {"type": "object", "additionalProperties": False}},
}
NOTHING = {"type": "object", "additionalProperties": False}


def tool_named(name: str, schema: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


USER = {"role": "user", "content": "Fly to Rome."}
ASKED = {"model": "merlin", "messages": [USER], "tools": [FLY, LAND], "temperature": 1.0, "max_tokens": 150}


def check(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    assert (name, value) == ("land", {}) or (
        name == "fly" and value["to"] in ("Oslo", "Rome") and 1 <= value["km"] <= 99
    )


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_required_and_named_calls_are_always_valid(client: openai.OpenAI, seed: int) -> None:
    named = {"type": "function", "function": {"name": "fly"}}
    for choice, more in (("required", {"parallel_tool_calls": False}), (named, {})):
        asked = {**ASKED, **more, "tool_choice": choice, "seed": seed}
        answer = client.chat.completions.create(**asked).choices[0]
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        (call,) = answer.message.tool_calls or []
        assert call.type == "function"
        check(call.function.name, call.function.arguments)
        pieces, names, reason = "", [], None
        for chunk in client.chat.completions.create(**asked, stream=True):
            reason = chunk.choices[0].finish_reason or reason
            for piece in chunk.choices[0].delta.tool_calls or []:
                assert piece.index == 0
                names += [piece.function.name] if piece.function.name else []
                pieces += piece.function.arguments or ""
        assert (names, pieces, reason) == ([call.function.name], call.function.arguments, "tool_calls")


def test_a_loop_with_a_real_function(client: openai.OpenAI) -> None:
    messages: list[dict[str, object]] = [USER]
    for turn in range(2):
        asked = {**ASKED, "messages": messages, "tool_choice": "required", "parallel_tool_calls": False, "seed": turn}
        message = client.chat.completions.create(**asked).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            done = {"done": json.loads(call.function.arguments)}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(done)})
    last = client.chat.completions.create(**{**ASKED, "messages": messages, "tool_choice": "none", "max_tokens": 5})
    assert last.choices[0].message.tool_calls is None
    assert last.choices[0].message.content


DEEP = json.loads('{"items": ' * 70 + "{}" + "}" * 70)
REFUSED: dict[str, dict[str, object]] = {
    "tool_choice": {"tools": None, "tool_choice": "required"},
    "tools[0]": {"tools": [{"type": "function"}]},
    "tools[1].function.name": {"tools": [LAND, LAND]},
    "tools[0].function.name": {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    "tool_parser": {"tool_parser": "pythonic"},
    "tools[0].function.strict": {"tools": [{"type": "function", "function": {"name": "a", "strict": "yes"}}]},
    "tools[1].function.parameters": {"tools": [LAND, tool_named("a", "{}")]},
    "tools[2].function.parameters": {"tools": [FLY, LAND, tool_named("a", {"type": "string"})]},
    "tools[1].function.parameters ": {
        "tools": [LAND, tool_named("a", {"properties": {"b": {"not": {}}}})],
        "tool_choice": "required",
    },
    "guided_json": {"guided_json": [1]},
    "guided_regex": {"guided_regex": "a+"},
    "tools[0].function.parameters": {"tools": [tool_named("deep", DEEP)]},
    "tools, guided_json": {"guided_json": {"not": {}}},
    "chat_template_kwargs.messages": {"chat_template_kwargs": {"messages": []}},
    "messages[1].tool_calls[0].id": {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"id": [1], "function": {"name": "fly"}}]}]
    },
    "messages[1].tool_calls[0].function.arguments": {
        "messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "fly", "arguments": [1]}}]}]
    },
    "messages[1].tool_calls[0]": {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "x"}]}]},
}


@pytest.mark.parametrize(
    "choice",
    [
        *("maybe", 1, {"type": "banana", "function": {"name": "fly"}}, {"type": "function", "function": {"name": []}}),
        *({"type": "allowed_tools"}, {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [FLY]}}),
    ],
)
def test_choices_that_are_none_are_refused(http: httpx.Client, choice: object) -> None:
    response = http.post("/v1/chat/completions", json={**ASKED, "tool_choice": choice})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice"), response.text


@pytest.mark.parametrize("given", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_tool_without_parameters_takes_none(server: Served, given: dict[str, object]) -> None:
    tools = [{"type": "function", "function": {"name": "now", **given}}]
    job = chat_job(ChatBody.model_validate({"messages": [USER], "tools": tools, "tool_choice": "required"}), server.llm)
    assert job.tools is not None
    assert job.tools.schemas["now"] == {**NOTHING, "properties": {}}


def test_arguments_are_an_object_where_the_schema_leaves_it_open(server: Served) -> None:
    tool = {"type": "function", "function": {"name": "fly", "parameters": {"properties": {"to": {}}}}}
    assert not is_legal(server.llm, {"tools": [tool], "tool_choice": "required"}, '[{"name":"fly","arguments":5}]')
    assert is_legal(server.llm, {"tools": [tool], "tool_choice": "required"}, '[{"name":"fly","arguments":{"to":5}}]')


def test_a_named_call_that_was_not_begun_is_none(server: Served) -> None:
    choice = {"type": "function", "function": {"name": "land"}}
    plan = tool_plan(ToolFields(tools=[LAND], tool_choice=choice), None)
    assert "tool_calls" not in AnswerStream(plan, True, True).fields("Let me th", True, True)


def test_a_parsed_message_may_be_sent_back(server: Served) -> None:
    function = {"name": "fly", "arguments": '{"to": "Rome"}', "parsed_arguments": {"to": "Rome"}}
    parsed = {
        "role": "assistant",
        "parsed": {"a": 1},
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    text = server.llm.tokenizer.decode(job_of(server, messages=[USER, parsed], tools=[LAND]).prompts[0], False)
    assert '"arguments": {"to": "Rome"}' in text
    assert "parsed" not in text
    job_of(server, messages=[USER, {"role": "assistant", "content": "Hi.", "parsed": {"a": 1}}, USER])


def test_only_allowed_tools_are_called(server: Served) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "land"}}]}
    job = job_of(server, tools=[FLY, LAND], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert job.tools is not None
    assert (list(job.tools.schemas), job.tools.required, len(job.tools.described)) == (["land"], True, 2)


@pytest.mark.parametrize("field", REFUSED)
def test_refusals_name_the_field(http: httpx.Client, field: str) -> None:
    response = http.post("/v1/chat/completions", json={**ASKED, **REFUSED[field]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, field.strip()), response.text


THINKING = """{% for m in messages %}<|user|>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}
{{ tools | tojson }}<tool_call></think>{% if enable_thinking %}<think>{% endif %}"""


class Model:
    """An LLM as far as a job looks at it: merlin's tokenizer with other chat templates."""

    def __init__(self, llm: LLM, **templates: str) -> None:
        self.engine, self.sampling, tokenizer = llm.engine, llm.sampling, llm.tokenizer
        self.tokenizer = replace(tokenizer, chat_templates=templates or {"default": THINKING})


def job_of(server: Served, **asked: object) -> Job:
    return chat_job(ChatBody.model_validate({"messages": [USER], **asked}), Model(server.llm))  # type: ignore[arg-type]


def prompt_with(server: Served, templates: dict[str, str], **asked: object) -> tuple[Job, str]:
    """The job of a chat with these templates, and its prompt."""
    model = Model(server.llm, **templates)
    job = chat_job(ChatBody.model_validate({"messages": [USER], **asked}), model)  # type: ignore[arg-type]
    return job, model.tokenizer.decode(job.prompts[0], skip_special=False)


def written(server: Served, job: Job, pieces: Sequence[str]) -> tuple[dict[str, object], list[dict[str, object]]]:
    """The message of a whole answer, and the choices of a stream with these pieces."""
    output = Output(0, [], "".join(pieces), [], "stop")
    deltas = [*(Delta(0, text=piece) for piece in pieces[:-1]), Delta(0, text=pieces[-1], output=output)]
    whole = ChatWriter(job, 0, server.llm.tokenizer).write(deltas, whole=True)
    writer = ChatWriter(job, 0, server.llm.tokenizer)
    return whole, [writer.write([delta], whole=False) for delta in deltas]


TEXT = 'Hm</think>\n\nWell. <tool_call>{"name": "fly", "arguments": {"to": "Oslo"}}</tool_call>\n'


@pytest.mark.parametrize("step", [1, 7, 200])
def test_calls_and_reasoning_in_text(server: Served, step: int) -> None:
    job = job_of(server, tools=[FLY, LAND], chat_template_kwargs={"enable_thinking": True})
    assert not job.params[0].skip_special_tokens
    assert (job.thinks, job.opened) == (True, True)
    whole, chunks = written(server, job, [TEXT[i : i + step] for i in range(0, len(TEXT), step)])
    message = whole["message"]
    assert isinstance(message, dict)
    assert (whole["finish_reason"], message["content"]) == ("tool_calls", "Well. ")
    assert message["reasoning"] == message["reasoning_content"] == "Hm"
    (call,) = message["tool_calls"]
    assert (call["function"], "index" in call) == ({"name": "fly", "arguments": '{"to": "Oslo"}'}, False)
    streamed = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in streamed) == "Hm"  # type: ignore[attr-defined]
    assert "".join(delta["content"] or "" for delta in streamed) == "Well. "  # type: ignore[index]
    again, *more = [call for delta in streamed for call in delta.get("tool_calls", ())]  # type: ignore[attr-defined]
    assert (again["index"], again["type"], again["function"]["name"]) == (0, "function", "fly")
    assert all(sorted(piece) == ["function", "index"] for piece in more)
    pieces = [piece["function"]["arguments"] for piece in (again, *more)]
    assert "".join(pieces) == call["function"]["arguments"]
    assert len(pieces) == {1: len(pieces[0] + "".join(pieces[1:])), 7: 3, 200: 1}[step]
    assert [chunk["finish_reason"] for chunk in chunks][-1] == "tool_calls"


def test_a_template_gets_tools_and_calls_as_it_expects_them(server: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "fly", "arguments": '{"to": "Rome"}'}}
    job = job_of(server, messages=[USER, {"role": "assistant", "tool_calls": [call]}], tools=[LAND])
    text = server.llm.tokenizer.decode(job.prompts[0], skip_special=False)
    assert '"arguments": {"to": "Rome"}' in text
    assert '"name": "land"' in text
    assert not job.opened


PLAIN = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"


def test_the_template_for_tools_says_how_calls_are_written(server: Served) -> None:
    templates = {"default": PLAIN, "tool_use": THINKING}
    call = {"id": "1", "type": "function", "function": {"name": "fly", "arguments": "{}"}}
    job, text = prompt_with(server, templates, tools=[LAND])
    assert job.tools is not None
    assert (job.tools.format, job.thinks, "You can call these tools" in text) == ("hermes", True, False)
    job, text = prompt_with(server, templates, messages=[USER, {"role": "assistant", "tool_calls": [call]}, USER])
    assert '"name": "fly"' in text
    job, text = prompt_with(server, templates, tools=[LAND], tool_choice="none")
    assert (job.thinks, text) == (False, "[user: Fly to Rome.]")


def test_tools_are_described_by_a_message_that_is_no_answer(server: Served) -> None:
    hello = {"role": "assistant", "content": "Hello."}
    _, text = prompt_with(server, {"default": PLAIN}, messages=[hello, USER], tools=[LAND])
    assert text.startswith("[system: You can call these tools")
    assert text.endswith("[assistant: Hello.][user: Fly to Rome.]")
    _, text = prompt_with(server, {"default": "{{ raise_exception('no') if tools }}" + PLAIN}, tools=[LAND])
    assert "You can call these tools" in text


@pytest.mark.parametrize("given", [{}, {"parameters": None, "description": None, "strict": None}])
def test_templates_read_every_field_of_a_tool(server: Served, given: dict[str, object]) -> None:
    template = "{% for t in tools %}{{ t.function.description + '!' }}{{ t.function.parameters.properties | tojson }}"
    tool = {"type": "function", "function": {"name": "now", **given}}
    _, text = prompt_with(server, {"default": template + "{{ t.function.name }}{% endfor %}" + PLAIN}, tools=[tool])
    assert text.startswith("!{}now[user")


def test_a_grammar_begins_after_the_thoughts_or_is_refused(server: Served) -> None:
    constrained = {"regex": "a+", "chat_template_kwargs": {"enable_thinking": True}}
    with pytest.raises(RequestError, match="turn thinking off"):
        job_of(server, **constrained)
    assert job_of(server, regex="a+").params[0].grammar_after is None


OSLO, BERN = '{"to":"Oslo","km":7}', '{"to":"Bern","km":7}'
CALLS = {
    "hermes": 'Well. <tool_call>\n{"name": "fly", "arguments": %s}\n</tool_call>',
    "mistral": "Well. [TOOL_CALLS]fly[ARGS]%s",
    "deepseek": "".join(
        bracketed(mark) if mark[:4] == "tool" else mark
        for mark in ("tool_calls_begin", "tool_call_begin", "fly", "tool_sep", "%s", "tool_call_end", "tool_calls_end")
    ),
    "glm": 'Well. <tool_call>\n{"name": "fly", "arguments": %s}\n</tool_call>',
    "kimi_k2": "Well. <|tool_calls_section_begin|><|tool_call_begin|>functions.fly:0<|tool_call_argument_begin|>%s"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "llama3_json": '[{"name":"fly","parameters":%s}]',
    "generic": '[{"name":"fly","arguments":%s}]',
}


def is_legal(llm: LLM, asked: dict[str, object], text: str) -> bool:
    """Whether a model that is asked for this may write exactly this."""
    params = chat_job(ChatBody.model_validate({"messages": [USER], **asked}), llm).params[0]
    assert params.constraint is not None
    assert llm.engine.grammars is not None
    limits = matcher_limits(params, llm.engine.limits, llm.tokenizer.special_ids)
    matcher = llm.engine.grammars.matcher(params.constraint, limits)
    ids = llm.tokenizer.encode(text, add_special=False)
    return matcher.advance(ids) == len(ids) and matcher.state.is_accepting()


def test_structural_tags_hold_json_in_free_text(server: Served) -> None:
    tags = [
        {"begin": "<f=fly>", "schema": {"properties": {"km": {"type": "integer"}}, "required": ["km"]}, "end": "</f>"},
        {"begin": "<f=land>", "schema": {"type": "object"}, "end": "</f>"},
        {"begin": "[", "schema": {"const": 1}, "end": ""},
    ]
    tag = {"type": "structural_tag", "structures": tags, "triggers": ["<f=", "<f=l", "["]}
    legal = {
        'So: <f=fly>{"km":3}</f> and <f=land>{"any":1}</f>.': True,
        "1 < 2 <f>": True,
        "[1": True,
        '<f=fly>{"km":"3"}</f>': False,
        "<f=swim>{}</f>": False,
        '<f=fly>{"km":3}': False,
    }
    for text, expected in legal.items():
        for asked in ({"response_format": tag}, {"structured_outputs": {"structural_tag": json.dumps(tag)}}):
            assert is_legal(server.llm, asked, text) == expected, text


def test_json_has_no_properties_that_its_schema_does_not_mention(server: Served) -> None:
    listed = {"type": "object", "properties": {"a": {"const": 1}}}
    for schema, legal in (
        (listed, False),
        ({**listed, "additionalProperties": True}, True),
        ({"type": "object"}, True),
        ({"allOf": [{"type": "object"}], "uniqueItems": False, "dependentRequired": {}, "format": "password"}, True),
    ):
        assert is_legal(server.llm, {"guided_json": schema}, '{"a":1,"b":2}') == legal
        assert is_legal(server.llm, {"guided_json": schema}, '{"a":1}')


@pytest.mark.parametrize("format", CALLS)
def test_strict_tools_are_held_to_their_schemas_where_the_model_decides(server: Served, format: str) -> None:
    strict = {"type": "function", "function": {**FLY["function"], "strict": True}}  # type: ignore[dict-item]
    asked: dict[str, object] = {"tools": [strict, LAND], "tool_parser": format}
    land = CALLS[format].replace("fly", "land") % '{"any":[1]}'
    oslo, bern = CALLS[format] % OSLO, CALLS[format] % BERN
    for text, legal in (("Hello there.", True), (oslo, True), (bern, False), (land, True)):
        assert is_legal(server.llm, asked, text) == legal, text
    # With a format for answers, the text is either that or calls, and nothing around them.
    asked["response_format"] = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes"]}}}
    oslo, bern = oslo.removeprefix("Well. "), bern.removeprefix("Well. ")
    for text, legal in (("Hello there.", False), ('"yes"', True), ('"no"', False), (oslo, True), (bern, False)):
        assert is_legal(server.llm, asked, text) == legal, text
    twice = oslo + oslo if format not in ("generic", "llama3_json") else f"{oslo[:-1]},{oslo[1:]}"
    for parallel in (True, False):
        assert is_legal(server.llm, {**asked, "parallel_tool_calls": parallel}, twice) == parallel


def test_marks_that_are_special_tokens_are_written_by_their_ids(server: Served) -> None:
    grammars, ends = server.llm.engine.grammars, frozenset(server.llm.engine.limits.eos_ids)
    mark = max(server.llm.tokenizer.special_ids - ends)
    assert grammars is not None
    written = {"[TOOL_CALLS]": f"<[{mark}]>"}
    text = auto_grammar("mistral", {"land": NOTHING}, ["land"], lambda text: written.get(text, json.dumps(text)))
    matcher = grammars.matcher(Constraint("grammar", text), MatcherLimits(ends, ends, 0, None))
    ids = [*server.llm.tokenizer.encode("Hm", False), mark, *server.llm.tokenizer.encode("land[ARGS]{}", False)]
    assert matcher.advance(ids) == len(ids)
