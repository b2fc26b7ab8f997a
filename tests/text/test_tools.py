"""Tool calls and reasoning in text: every family's format, and the same result however the text is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peregrine.errors import ConfigError
from peregrine.text.reasoning import ReasoningStream
from peregrine.text.tool_formats import FORMATS, Call, bracketed, format_of, write_calls
from peregrine.text.tool_stream import Piece, ToolStream
from peregrine.text.tools import call_schema, closed

TOOLS: dict[str, dict[str, object]] = {
    "fly": {"type": "object", "properties": {"to": {"type": "string"}, "speed": {"type": "integer"}}},
    "land": {"type": "object"},
    "stay": {"properties": {name: {"anyOf": [{"type": "string"}, {"type": "null"}]} for name in ("at", "or")}},
}
FLY, LAND = Call("fly", '{"to": "Oslo <b>", "speed": 3}'), Call("land", "{}")
ONE, TWO = json.dumps({"name": "fly", "arguments": json.loads(FLY.arguments)}), '{"name": "land", "arguments": {}}'
BEGIN, END, SEP = bracketed("tool_call_begin"), bracketed("tool_call_end"), bracketed("tool_sep")
CLOSE, UNKNOWN = "</tool_call>", '<tool_call>{"name": "x"}</tool_call>'
# format, text -> text of the answer, calls
CASES: dict[str, tuple[str, str, str, list[Call]]] = {
    "hermes": (
        "hermes",
        f"Sure.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>",
        "Sure.\n",
        [FLY, LAND],
    ),
    "hermes, text after": ("hermes", f"\n<tool_call>{TWO}</tool_call>\n ok", "ok", [LAND]),
    "hermes, cut off": ("hermes", '<tool_call>{"name": "fl', '<tool_call>{"name": "fl', []),
    "hermes, cut off in its arguments": ("hermes", f"<tool_call>{ONE[:50]}", "", [Call("fly", ONE[29:50])]),
    "hermes, another order": ("hermes", '<tool_call>{"arguments": {}, "name": "land"}</tool_call>', "", [LAND]),
    "hermes, arguments in a string": (
        "hermes",
        '<tool_call>{"name": "land", "arguments": "{}"}</tool_call>',
        "",
        [LAND],
    ),
    "hermes, brackets in strings": (
        "hermes",
        r'<tool_call>{"name": "fly", "arguments": {"to": "]}\\\"{"}, "id": "}"} ok</tool_call> then',
        "ok then",
        [Call("fly", r'{"to": "]}\\\"{"}')],
    ),
    "hermes, a mark in a string": (
        "hermes",
        f'<tool_call>{{"name": "fly", "arguments": {{"to": "\\\\\\" {CLOSE} b"}}}}{CLOSE} ok',
        "ok",
        [Call("fly", f'{{"to": "\\\\\\" {CLOSE} b"}}')],
    ),
    "hermes, no arguments": ("hermes", '<tool_call>{"name": "land", "arguments": null}</tool_call>', "", [LAND]),
    "hermes, no number": (
        "hermes",
        '<tool_call>{"arguments": {"x": NaN}, "name": "land"}</tool_call>',
        '<tool_call>{"arguments": {"x": NaN}, "name": "land"}</tool_call>',
        [],
    ),
    "hermes, end missing": ("hermes", f"<tool_call>{TWO}", "", [LAND]),
    "hermes, no JSON": ("hermes", "a <tool_call> b </tool_call> c", "a <tool_call> b </tool_call> c", []),
    "hermes, unknown tool": (
        "hermes",
        '<tool_call>{"name": "x"}</tool_call>',
        '<tool_call>{"name": "x"}</tool_call>',
        [],
    ),
    "hermes, nearly a mark": ("hermes", "1 < 2 <tool_cal <tool", "1 < 2 <tool_cal <tool", []),
    "qwen3_coder": (
        "qwen3_coder",
        "<tool_call>\n<function=fly>\n<parameter=to>\nOslo <b>\n</parameter>\n<parameter=speed>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [FLY],
    ),
    "qwen3_coder, nothing closed": (
        "qwen3_coder",
        "<tool_call><function=fly><parameter=to>\n\n<i>\n<parameter=speed>fast</tool_call><tool_call><function=land>",
        "",
        [Call("fly", '{"to": "\\n<i>", "speed": "fast"}'), LAND],
    ),
    "qwen3_coder, what may be a string": (
        "qwen3_coder",
        "<tool_call><function=stay><parameter=at>12345</parameter><parameter=or>null</parameter>"
        "<parameter=far>NaN</parameter><parameter=any>7</parameter></function></tool_call>",
        "",
        [Call("stay", '{"at": "12345", "or": null, "far": "NaN", "any": 7}')],
    ),
    "generic, Granite's mark": ("generic", f"<|tool_call|>[{ONE}, {TWO}]", "", [FLY, LAND]),
    "generic, Phi's marks": ("generic", f"<|tool_call|>[{ONE}]<|/tool_call|>", "", [FLY]),
    "generic, a fence": ("generic", f"```json\n[\n{ONE},\n{TWO}\n]\n```\n", "", [FLY, LAND]),
    "generic, fences": ("generic", f"```\n{ONE}\n```\n```json\n{TWO}\n```", "", [FLY, LAND]),
    "generic, tags": (
        "generic",
        f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>",
        "",
        [FLY, LAND],
    ),
    "generic, another order": ("generic", '```json\n[{"arguments": {}, "name": "land"}]\n```', "", [LAND]),
    "generic, other fences": ("generic", '```js\nf({"name": 1})\n```', '```js\nf({"name": 1})\n```', []),
    "generic, JSON in a fence": ("generic", '```json\n{"a": [1]}\n```', '```json\n{"a": [1]}\n```', []),
    "generic, text behind": ("generic", f"{TWO}\n```\nDone.", "Done.", [LAND]),
    "glm": (
        "glm",
        "Sure.\n<tool_call>fly\n<arg_key>to</arg_key>\n<arg_value>Oslo <b></arg_value>\n"
        "<arg_key>speed</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>land\n</tool_call>",
        "Sure.\n",
        [FLY, LAND],
    ),
    "glm, in one line": (
        "glm",
        "<tool_call>fly<arg_key>to</arg_key><arg_value>\n a\n</arg_value><arg_key>at</arg_key>"
        '<arg_value>{"a": [1]}</arg_value></tool_call><tool_call>land</tool_call>',
        "",
        [Call("fly", '{"to": "\\n a\\n", "at": {"a": [1]}}'), LAND],
    ),
    "glm, cut off": ("glm", "<tool_call>fly<arg_key>to</arg_key><arg_value>Os", "", [Call("fly", '{"to": "Os"}')]),
    "glm, unknown tool": ("glm", "<tool_call>fl</tool_call>", "<tool_call>fl</tool_call>", []),
    "kimi_k2": (
        "kimi_k2",
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.fly:0<|tool_call_argument_begin|>"
        f"{FLY.arguments}<|tool_call_end|><|tool_call_begin|>land:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Sure.",
        [FLY, LAND],
    ),
    "generic, code behind": ("generic", f"{TWO} Then run `ls`", "Then run `ls`", [LAND]),
    "llama3_json, brackets behind": ("llama3_json", f"[{TWO}] See [1]", "See [1]", [LAND]),
    "generic, far apart": ("generic", f"[{TWO}{' ' * 2000}{TWO}]", "", [LAND, LAND]),
    "mistral, a mark in a string": (
        "mistral",
        '[TOOL_CALLS]fly[ARGS]{"to": "[TOOL_CALLS]"}[TOOL_CALLS]land[ARGS]{}',
        "",
        [Call("fly", '{"to": "[TOOL_CALLS]"}'), LAND],
    ),
    "mistral, list": ("mistral", f"[TOOL_CALLS][{ONE}, {TWO}]", "", [FLY, LAND]),
    "mistral, names": (
        "mistral",
        f"Hm[TOOL_CALLS]fly[ARGS]{FLY.arguments}[TOOL_CALLS]land[CALL_ID]abc[ARGS]{{}}",
        "Hm",
        [FLY, LAND],
    ),
    "deepseek v3.1": (
        "deepseek",
        bracketed("tool_calls_begin")
        + f"{BEGIN}fly{SEP}{FLY.arguments}{END}{BEGIN}land{SEP}{{}}{END}"
        + bracketed("tool_calls_end"),
        "",
        [FLY, LAND],
    ),
    "deepseek v3": ("deepseek", f"{BEGIN}function{SEP}fly\n```json\n{FLY.arguments}\n```{END}", "", [FLY]),
    "llama3_json": ("llama3_json", ONE.replace("arguments", "parameters"), "", [FLY]),
    "llama3_json, tagged": ("llama3_json", f"<|python_tag|>{ONE}; {TWO}", "", [FLY, LAND]),
    "llama3_json, text": ("llama3_json", " Hello {", " Hello {", []),
    "generic": ("generic", f" [{ONE}]", "", [FLY]),
    "generic, text after": ("generic", f"[{ONE}, {TWO}] So be it.", "So be it.", [FLY, LAND]),
    "generic, other JSON": ("generic", '{"name": 3}', '{"name": 3}', []),
}


def parse(format: str, pieces: list[str]) -> tuple[str, list[Call]]:
    stream = ToolStream(format, TOOLS)
    text, calls = "", list[Call]()
    for place, piece in enumerate([*pieces, ""]):
        parsed = stream.push(piece, final=place == len(pieces))
        text += parsed.text
        for part in parsed.pieces:
            before = calls.pop() if part.name is None else Call(part.name, "")
            calls.append(Call(before.name, before.arguments + part.arguments))
    return text, calls


@pytest.mark.parametrize("name", CASES)
def test_every_format_is_read(name: str) -> None:
    format, text, answer, calls = CASES[name]
    assert parse(format, [text]) == (answer, calls)
    assert parse(format, list(text)) == (answer, calls)


@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(0, 300), max_size=12))
def test_any_cut_gives_the_same_calls(name: str, cuts: list[int]) -> None:
    format, text, answer, calls = CASES[name]
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parse(format, [text[a:b] for a, b in pairwise(places)]) == (answer, calls)


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", ONE, TWO, "[TOOL_CALLS]", BEGIN, END, SEP, "{", "}", "<", " \n", "x", "land"),
        *('"', "\\", "[", "]", ",", "[ARGS]", "function", "\n```json\n", '{"name": "fly", "arguments": {', "é"),
        *("<function=fly>", "<parameter=to>", "<parameter=speed>", "</parameter>", "</function>", "\n"),
        *("<|tool_call|>", "<|/tool_call|>", "```", "<arg_key>to</arg_key>", "<arg_value>", "</arg_value>", "fly"),
    ]
)


@given(st.sampled_from(sorted(FORMATS)), st.lists(PIECES, max_size=12))
def test_any_text_gives_the_same_by_characters_and_at_once(format: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert parse(format, list(text)) == parse(format, [text]) == parse(format, pieces)


def test_text_streams_before_a_call_is_complete() -> None:
    stream = ToolStream("hermes", TOOLS)
    assert stream.push("Let me see <tool").text == "Let me see "
    assert stream.push("box>").text == "<toolbox>"


def test_arguments_stream_before_a_call_is_complete() -> None:
    stream = ToolStream("hermes", TOOLS)
    assert stream.push('<tool_call>{"name": "fly", "arguments": ').pieces == ()
    assert stream.push('{"to": "Os').pieces == (Piece("fly", '{"to": "Os'),)
    assert stream.push('lo"}').pieces == (Piece(None, 'lo"}'),)
    assert stream.push("}</tool_call>").pieces == ()
    assert stream.push("<tool_call><function=fly><parameter=to>A long").pieces == (Piece("fly", '{"to": "A long'),)
    assert stream.push(" way\n</para").pieces == (Piece(None, " way"),)
    assert stream.push("meter></function>").pieces == (Piece(None, '"}'),)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("... <tool_call> <function=example> ...", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>", "glm"),
        ("... <tool_call> ...", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        (BEGIN, "deepseek"),
        ("<|tool_call_begin|>id<|tool_call_argument_begin|>", "kimi_k2"),
        ("<|python_tag|>", "llama3_json"),
        (None, "generic"),
    ],
)
def test_the_format_follows_from_the_template(template: str | None, expected: str) -> None:
    assert format_of(template) == expected
    assert format_of(template, "mistral") == "mistral"
    with pytest.raises(ConfigError, match="use auto or one of hermes"):
        format_of(template, "pythonic")


THOUGHTS = {
    (False, "<think>\nHm <b></think>\n\nYes"): ("\nHm <b>", "Yes"),
    (False, "\n<think>Hm"): ("Hm", ""),
    (False, "No <think>x</think>"): ("", "No <think>x</think>"),
    (True, "Hm</think>Yes</think>"): ("Hm", "Yes</think>"),
    (True, "Hm </thin"): ("Hm </thin", ""),
    (False, "<th"): ("", "<th"),
}


@pytest.mark.parametrize(("opened", "text"), THOUGHTS)
def test_reasoning_is_split_however_the_text_is_cut(opened: bool, text: str) -> None:
    for pieces in ([text], list(text), [text[:9], text[9:]]):
        stream = ReasoningStream(opened)
        parts = [*(stream.push(piece) for piece in pieces), stream.push("", final=True)]
        assert ("".join(a for a, _ in parts), "".join(b for _, b in parts)) == THOUGHTS[opened, text]


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_written_as_calls_is_read_as_calls(format: str) -> None:
    for calls in ([LAND], [FLY, LAND, FLY]):
        assert parse(format, [write_calls(format, calls)]) == ("", calls)


def test_a_tools_arguments_are_closed_where_its_schema_leaves_them_open() -> None:
    inner, shut = {"properties": {"properties": {"type": "string"}}}, {"additionalProperties": False}
    tool = {"properties": {"a": {"items": inner}, "b": {"anyOf": [inner, {"type": "object"}]}}, "$defs": {"c": inner}}
    closed_inner = inner | shut
    assert closed(tool) == shut | {
        "properties": {"a": {"items": closed_inner}, "b": {"anyOf": [closed_inner, {"type": "object"}]}},
        "$defs": {"c": closed_inner},
    }
    for stays in (
        *({"additionalProperties": True}, {"patternProperties": {}}, {"allOf": [inner]}, {"$ref": "#/$defs/x"}),
        *({"required": ["others"]}, {"minProperties": 2}, {"propertyNames": {"maxLength": 3}}),
    ):
        assert closed(inner | stays) == inner | stays


def test_references_move_with_a_tools_schema() -> None:
    tool = {"$ref": "#/$defs/x", "$defs": {"x": {"items": [{"$ref": "#"}]}}}
    schema = call_schema({"f": tool}, 1)
    assert schema["$defs"] == {"f": {"$ref": "#/$defs/f/$defs/x", "$defs": {"x": {"items": [{"$ref": "#/$defs/f"}]}}}}
    assert schema["maxItems"] == 1
