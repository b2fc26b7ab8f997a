"""Chat templates run in a sandbox.

A template is code that came with the weights: it gets plain data only, cannot reach Python's internals, cannot change
its arguments, and is stopped when it takes too long or writes too much. Variables and helpers are those that
transformers offers.
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


def run_template(tokenizer: Tokenizer, source: str, chat: Sequence[Message], variables: Mapping[str, object]) -> str:
    """The text that the template `source` writes for a chat of plain data; variables may stand for special tokens."""
    template = _compile(source)
    written: list[str] = []
    size = 0
    try:
        template.environment.start_clock(MAX_RENDER_SECONDS)  # type: ignore[attr-defined]
        for piece in template.generate({**tokenizer.named_tokens, **variables, "messages": chat}):
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
