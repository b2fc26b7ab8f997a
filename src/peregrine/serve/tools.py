"""Tools of a chat: what the body may ask, what the template is given, and what comes back as calls and reasoning."""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, Field

from peregrine.errors import RequestError
from peregrine.sampling import check_schema
from peregrine.serve.structured import ObjectOrText
from peregrine.text.chat_parts import INSTRUCTIONS
from peregrine.text.harmony import ANY_TEXT, HarmonyStream, harmony_grammar
from peregrine.text.reasoning import ReasoningStream
from peregrine.text.tokenizer import Tokenizer
from peregrine.text.tool_formats import HARMONY, NAMES, Call, format_of, write_calls
from peregrine.text.tool_stream import Parsed, Piece, ToolStream
from peregrine.text.tools import auto_grammar, call_schema, closed

MAX_TOOLS = 128
EFFORTS = ("low", "medium", "high")
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
Json = dict[str, object]
HOW = "\n\nYou can call these tools, as JSON: {tools}\nTo call some, write nothing but calls, in this form: {call}"


class ToolFields(BaseModel):
    """Fields of a chat that are about tools and thinking."""

    tools: list[dict[str, Any]] | None = Field(None, description="The functions that may be called.")
    tool_choice: ObjectOrText | None = Field(
        None, description='auto (default with tools), none, required, or {"type": "function", "function": {"name"}}.'
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call; default true.")
    tool_parser: str | None = Field(
        None, description="How the model writes calls; by default what its chat template is written for."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    reasoning_effort: str | None = Field(
        None, description="low, medium or high, where the chat template asks for it; none: as if it were left out."
    )


def template_variables(body: ToolFields, plan: "ToolPlan | None", template: str | None) -> Json:
    """What the chat template is given beside the messages."""
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort not in (None, "none"):
        effort, asks = body.reasoning_effort, "reasoning_effort" in (template or "")
        if not asks or effort not in EFFORTS:
            remedy = f"use {', '.join(EFFORTS)}" if asks else "the model has no such switch; ask in the messages"
            raise RequestError("reasoning_effort", effort, "is not supported", remedy)
        extra.setdefault("reasoning_effort", effort)
    for name in ("messages", "tools", "tokenizer", "add_generation_prompt"):
        if name in extra:
            remedy = "leave it out; messages and tools are fields of the body"
            raise RequestError(f"chat_template_kwargs.{name}", extra[name], "is not the client's to set", remedy)
    return extra if plan is None else {**extra, "tools": plan.described}


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What a body's tools mean for its generations."""

    schemas: Mapping[str, Mapping[str, object]]  # of each tool's arguments, by its name
    described: list[Json]  # the tools as the client described them
    format: str  # how calls are written
    named: str | None  # the tool that must be called; its arguments are the whole text
    required: bool  # the text is a list of calls
    parallel: bool
    strict: frozenset[str]  # tools whose calls must follow their schemas, even if the model decides whether it calls

    @property
    def schema(self) -> Mapping[str, object] | None:
        """The JSON schema of the whole text; None: it is not JSON, or the model decides whether it calls."""
        if self.format == HARMONY:
            return None
        if self.named is not None:
            return self.schemas[self.named]
        return call_schema(self.schemas, self.most) if self.required else None

    @property
    def held(self) -> Collection[str]:
        """The tools whose calls, if they are made, follow their schemas."""
        return [self.named] if self.named is not None else self.schemas if self.required else self.strict

    @property
    def most(self) -> int | None:
        """The most calls that are wanted; None: any number."""
        return None if self.parallel else 1


def tool_plan(body: ToolFields, template: str | None) -> ToolPlan | None:
    """What the body asks about tools; None: nothing. RequestError names what is wrong."""
    choice = body.tool_choice
    if body.tool_parser not in (None, "auto", *NAMES):
        raise RequestError("tool_parser", body.tool_parser, "is not a format", f"use auto or {', '.join(NAMES)}")
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice", choice, "needs tools", "send tools, or leave it out")
        return None
    if len(body.tools) > MAX_TOOLS:
        raise RequestError("tools", f"{len(body.tools)} tools", "are too many", f"send at most {MAX_TOOLS}")
    schemas: dict[str, Mapping[str, object]] = {}
    strict: set[str] = set()
    for place, tool in enumerate(body.tools):
        name, schema, is_strict = checked_tool(f"tools[{place}]", tool)
        if name in schemas:
            raise RequestError(f"tools[{place}].function.name", name, "is there twice", "give each tool its own name")
        schemas[name] = schema
        strict |= {name} if is_strict else set()
    if choice == "none":
        return None
    named = None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
            remedy = 'send {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
            raise RequestError("tool_choice", choice, "allows no tool", remedy)
        schemas = {name: schemas[name] for tool in allowed["tools"] if (name := chosen_name(tool, schemas))}
        strict &= schemas.keys()
        choice = allowed.get("mode")
    if isinstance(choice, dict) and choice.get("type") == "function":
        named = chosen_name(choice, schemas)
    elif choice not in (None, "auto", "required"):
        raise RequestError("tool_choice", choice, "is not a choice", "use auto, none, required or a function")
    required = choice == "required"
    style = format_of(template, body.tool_parser or "auto")
    style = "generic" if required and style != HARMONY else style
    parallel = body.parallel_tool_calls is not False
    # Templates read both fields of every tool.
    filled: Json = {"description": "", "parameters": {"type": "object", "properties": {}}}
    described = [{**tool, "function": filled | known(tool["function"])} for tool in map(known, body.tools)]
    return ToolPlan(schemas, described, style, named, required, parallel, frozenset(strict))


def known(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not null."""
    return {name: value for name, value in fields.items() if value is not None}


def chosen_name(choice: Any, schemas: Mapping[str, object]) -> str:
    """The tool that a choice names: {"type": "function", "function": {"name"}}, or flat, or the name itself."""
    function = choice.get("function", choice) if isinstance(choice, dict) else {"name": choice}
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name not in schemas:
        raise RequestError("tool_choice", choice, "names no tool", f"use one of {', '.join(schemas)}")
    return name


def sampling_of_tools(plan: ToolPlan, answer: Mapping[str, object] | None, tokenizer: Tokenizer) -> Json:
    """The constraint on the text, as sampling parameters; empty: none. `answer`: the schema of a text without calls."""
    if plan.schema is not None:
        return {"json_schema": plan.schema}
    if not plan.strict and answer is None:
        return {}
    mark = partial(mark_in_lark, tokenizer)
    return {"grammar": auto_grammar(plan.format, plan.schemas, plan.strict, mark, plan.most, answer)}


def sampling_of_harmony(plan: ToolPlan | None, answer: str | None, tokenizer: Tokenizer) -> Json:
    """The same for a chat in channels; `answer` is Lark's definition of the final message."""
    if plan is None:
        return {} if answer is None else {"grammar": harmony_grammar({}, answer, partial(mark_in_lark, tokenizer))}
    must = plan.required or plan.named is not None
    if not must and not plan.strict and answer is None:
        return {}
    names = plan.schemas if plan.named is None else [plan.named]
    calls = {name: plan.schemas[name] if must or name in plan.strict else {"type": "object"} for name in names}
    return {"grammar": harmony_grammar(calls, None if must else answer or ANY_TEXT, partial(mark_in_lark, tokenizer))}


def mark_in_lark(tokenizer: Tokenizer, text: str) -> str:
    """A mark as Lark writes it: a special token by its id, other text as a string."""
    token = tokenizer.backend.token_to_id(text)
    return f"<[{token}]>" if token in tokenizer.special_ids else json.dumps(text)


def checked_tool(field: str, tool: dict[str, Any]) -> tuple[str, Mapping[str, object], bool]:
    """A tool's name, the schema of its arguments, and whether calls must follow it."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        remedy = 'send {"type": "function", "function": {"name": "...", "parameters": {...}}}'
        raise RequestError(field, tool, "is not a function", remedy)
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"{field}.function.name", name, "is not a name", "use 1 to 64 letters, digits, _ or -")
    if schema is not None:
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            remedy = 'send a JSON schema such as {"type": "object", "properties": {...}}'
            raise RequestError(f"{field}.function.parameters", schema, "is not the schema of an object", remedy)
        check_schema(f"{field}.function.parameters", schema)
    for key, kind, wanted in (("strict", bool, "true or false"), ("description", str, "a string")):
        if not isinstance(value := function.get(key), kind | None):
            raise RequestError(f"{field}.function.{key}", value, "is of another type", f"send {wanted}")
    return name, closed({"type": "object", **(schema or {"properties": {}})}), function.get("strict") is True


def told_messages(messages: list[Json], plan: ToolPlan | None, described: bool) -> list[Json]:
    """The messages; if the chat template does not describe tools, the first one that is no answer does."""
    if plan is None or described:
        return messages
    functions = json.dumps([tool["function"] for tool in plan.described], ensure_ascii=False)
    example = write_calls(plan.format, [Call("...", "{...}")])
    told = HOW.format(tools=functions, call=example)
    if messages[0]["role"] not in (*INSTRUCTIONS, "user"):
        return [{"role": "system", "content": told.lstrip()}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content'] or ''}{told}"}, *messages[1:]]


def template_call(field: str, call: Any) -> Json:
    """A call of an earlier turn as templates read it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(field, call, "is not a call", 'send {"id", "type": "function", "function": {...}}')
    if not isinstance(call.get("id"), str | None):
        raise RequestError(f"{field}.id", call["id"], "is not a text", "send the call's id, or leave it out")
    if not isinstance(arguments := function.get("arguments"), str | dict | None):
        remedy = 'send JSON text, such as "{}"'
        raise RequestError(f"{field}.function.arguments", arguments, "is neither a string nor an object", remedy)
    return {"type": "function", **call, "function": {"name": function["name"], "arguments": arguments or "{}"}}


class AnswerStream:
    """One generation's text as the fields of a message: content, reasoning, tool calls."""

    def __init__(self, plan: ToolPlan | None, thinks: bool, opened: bool, harmony: bool = False) -> None:
        self._plan, self._thinks = plan, thinks
        self._channels = HarmonyStream(() if plan is None else plan.schemas) if harmony else None
        self._reasoning = ReasoningStream(opened)
        self._tools = None if plan is None or plan.named or harmony else ToolStream(plan.format, plan.schemas)
        self.num_calls = 0
        self._is_dropped = False  # what comes now belongs to a call too many

    def fields(self, text: str, final: bool, whole: bool) -> Json:
        """What this text adds to the message, or is the whole of it."""
        if self._channels is not None:
            thought, parsed = self._channels.push(text, final)
        else:
            thought, text = self._reasoning.push(text, final) if self._thinks else ("", text)
            parsed = self._parsed(text, final)
        calls, text = [part for piece in parsed.pieces for part in self._piece(piece)], parsed.text
        may_call = self.num_calls > 0 if whole else self._plan is not None
        if self._plan is not None and self._plan.required and self.num_calls:
            text = ""  # the beginning of a call that was cut off
        fields: Json = {"content": None if may_call and not text else text}
        if calls:
            fields["tool_calls"] = [{k: v for k, v in call.items() if not whole or k != "index"} for call in calls]
        if thought or (whole and self._thinks):
            fields |= {"reasoning": thought, "reasoning_content": thought}
        return fields

    def _parsed(self, text: str, final: bool) -> Parsed:
        """Text after the thoughts, split into text and calls."""
        if self._tools is not None:
            return self._tools.push(text, final)
        if self._plan is None or not self._plan.named:
            return Parsed(text, ())
        # The arguments of the named tool are the whole text.
        return Parsed("", (Piece(None if self.num_calls else self._plan.named, text),) if text else ())

    def _piece(self, piece: Piece) -> list[Json]:
        """A part of a call as a delta; none of calls beyond the one that the client wants."""
        assert self._plan is not None
        self._is_dropped = self._is_dropped or (
            piece.name is not None and self.num_calls == 1 and not self._plan.parallel
        )
        if self._is_dropped or not (piece.name or piece.arguments):
            return []
        if piece.name is None:
            return [{"index": self.num_calls - 1, "function": {"arguments": piece.arguments}}]
        self.num_calls += 1
        identity = f"call_{secrets.token_hex(12)}"
        function = {"name": piece.name, "arguments": piece.arguments}
        return [{"index": self.num_calls - 1, "id": identity, "type": "function", "function": function}]


def plain_calls(calls: Sequence[Any], field: str) -> list[Json]:
    """The calls of an earlier assistant's turn."""
    return [template_call(f"{field}.tool_calls[{place}]", call) for place, call in enumerate(calls)]
