"""Chats rendered by the checkpoint's own template, in a sandbox.

A template is code that came with the weights: it gets plain data only, cannot reach Python's internals and cannot
change its arguments. Variables and helpers are those that transformers offers.
"""

import json
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
    template = _compile(_pick(tokenizer, chat, with_tools=given["tools"] is not None))
    variables = {**tokenizer.named_tokens, **given}
    try:
        return template.render(messages=chat, add_generation_prompt=add_generation_prompt, **variables)
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


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, object]]:
    """A checked copy of the messages; RequestError names the wrong message and field."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError("messages", messages, "is not a list", 'send [{"role": "user", "content": "..."}]')
    if not messages:
        raise RequestError("messages", messages, "is empty", "send at least one message")
    chat = []
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
        chat.append({str(name): _plain(f"{field}.{name}", value) for name, value in message.items()})
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


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
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
