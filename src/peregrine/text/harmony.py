"""Harmony, the format of gpt-oss: an answer is messages in channels.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.fly <|constrain|>json<|message|>{"to": "Oslo"}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The prompt ends with <|start|>assistant. Thoughts are in the channel analysis; what is addressed to a function is a
call; the rest is for the user, the commentary between calls too.
"""

import json
import re
from collections.abc import Callable, Collection

from peregrine.text.reasoning import split_settled
from peregrine.text.tool_formats import Tools
from peregrine.text.tool_stream import Parsed, Piece, add_piece
from peregrine.text.tools import COMPACT, LARK

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS_ANSWER = CALL, RETURN
OPENINGS = START, CHANNEL, MESSAGE, "to="  # a header begins with one of these
BREAKS = END, CALL, RETURN, START, CHANNEL  # a message lasts until the next of these
ANY_TEXT = r"TEXT: /(.|\n)*/"  # as a final message
MAX_HEADER = 256  # characters; what is longer is no header
CHANNEL_NAME = re.compile(r"<\|channel\|>(\w+)")
FUNCTION = re.compile(r"(?:to=|functions\.)+([\w.-]+)")  # stands behind the role or the channel
HEADER_PART = re.compile(r"<\|(?:start|channel|constrain)\|>[\w.-]*|to=[\w.-]*")


class HarmonyStream:
    """Splits the text of one answer into thoughts, text and calls, the same however the text is cut."""

    def __init__(self, tools: Collection[str]) -> None:
        """What is addressed to a function that is not among these belongs to its channel."""
        self._tools = tools
        self._held = ""  # not settled yet
        self._inside: str | None = None  # what the message being read is: thought, text or call; None: in a header
        self._begun = False  # something of this message has been sent
        self._sent = {"thought": False, "text": False}  # something of any message has been
        self._parts: dict[str, list[str]] = {}
        self._pieces: list[Piece] = []

    def push(self, text: str, final: bool = False) -> tuple[str, Parsed]:
        """Add text; returns what is settled now, thoughts first: everything, if no more text comes."""
        self._held += text
        self._parts, self._pieces = {"thought": [], "text": []}, []
        while self._read_header(final) if self._inside is None else self._read_message(final):
            pass
        if final:
            self._close()
        return "".join(self._parts["thought"]), Parsed("".join(self._parts["text"]), tuple(self._pieces))

    def _read_header(self, final: bool) -> bool:
        """Read up to where a message begins; False: that needs more text."""
        bare = self._held.lstrip()
        if not any(bare.startswith(mark) for mark in OPENINGS):
            if not final and any(mark.startswith(bare) for mark in OPENINGS):
                return False
            self._inside, self._held = "text", self._held if bare else ""  # it has no header
            return bool(bare)
        place = bare.find(MESSAGE)
        if 0 <= place <= MAX_HEADER:
            self._open(bare[:place])
            self._held = bare[place + len(MESSAGE) :]
        elif final or len(bare) > MAX_HEADER + len(MESSAGE):
            shown = HEADER_PART.sub("", bare[:MAX_HEADER]).lstrip()
            self._inside, self._held = "text", shown + bare[MAX_HEADER:]
        else:
            return False
        return True

    def _open(self, header: str) -> None:
        channel, function = CHANNEL_NAME.search(header), FUNCTION.search(header)
        self._inside = "thought" if channel and channel[1] == "analysis" else "text"
        if function and function[1] in self._tools:
            self._inside = "call"
            add_piece(self._pieces, Piece(function[1], ""))

    def _read_message(self, final: bool) -> bool:
        """Send text up to the message's end; False: it has not come yet."""
        places = [(place, mark) for mark in BREAKS if (place := self._held.find(mark)) >= 0]
        if not places:
            settled, self._held = split_settled(self._held, BREAKS, final)
            self._send(settled)
            return False
        place, mark = min(places)
        self._send(self._held[:place])
        self._held = self._held[place if mark in OPENINGS else place + len(mark) :]
        self._close()
        return True

    def _close(self) -> None:
        if self._inside == "call" and not self._begun:
            self._send("{}")  # a function without arguments
        self._inside, self._begun = None, False

    def _send(self, text: str) -> None:
        if not text:
            return
        if self._inside == "call":
            add_piece(self._pieces, Piece(None, text))
        elif self._inside is not None:
            first = not self._begun and self._sent[self._inside]  # a message of its own begins a line
            self._parts[self._inside].append(f"\n{text}" if first else text)
            self._sent[self._inside] = True
        self._begun = True


def harmony_grammar(calls: Tools, answer: str | None, mark: Callable[[str], str]) -> str:
    """A grammar in Lark's syntax: any thoughts, then one of these calls, or a final message.

    `answer` defines the final message, as a rule or a terminal (None: there must be a call); `mark` writes a mark as
    Lark does: a special token by its id, other text as a string.
    """
    start, channel, constrain, message, end = map(mark, (START, CHANNEL, CONSTRAIN, MESSAGE, END))
    last = [] if answer is None else [f'"final" {message} {answer.partition(":")[0]}']
    for name, schema in calls.items():
        to = json.dumps(f"commentary to=functions.{name} ")
        last.append(f'{to} {constrain} "json" {message} %json {json.dumps({**schema, **COMPACT})}')
    note = f'{channel} ("analysis" | "commentary") {message} TEXT {end} {start} "assistant"'
    lines = [LARK, f"start: note* {channel} last", f"note: {note}", f"last: {' | '.join(last)}", ANY_TEXT]
    return "\n".join(lines if answer in (None, ANY_TEXT) else [*lines, str(answer)])
