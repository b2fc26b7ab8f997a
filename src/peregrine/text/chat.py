"""Chats rendered by the checkpoint's own template, in a sandbox.

A template is code that came with the weights: it gets plain data only, cannot reach Python's internals, cannot change
its arguments, and is stopped when it takes too long or writes too much. Variables and helpers are those that
transformers offers. A system message goes into the next user message where the template has no place for it.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from peregrine.errors import CheckpointError, RequestError
from peregrine.text.tokenizer import Tokenizer

Message = Mapping[str, object]
MAX_RENDER_SECONDS = 5.0  # of one chat; templates take milliseconds
MAX_CHARACTERS = 8 * 2**20  # of a rendered chat
MARK = "Mark7319"  # a text that is looked for in a rendered chat


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True, **extra: object
) -> list[int]:
    """Token ids of a chat. No bos is added, since the template writes it."""
    return tokenizer.encode(render_chat(tokenizer, messages, add_generation_prompt, **extra), add_special=False)


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True, **extra: object
) -> str:
    """The text of a chat with its special tokens; `extra` (tools, enable_thinking, ...) goes to the template.

    Use `encode_chat` for ids: encoding this text as a plain prompt would add a second bos.
    """
    chat = _plain_messages(messages)
    # Templates test these two for None, so they are always defined.
    given = {"tools": None, "documents": None, **{name: _plain(name, value) for name, value in extra.items()}}
    chosen = _pick(tokenizer, chat, with_tools=given["tools"] is not None)
    if any(message["role"] in ("system", "developer") for message in chat):
        chat = _place_system(chat, tokenizer, chosen)
    return _render(tokenizer, chosen, chat, add_generation_prompt=add_generation_prompt, **given)


def has_system_place(tokenizer: Tokenizer) -> bool:
    """Whether the template for ordinary chats writes system messages; True for a model without one."""
    return tokenizer.chat_template is None or _writes(tokenizer, tokenizer.chat_template, "system")


@lru_cache(maxsize=32)
def _writes(tokenizer: Tokenizer, source: str, role: str) -> bool:
    """Whether a template writes what a first message of this role says."""

    def said(messages: list[Message]) -> bool:
        try:
            return MARK in _render(tokenizer, source, messages, tools=None, documents=None, add_generation_prompt=True)
        except (RequestError, CheckpointError):
            return False

    user = {"role": "user", "content": "Hi"}
    # A template that fails at a plain user message has other needs: nothing follows for this role.
    return said([{"role": role, "content": MARK}, user]) or not said([{**user, "content": MARK}])


def _place_system(chat: Sequence[Message], tokenizer: Tokenizer, source: str) -> list[Message]:
    """The chat with its system and developer messages where the template writes them."""
    placed: list[Message] = []
    held: list[str] = []  # for the next user message
    for message in chat:
        role = str(message["role"])
        if role == "developer" and not _writes(tokenizer, source, role):
            role = "system"
        if role == "system" and not _writes(tokenizer, source, role):
            held.append(str(message["content"]))
        elif role == "user" and held:
            placed.append({**message, "content": "\n\n".join([*held, str(message["content"])])})
            held = []
        else:
            placed.append({**message, "role": role})
    return [*placed, {"role": "user", "content": "\n\n".join(held)}] if held else placed


def _render(tokenizer: Tokenizer, source: str, chat: Sequence[Message], **variables: object) -> str:
    template = _compile(source)
    written: list[str] = []
    size = 0
    try:
        template.environment.start_clock(MAX_RENDER_SECONDS)  # type: ignore[attr-defined]
        for piece in template.generate(messages=chat, **tokenizer.named_tokens, **variables):
            written.append(piece)
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise jinja2.TemplateError(f"the chat becomes longer than {MAX_CHARACTERS} characters")
        return "".join(written)
    except jinja2.exceptions.SecurityError as error:
        raise CheckpointError(
            f"the chat template was stopped by its sandbox: {error}; use a template from a source you trust"
        ) from error
    except Exception as error:  # a template may raise anything; the request is refused, the engine goes on
        problem = f"the model's chat template refuses them: {error}"
        raise RequestError("messages", chat, problem, "send the roles and fields the template expects") from error


def _pick(tokenizer: Tokenizer, chat: Sequence[Message], with_tools: bool) -> str:
    """The template for this chat: `tool_use` if there are tools and such a template, else `default`."""
    templates = tokenizer.chat_templates
    name = "tool_use" if with_tools and "tool_use" in templates else "default"
    if name not in templates:
        named = f"has only the chat templates {sorted(templates)}" if templates else "has no chat template"
        remedy = "send a plain prompt, or put the template in chat_template.jinja in the model's folder"
        raise RequestError("messages", chat, f"the model {named}", remedy)
    return templates[name]


def _plain_messages(messages: Sequence[Message]) -> list[Message]:
    """A checked copy of the messages; RequestError names the wrong message and field."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError("messages", messages, "is not a list", 'send [{"role": "user", "content": "..."}]')
    if not messages:
        raise RequestError("messages", messages, "is empty", "send at least one message")
    chat: list[Message] = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(field, message, "is not an object", 'send {"role": "user", "content": "..."}')
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise RequestError(f"{field}.role", role, "is not a role", "use system, user, assistant or tool")
        # A message with tool calls may have no content.
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RequestError(f"{field}.content", content, "is not a string", "send the text as one string")
        try:
            chat.append({str(name): _plain(f"{field}.{name}", value) for name, value in message.items()})
        except RecursionError:
            raise RequestError(field, "...", "nests too deeply", "send flatter values") from None
    return chat


def _plain(field: str, value: object) -> object:
    """A deep copy of JSON-like data. Other objects are refused, because their methods would escape the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{field}.{name}", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{field}[{index}]", item) for index, item in enumerate(value)]
    raise RequestError(field, value, f"is a {type(value).__name__}", "send only what JSON can hold")


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks text to train on; it is rendered as plain text."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes that jinja's own filter writes for <, >, & and quotes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which templates end: each turn of a loop and each call of a macro looks at the clock."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        del self.globals["lipsum"]  # writes as much text as it is asked for
        self._clock = threading.local()

    def start_clock(self, seconds: float) -> None:
        """Stop what this thread renders from now on after this many seconds."""
        self._clock.seconds, self._clock.end = seconds, time.monotonic() + seconds

    def tick(self) -> None:
        """Called by the code that `_parse` adds to templates."""
        if time.monotonic() > self._clock.end:
            raise jinja2.TemplateError(f"it took longer than {self._clock.seconds:g} s")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            tick = nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None))
            node.body.insert(0, tick.set_lineno(node.lineno))  # type: ignore[attr-defined]
        return tree


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = _ChatEnvironment()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template does not parse, line {error.lineno}: {error.message}; "
            "correct it in chat_template.jinja or tokenizer_config.json"
        ) from error
    except RecursionError:
        raise CheckpointError("the chat template nests too deeply to be compiled; simplify it") from None
