"""Splits generated text into plain text and tool calls.

The result depends on the text alone and never on how it was cut, so any number of tokens may come at once. A call is
recognised once its tool's name is complete and its arguments begin; these are passed on as they come, complete or not.
What looks like a call but does not get that far is passed on as text.
"""

from dataclasses import dataclass, replace

from peregrine.text.reasoning import split_settled
from peregrine.text.tool_arguments import Arguments, JsonArguments, TaggedArguments
from peregrine.text.tool_formats import FORMATS, Call, Tools, read_json

WHITE = " \n\r\t"
MAX_HEAD = 1024  # characters of what stands before a call's arguments, white space included
BETWEEN = f"{WHITE},;]`"  # may stand behind a call, and means nothing


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a call: the first has the tool's name; the arguments of all parts, joined, are the call's JSON."""

    name: str | None  # None: more arguments of the call before
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text turned out to be."""

    text: str
    pieces: tuple[Piece, ...]


def add_piece(pieces: list[Piece], piece: Piece) -> None:
    """Note a piece; more arguments of the call noted last are one piece with it."""
    if piece.name is None and pieces:
        last = pieces.pop()
        piece = replace(last, arguments=last.arguments + piece.arguments)
    if piece.name is not None or piece.arguments:
        pieces.append(piece)


class ToolStream:
    """Splits the text of one answer into text and calls.

    | text ... | begin | head | arguments | ... | end | white space | begin ...
      sent       held          sent         white space beside calls is dropped
    """

    def __init__(self, format: str, tools: Tools) -> None:
        """A call of a tool that is not among these is text."""
        self._format, self._tools = FORMATS[format], tools
        self._marks = [mark for mark in (self._format.begin, *self._format.skipped) if mark]
        self._held = ""  # not settled yet
        self._opening: str | None = None  # what stood before the body of calls that is being read; None: in text
        self._called = False  # this body has had a call
        self._hopeless = False  # no call begins where the body begins, or where its last call ended
        self._arguments: Arguments | None = None  # those that are being read
        self._fresh = True  # nothing but white space since the beginning or the last call
        self._after_call = False
        self._spaces = ""  # white space at the beginning, kept in case text follows
        self._text: list[str] = []
        self._pieces: list[Piece] = []

    def push(self, text: str, final: bool = False) -> Parsed:
        """Add text; returns what is settled now: everything, if no more text comes."""
        self._held += text
        self._text, self._pieces = [], []
        while self._read_text(final) if self._opening is None else self._read_body(final):
            pass
        return Parsed("".join(self._text), tuple(self._pieces))

    def _read_text(self, final: bool) -> bool:
        """Send text up to the next body of calls; False: there is none yet."""
        if self._format.begin is None:
            return self._read_bare_text(final)
        places = [(self._held.find(mark), mark) for mark in self._marks if mark in self._held]
        if not places:
            settled, self._held = split_settled(self._held, self._marks, final)
            self._send(settled)
            return False
        place, mark = min(places)
        self._send(self._held[:place])
        self._held = self._held[place + len(mark) :]
        if mark == self._format.begin:
            self._enter(mark, self._held)
        return True

    def _read_bare_text(self, final: bool) -> bool:
        """Formats without marks: nothing is sent until it is clear that the text is no call."""
        bare, may_be = self._held.lstrip(), False
        while True:
            may_be = may_be or any(mark.startswith(bare) for mark in self._format.skipped)
            mark = next((mark for mark in self._format.skipped if bare.startswith(mark)), None)
            if mark is None:
                break
            bare = bare.removeprefix(mark).lstrip()
        if len(self._held) - len(bare) > MAX_HEAD:
            may_be, self._fresh = False, False
        if self._fresh and bare[:1] in ("{", "["):
            self._enter(self._held[: len(self._held) - len(bare)], bare)
            return True
        if final or not (self._fresh and (may_be or not bare)):
            self._text.append(self._held)
            self._held, self._fresh = "", False
        return False

    def _enter(self, opening: str, body: str) -> None:
        self._opening, self._held, self._called, self._hopeless = opening, body, False, False

    def _read_body(self, final: bool) -> bool:
        """Read on in a body of calls; False: it needs more text."""
        limit = self._format.begin if self._format.end is None else self._format.end
        place = -1
        if limit is not None:
            place = self._held.find(limit) if self._arguments is None else self._arguments.find(limit, self._held)
        ended = final or place >= 0
        body, behind = self._held[:place], self._held[place:]
        if place < 0:
            body, behind = split_settled(self._held, [limit] if limit else [], final)
        if self._arguments is not None:
            more, rest = self._arguments.feed(body, ended)
            add_piece(self._pieces, Piece(None, more))
            self._held = rest + behind
            if self._arguments.done:
                self._arguments = None
                return True
            body = ""
        elif self._read_head(body, behind, place >= 0):
            return True
        if ended:
            closing = limit if limit is not None and limit == self._format.end and place >= 0 else ""
            self._held = behind[len(closing) :]
            self._leave(body, closing)
        return ended

    def _read_head(self, body: str, behind: str, ended: bool) -> bool:
        """Begin a call, if the body begins with one of a tool that is there; `ended`: `behind` is the body's end."""
        text = (body + behind if ended else body)[:MAX_HEAD]
        for head in () if self._hopeless else self._format.heads:
            found = head.pattern.match(text)
            if found and found[1] in self._tools:
                schema, inside = self._tools[found[1]], head.inside
                self._arguments = JsonArguments(inside) if isinstance(inside, int) else TaggedArguments(schema, inside)
                add_piece(self._pieces, Piece(found[1], ""))
                self._called = True
                self._held = body[found.end() :] + behind
                return True
        self._hopeless = self._hopeless or len(text) == MAX_HEAD
        return False

    def _leave(self, rest: str, closing: str) -> None:
        """Leave a body whose rest did not begin a call; it may hold calls that are written in another order."""
        shown = self._without_marks(rest) if self._called else f"{self._opening}{rest}{closing}"
        calls = self._read_whole(self._without_marks(rest, behind=True))
        for call in calls:
            add_piece(self._pieces, Piece(call.name, call.arguments))
        if self._called or calls:
            self._fresh = self._after_call = True
        self._opening, self._arguments = None, None
        if not calls:
            self._send(shown)

    def _without_marks(self, text: str, behind: bool = False) -> str:
        """A body without the marks before what is left of it, or also without those behind."""
        spaces, before = BETWEEN if self._called else WHITE, ""
        while before != text:
            before = text
            for mark in self._format.skipped:
                text = text.removeprefix(mark)
                text = text.removesuffix(mark) if behind else text
            text = text.strip(spaces) if behind else text.lstrip(spaces)
        return text

    def _read_whole(self, body: str) -> list[Call]:
        try:
            calls = read_json(body)
        except (ValueError, RecursionError):
            return []
        return calls if all(call.name in self._tools for call in calls) else []

    def _send(self, text: str) -> None:
        """Text that is part of the answer: white space before or between calls is not."""
        if not self._fresh:
            self._text.append(text)
        elif not text.strip():
            self._spaces += "" if self._after_call else text
        else:
            self._text.append(text.lstrip() if self._after_call else self._spaces + text)
            self._spaces, self._fresh = "", False
