"""How families of models write tool calls, and which of them a chat template is written for."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peregrine.errors import ConfigError
from peregrine.text.tool_arguments import KEY_TAGS, PARAMETER_TAGS, Tags, no_number

Tools = Mapping[str, Mapping[str, object]]  # the JSON schema of each tool's arguments, by the tool's name


def bracketed(word: str) -> str:
    """A special token of DeepSeek's, such as tool_sep: fullwidth bars, and a low block for each underscore."""
    return f"<\uff5c{word.replace('_', chr(0x2581))}\uff5c>"


SEPARATOR = bracketed("tool_sep")  # DeepSeek's, before a call's arguments
ARGUMENTS_MARK = "<|tool_call_argument_begin|>"  # and Kimi's


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the tool's name, and its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before the arguments of a call: group 1 is the tool's name, and the match ends where they begin."""

    pattern: re.Pattern[str]
    inside: int | Tags  # JSON arguments: how many braces are open before them; others: their tags


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models writes calls.

    With `begin` None the whole text is calls, if it begins with a brace or bracket, perhaps after `skipped`.
    """

    begin: str | None
    end: str | None  # None: a call lasts until the next one begins, or to the end
    skipped: tuple[str, ...]  # marks that are neither text nor call; one that another begins with comes later
    heads: tuple[Head, ...]


NAME = r"([\w-]{1,64})"
JSON_CALL = (
    rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"{NAME}"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
JSON_HEAD = Head(re.compile(rf"[\s,;\[]*{JSON_CALL}"), inside=1)
JSON_MARKS = "<tool_call>", "</tool_call>", "<|tool_call|>", "<|/tool_call|>", "```json", "```"
MARKED_JSON_HEAD = Head(re.compile(rf"(?:[\s,;\[\]]|{'|'.join(map(re.escape, JSON_MARKS))})*{JSON_CALL}"), inside=1)
TAGGED_HEAD = Head(re.compile(rf"\s*<function={NAME}>"), PARAMETER_TAGS)  # Qwen3-Coder's
GLM_HEAD = Head(re.compile(rf"\s*{NAME}\s*(?=<arg_key>|</tool_call>)"), KEY_TAGS)
MISTRAL_HEAD = Head(re.compile(rf"\s*{NAME}\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*(?=\{{)"), inside=0)
DEEPSEEK_HEAD = Head(  # version 3 writes function<sep>name and a fenced block
    re.compile(rf"\s*(?:function{SEPARATOR})?{NAME}(?:{SEPARATOR}|\n```json\n)\s*(?=\{{)"), inside=0
)
KIMI_HEAD = Head(re.compile(rf"\s*(?:functions\.)?{NAME}(?::\d+)?\s*{re.escape(ARGUMENTS_MARK)}\s*(?=\{{)"), inside=0)


def read_json(body: str) -> list[Call]:
    """Calls from one JSON value, or from several with semicolons, commas or white space between them.

    ValueError if it is no JSON; no calls if it is JSON of another form.
    """
    decoder, calls, rest = json.JSONDecoder(parse_constant=no_number), list[Call](), body.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        for entry in value if isinstance(value, list) else [value]:
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                return []
            arguments = entry.get("arguments", entry.get("parameters"))
            arguments = {} if arguments is None else arguments
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append(Call(entry["name"], arguments))
        rest = rest[end:].lstrip(",; \n\r\t")
    return calls


FORMATS = {
    "hermes": Format("<tool_call>", "</tool_call>", (), (JSON_HEAD, TAGGED_HEAD)),
    "qwen3_coder": Format("<tool_call>", "</tool_call>", (), (JSON_HEAD, TAGGED_HEAD)),
    "glm": Format("<tool_call>", "</tool_call>", (), (JSON_HEAD, GLM_HEAD)),
    "mistral": Format("[TOOL_CALLS]", None, (), (MISTRAL_HEAD, JSON_HEAD)),
    "deepseek": Format(
        bracketed("tool_call_begin"),
        bracketed("tool_call_end"),
        (bracketed("tool_calls_begin"), bracketed("tool_calls_end")),
        (DEEPSEEK_HEAD,),
    ),
    "kimi_k2": Format(
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        (KIMI_HEAD, JSON_HEAD),
    ),
    "llama3_json": Format(None, None, ("<|python_tag|>",), (JSON_HEAD,)),
    "generic": Format(None, None, JSON_MARKS, (MARKED_JSON_HEAD,)),
}
HARMONY = "harmony"  # in which calls are messages like any others: harmony.py
NAMES = (*FORMATS, HARMONY)
# What a chat template holds -> the format its model writes; the first that fits.
SIGNS = (
    ("<|channel|>", HARMONY),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    (bracketed("tool_call_begin"), "deepseek"),
    (ARGUMENTS_MARK, "kimi_k2"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters":', "llama3_json"),
)


def format_of(template: str | None, asked: str = "auto") -> str:
    """The name of the format: the one asked for, else the one that the chat template is written for."""
    if asked != "auto":
        if asked not in NAMES:
            raise ConfigError(f"tool_parser={asked!r}: no such format; use auto or one of {', '.join(NAMES)}")
        return asked
    return next((name for sign, name in SIGNS if sign in (template or "")), "generic")


def write_calls(format: str, calls: Sequence[Call]) -> str:
    """Calls as a model of this format writes them."""
    marks = FORMATS["generic" if format == HARMONY else format]
    key = "parameters" if format == "llama3_json" else "arguments"
    bodies = [f'{{"name": {json.dumps(call.name)}, "{key}": {call.arguments}}}' for call in calls]
    if marks.begin is None:
        return f"[{', '.join(bodies)}]"
    if format == "mistral":
        bodies = [f"{call.name}[ARGS]{call.arguments}" for call in calls]
    elif format == "deepseek":
        bodies = [f"{call.name}{SEPARATOR}{call.arguments}" for call in calls]
    elif format == "kimi_k2":
        bodies = [f"functions.{call.name}:{n}{ARGUMENTS_MARK}{call.arguments}" for n, call in enumerate(calls)]
    else:
        bodies = [f"\n{body}\n" for body in bodies]
    return "".join(f"{marks.begin}{body}{marks.end or ''}" for body in bodies)
