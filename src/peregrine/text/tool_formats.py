"""How families of models write tool calls, and which of them a chat template is written for."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from peregrine.errors import ConfigError

Tools = Mapping[str, Mapping[str, object]]  # the JSON schema of each tool's arguments, by the tool's name


def bracketed(word: str) -> str:
    """A special token of DeepSeek's, such as tool_sep: fullwidth bars, and a low block for each underscore."""
    return f"<\uff5c{word.replace('_', chr(0x2581))}\uff5c>"


SEPARATOR = bracketed("tool_sep")
PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the tool's name, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models writes calls.

    With `begin` None the whole text is calls, if it begins with a brace or bracket, perhaps after `skipped`.
    """

    begin: str | None
    end: str | None  # None: a call lasts until the next one begins, or to the end
    skipped: tuple[str, ...]  # marks that are neither text nor call
    read: Callable[[str, Tools], list[Call]]  # a call's body, tools by name -> calls


def as_calls(value: object) -> list[Call]:
    """Calls from {"name", "arguments" or "parameters"}, or from a list of such; none if it is anything else."""
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            return []
        arguments = entry.get("arguments", entry.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(Call(entry["name"], arguments))
    return calls


def read_json(body: str, tools: Tools) -> list[Call]:
    """Calls from one JSON value, or from several with semicolons or white space between them."""
    decoder, calls, rest = json.JSONDecoder(), list[Call](), body.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        found = as_calls(value)
        if not found:
            return []
        calls += found
        rest = rest[end:].lstrip("; \n\r\t")
    return calls


def read_hermes(body: str, tools: Tools) -> list[Call]:
    """JSON, or Qwen3-Coder's <function=name><parameter=key>value</parameter></function>."""
    if not body.lstrip().startswith("<function="):
        return read_json(body, tools)
    calls = []
    for name, inside in FUNCTION.findall(body):
        schema = tools.get(name, {}).get("properties")
        kinds = schema if isinstance(schema, dict) else {}
        arguments = {}
        for key, value in PARAMETER.findall(inside):
            arguments[key] = typed(value.removeprefix("\n").removesuffix("\n"), kinds.get(key))
        calls.append(Call(name, json.dumps(arguments, ensure_ascii=False)))
    return calls


def typed(value: str, schema: object) -> object:
    """A parameter written as bare text: JSON, unless its schema says that it is a string."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def read_mistral(body: str, tools: Tools) -> list[Call]:
    """A list of JSON objects, or name[ARGS]{...}; an id may stand before [ARGS]."""
    if "[ARGS]" not in body:
        return read_json(body, tools)
    name, _, arguments = body.partition("[ARGS]")
    return [Call(name.partition("[CALL_ID]")[0].strip(), whole_json(arguments))]


def read_deepseek(body: str, tools: Tools) -> list[Call]:
    """name<sep>{...}, or function<sep>name and a fenced block."""
    name, _, arguments = body.partition(SEPARATOR)
    if name.strip() == "function":
        name, _, arguments = arguments.partition("\n")
        arguments = arguments.strip().removeprefix("```json").removesuffix("```")
    return [Call(name.strip(), whole_json(arguments))]


def whole_json(text: str) -> str:
    """The text, checked to be one JSON object."""
    if not isinstance(json.loads(text), dict):
        raise ValueError("arguments are an object")
    return text.strip()


FORMATS = {
    "hermes": Format("<tool_call>", "</tool_call>", (), read_hermes),
    "qwen3_coder": Format("<tool_call>", "</tool_call>", (), read_hermes),
    "mistral": Format("[TOOL_CALLS]", None, (), read_mistral),
    "deepseek": Format(
        bracketed("tool_call_begin"),
        bracketed("tool_call_end"),
        (bracketed("tool_calls_begin"), bracketed("tool_calls_end")),
        read_deepseek,
    ),
    "llama3_json": Format(None, None, ("<|python_tag|>",), read_json),
    "generic": Format(None, None, (), read_json),
}
# What a chat template holds -> the format its model writes; the first that fits.
SIGNS = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    (bracketed("tool_call_begin"), "deepseek"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters":', "llama3_json"),
)


def format_of(template: str | None, asked: str = "auto") -> str:
    """The name of the format: the one asked for, else the one that the chat template is written for."""
    if asked != "auto":
        if asked not in FORMATS:
            raise ConfigError(f"tool_parser={asked!r}: no such format; use auto or one of {', '.join(FORMATS)}")
        return asked
    return next((name for sign, name in SIGNS if sign in (template or "")), "generic")
