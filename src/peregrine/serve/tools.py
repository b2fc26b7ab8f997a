"""Tools of a chat: what the body may ask, what the template is given, and what comes back as calls and reasoning."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from peregrine.errors import RequestError
from peregrine.text.reasoning import ReasoningStream
from peregrine.text.tokenizer import Tokenizer
from peregrine.text.tool_formats import Call, format_of
from peregrine.text.tools import ToolStream, auto_grammar, call_schema

MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
Json = dict[str, object]
HOW = "\n\nYou can call these tools, as JSON: {tools}\nTo call some, write only a JSON list of "
HOW += '{{"name": ..., "arguments": ...}}.'


class ToolFields(BaseModel):
    """Fields of a chat that are about tools and thinking."""

    tools: list[dict[str, Any]] | None = Field(None, description="The functions that may be called.")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description='auto (default with tools), none, required, or {"type": "function", "function": {"name"}}.'
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call; default true.")
    tool_parser: str | None = Field(
        None, description="How the model writes calls; by default what its chat template is written for."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )


def template_variables(body: ToolFields, plan: "ToolPlan | None") -> Json:
    """What the chat template is given beside the messages."""
    extra = dict(body.chat_template_kwargs or {})
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
        """The JSON schema of the whole text; None: the model decides whether it calls."""
        if self.named is not None:
            return self.schemas[self.named]
        return call_schema(self.schemas, None if self.parallel else 1) if self.required else None


def tool_plan(body: ToolFields, template: str | None) -> ToolPlan | None:
    """What the body asks about tools; None: nothing. RequestError names what is wrong."""
    choice = body.tool_choice
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
    if isinstance(choice, dict):
        function = choice.get("function")
        named = function.get("name") if isinstance(function, dict) else choice.get("name")
        if named not in schemas:
            raise RequestError("tool_choice", choice, "names no tool", f"use one of {', '.join(schemas)}")
    elif choice not in (None, "auto", "required"):
        raise RequestError("tool_choice", choice, "is not a choice", "use auto, none, required or a function")
    required = choice == "required"
    style = "generic" if required else format_of(template, body.tool_parser or "auto")
    parallel = body.parallel_tool_calls is not False
    return ToolPlan(schemas, body.tools, style, named, required, parallel, frozenset(strict))


def sampling_of_tools(plan: ToolPlan, tokenizer: Tokenizer) -> Json:
    """The constraint that a plan puts on the text, as sampling parameters; empty: none."""
    if plan.schema is not None:
        return {"json_schema": plan.schema}

    def mark(text: str) -> str:
        token = tokenizer.backend.token_to_id(text)
        return f"<[{token}]>" if token in tokenizer.special_ids else json.dumps(text)

    return {"grammar": auto_grammar(plan.format, plan.schemas, plan.strict, mark)} if plan.strict else {}


def checked_tool(field: str, tool: dict[str, Any]) -> tuple[str, Mapping[str, object], bool]:
    """A tool's name, the schema of its arguments, and whether calls must follow it."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        remedy = 'send {"type": "function", "function": {"name": "...", "parameters": {...}}}'
        raise RequestError(field, tool, "is not a function", remedy)
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"{field}.function.name", name, "is not a name", "use 1 to 64 letters, digits, _ or -")
    if schema is not None and not isinstance(schema, dict):
        raise RequestError(f"{field}.function.parameters", schema, "is not a JSON schema", "send an object")
    return name, schema or {"type": "object"}, function.get("strict") is True


def told_messages(messages: list[Json], plan: ToolPlan | None, template: str | None) -> list[Json]:
    """The messages for a template; if that knows no tools, they, their calls and their answers become plain text."""
    if "tool" in (template or ""):
        return messages
    told: list[Json] = []
    for message in messages:
        content = message.get("content") or ""
        if message.get("tool_calls"):
            content = f"{content}{json.dumps(message['tool_calls'])}"
        if message["role"] == "tool":
            told.append({"role": "user", "content": f"Result of {message.get('name') or 'the tool'}: {content}"})
        else:
            told.append({"role": message["role"], "content": content})
    if plan is not None:
        functions = json.dumps([tool["function"] for tool in plan.described], ensure_ascii=False)
        told[0] = {**told[0], "content": f"{told[0]['content']}{HOW.format(tools=functions)}"}
    return told


def template_call(field: str, call: Any) -> Json:
    """A call of an earlier turn as templates read it: its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(field, call, "is not a call", 'send {"id", "type": "function", "function": {...}}')
    arguments = function.get("arguments") or "{}"
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = arguments
    return {**call, "function": {**function, "arguments": value}}


class AnswerStream:
    """One generation's text as the fields of a message: content, reasoning, tool calls."""

    def __init__(self, plan: ToolPlan | None, thinks: bool, opened: bool) -> None:
        self._plan, self._thinks = plan, thinks
        self._reasoning = ReasoningStream(opened)
        self._tools = None if plan is None or plan.named else ToolStream(plan.format, plan.schemas)
        self.num_calls = 0
        self._begun = False  # the named tool's call

    def fields(self, text: str, final: bool, whole: bool) -> Json:
        """What this text adds to the message, or is the whole of it."""
        thought, text = self._reasoning.push(text, final) if self._thinks else ("", text)
        calls: list[Json] = []
        if self._plan is not None and self._plan.named:
            calls, text = self._named_piece(self._plan.named, text, final), ""
        elif self._tools is not None:
            parsed = self._tools.push(text)
            found, text = list(parsed.calls), parsed.text
            if final:
                rest = self._tools.finish()
                found, text = [*found, *rest.calls], text + rest.text
            calls = [self._call(call) for call in found if self._takes_more()]
        fields: Json = {"content": None if self.num_calls and not text else text}
        if calls:
            fields["tool_calls"] = [{k: v for k, v in call.items() if not whole or k != "index"} for call in calls]
        if thought or (whole and self._thinks):
            fields |= {"reasoning": thought, "reasoning_content": thought}
        return fields

    def _takes_more(self) -> bool:
        assert self._plan is not None
        return self._plan.parallel or self.num_calls == 0

    def _call(self, call: Call) -> Json:
        self.num_calls += 1
        short = self._plan is not None and self._plan.format == "mistral"  # its template wants nine characters
        identity = secrets.token_hex(5)[:9] if short else f"call_{secrets.token_hex(12)}"
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": self.num_calls - 1, "id": identity, "type": "function", "function": function}

    def _named_piece(self, name: str, text: str, final: bool) -> list[Json]:
        """The next piece of the named tool's arguments, which are the whole text."""
        if self.num_calls == 0 and (text or final):
            return [self._call(Call(name, text))]
        return [{"index": 0, "function": {"arguments": text}}] if text else []


def plain_calls(calls: Sequence[Any], field: str) -> list[Json]:
    """The calls of an earlier assistant's turn."""
    return [template_call(f"{field}.tool_calls[{place}]", call) for place, call in enumerate(calls)]
