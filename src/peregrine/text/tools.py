"""Tool calls in generated text: what is text, what is a call.

One machine reads settled text. What it decides depends on the text alone and never on how it was cut, so any number of
tokens may come at once. Text that looks like a call but is none is given back as text.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from peregrine.text.reasoning import partial_suffix
from peregrine.text.tool_formats import FORMATS, SEPARATOR, Call, Tools

LARK = "%llguidance {}"  # the first line of a grammar that is in Lark's syntax for sure


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text turned out to be."""

    text: str
    calls: tuple[Call, ...]


class ToolStream:
    """Splits the text of one answer into text and calls.

    | text ... | begin | body | end | white space | begin | body | end | text
      sent       held until the call is complete; white space beside calls is dropped
    """

    def __init__(self, format: str, tools: Tools) -> None:
        """A call of a tool that is not among these is text."""
        self._format, self._tools = FORMATS[format], tools
        self._marks = [mark for mark in (self._format.begin, *self._format.skipped) if mark]
        self._held = ""  # not settled yet
        self._inside = False  # in a call
        self._fresh = True  # nothing but white space since the beginning or the last call
        self._after_call = False
        self._spaces = ""  # white space at the beginning, kept in case text follows

    def push(self, text: str) -> Parsed:
        """Add text; returns what is settled now."""
        self._held += text
        return self._settle(final=False)

    def finish(self) -> Parsed:
        """The rest, when no more text comes."""
        return self._settle(final=True)

    def _settle(self, final: bool) -> Parsed:
        if self._format.begin is None:
            return self._settle_whole(final)
        sent, calls = "", list[Call]()
        while True:
            if self._inside:
                body = self._body(final)
                if body is None:
                    break
                found = self._read(body[0])
                calls += found
                if found:
                    self._fresh = self._after_call = True
                else:
                    sent += self._send(body[1])
            else:
                text, mark = self._until_mark(final)
                sent += self._send(text)
                if mark is None:
                    break
                self._inside = mark == self._format.begin
        return Parsed(sent, tuple(calls))

    def _body(self, final: bool) -> tuple[str, str] | None:
        """The next call's body, and the text it is if it is no call; None: not complete. Leaves the call."""
        begin, end = str(self._format.begin), self._format.end
        limit = begin if end is None else end
        place = self._held.find(limit)
        if place < 0 and not final:
            return None
        body = self._held if place < 0 else self._held[:place]
        closing = end if end is not None and place >= 0 else ""
        self._held = self._held[len(body) + len(closing) :]
        self._inside = False
        return body, begin + body + closing

    def _until_mark(self, final: bool) -> tuple[str, str | None]:
        """The text before the next mark, and the mark; what may begin one is held."""
        places = [(self._held.find(mark), mark) for mark in self._marks if mark in self._held]
        if places:
            place, mark = min(places)
            text, self._held = self._held[:place], self._held[place + len(mark) :]
            return text, mark
        keep = 0 if final else max(partial_suffix(self._held, mark) for mark in self._marks)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text, None

    def _send(self, text: str) -> str:
        """Text that is part of the answer: white space before or between calls is not."""
        if not self._fresh:
            return text
        if not text.strip():
            if not self._after_call:
                self._spaces += text
            return ""
        spaces, self._spaces, self._fresh = self._spaces, "", False
        return text.lstrip() if self._after_call else spaces + text

    def _settle_whole(self, final: bool) -> Parsed:
        """Formats without marks: nothing is sent until it is clear that the text is no call."""
        bare = self._held.lstrip()
        for mark in self._format.skipped:
            bare = bare.removeprefix(mark).lstrip()
        may_be = not bare or bare[0] in "{[" or any(mark.startswith(bare) for mark in self._format.skipped)
        if self._fresh and may_be and not final:
            return Parsed("", ())
        calls = self._read(bare) if self._fresh and bare[:1] in ("{", "[") else []
        text, self._held, self._fresh = "" if calls else self._held, "", False
        return Parsed(text, tuple(calls))

    def _read(self, body: str) -> list[Call]:
        try:
            calls = self._format.read(body, self._tools)
        except (ValueError, RecursionError):
            return []
        return calls if all(call.name in self._tools for call in calls) else []


def call_schema(tools: Tools, most: int | None, key: str = "arguments") -> dict[str, object]:
    """The JSON schema of a list of calls, one at least; `key` is where a call's arguments stand."""
    items = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{name}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name in tools
    ]
    limit = {} if most is None else {"maxItems": most}
    schemas = {name: moved(schema, f"#/$defs/{name}") for name, schema in tools.items()}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": items}, "$defs": schemas}


def moved(schema: object, root: str) -> object:
    """The schema with its own references pointing to where it stands now."""
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value[:1] == "#"
            else moved(value, root)
            for key, value in schema.items()
        }
    return [moved(item, root) for item in schema] if isinstance(schema, list) else schema


COMPACT = {"x-guidance": {"whitespace_flexible": False}}


def auto_grammar(format: str, tools: Tools, strict: Collection[str], mark: Callable[[str], str]) -> str:
    """A grammar in Lark's syntax: any text, with calls in this format; arguments of strict tools follow their schemas.

    `mark` writes a mark of the format as Lark does: a special token by its id, other text as a string.
    """
    schemas = {
        name: {**(schema if name in strict else {"type": "object"}), **COMPACT} for name, schema in tools.items()
    }
    begin, end = FORMATS[format].begin, FORMATS[format].end
    if begin is None:
        key = "parameters" if format == "llama3_json" else "arguments"
        lists = json.dumps({**call_schema(schemas, None, key), **COMPACT})
        lines = ["start: calls | text", f"calls: %json {lists}", r"text: /([^\s\[{](.|\n)*)?/"]
        return "\n".join([LARK, *lines])
    bodies = []
    for name, schema in schemas.items():
        arguments = f"%json {json.dumps(schema)}"
        if format == "mistral":
            bodies.append(f"{json.dumps(name)} {mark('[ARGS]')} {arguments}")
        elif format == "deepseek":
            bodies.append(f"{json.dumps(name)} {mark(SEPARATOR)} {arguments} {mark(str(end))}")
        else:
            head = json.dumps(f'\n{{"name": "{name}", "arguments": ')
            bodies.append(f"{head} {arguments} {json.dumps('}' + chr(10))} {mark(str(end))}")
    skipped = " | ".join(mark(text) for text in FORMATS[format].skipped)
    free = f"(TEXT ({skipped}))* TEXT" if skipped else "TEXT"
    special = mark(begin).startswith("<[")
    lines = [f"start: call* {free}", "call: trigger body", "body: " + " | ".join(bodies), r"TEXT: /(.|\n)*/"]
    lines.append(f"trigger: {free} {mark(begin)}" if special else f"trigger[lazy]: TEXT {mark(begin)}")
    return "\n".join([LARK, *lines])
