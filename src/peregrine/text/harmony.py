"""Harmony, the answer format of gpt-oss: a list of messages, each in a channel.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.fly <|constrain|>json<|message|>{"to": "Oslo"}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

The prompt ends with <|start|>assistant. The channel analysis holds reasoning; a message with to=functions.NAME is a
tool call; all other messages are text for the user, commentary between calls included.
"""

import json
import re
from collections.abc import Callable, Collection
from functools import partial

from peregrine.text.chat_sandbox import Message
from peregrine.text.reasoning import split_settled
from peregrine.text.tool_arguments import JsonArguments
from peregrine.text.tool_formats import Tools
from peregrine.text.tool_stream import Parsed, Piece, add_piece
from peregrine.text.tools import COMPACT, LARK

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS_ANSWER = CALL, RETURN
OPENINGS = START, CHANNEL, MESSAGE, "to="  # a header begins with one of these
BREAKS = END, CALL, RETURN, START, CHANNEL  # a message lasts until the next of these
ANY_TEXT = r"TEXT: /(.|\n)*/"  # the grammar's terminal for a final message without constraints
MAX_HEADER = 256  # characters; anything longer is read as text
CHANNEL_NAME = re.compile(r"<\|channel\|>(\w+)")
FUNCTION = re.compile(r"(?:to=|functions\.)+([\w.-]+)")  # after the role or after the channel
HEADER_PART = re.compile(r"<\|(?:start|channel|constrain)\|>[\w.-]*|to=[\w.-]*")


class HarmonyStream:
    """Splits one answer into reasoning, text and tool calls; how its text is cut into pieces changes nothing."""

    def __init__(self, tools: Collection[str]) -> None:
        """`tools`: names that can be called; a message to any other function is reasoning or text, by its channel."""
        self._tools = tools
        self._held = ""  # text that may still belong to a header or a mark
        self._inside: str | None = None  # kind of the message being read: thought, text or call; None: in a header
        self._arguments = JsonArguments(0)  # of a call: marks in its strings are no marks
        self._begun = False  # part of this message has been sent
        self._sent = {"thought": False, "text": False}  # part of any message of this kind has been sent
        self._parts: dict[str, list[str]] = {}
        self._pieces: list[Piece] = []

    def push(self, text: str, final: bool = False) -> tuple[str, Parsed]:
        """Add text; returns (reasoning, text and calls) that are settled now. `final`: no more text comes."""
        self._held += text
        self._parts, self._pieces = {"thought": [], "text": []}, []
        while self._read_header(final) if self._inside is None else self._read_message(final):
            pass
        if final:
            self._close()
        return "".join(self._parts["thought"]), Parsed("".join(self._parts["text"]), tuple(self._pieces))

    def _read_header(self, final: bool) -> bool:
        """Read a header up to its message; False if more text is needed."""
        bare = self._held.lstrip()
        if not any(bare.startswith(mark) for mark in OPENINGS):
            if not final and any(mark.startswith(bare) for mark in OPENINGS):
                return False
            self._inside, self._held = "text", self._held if bare else ""  # a message without a header
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
        self._arguments = JsonArguments(0)
        if function and function[1] in self._tools:
            self._inside = "call"
            add_piece(self._pieces, Piece(function[1], ""))

    def _read_message(self, final: bool) -> bool:
        """Send the message's text up to its end; False if the end has not come yet."""
        is_call = self._inside == "call"
        find = partial(self._arguments.find, text=self._held) if is_call else self._held.find
        places = [(place, mark) for mark in BREAKS if (place := find(mark)) >= 0]
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
            self._arguments.feed(text, False)
            add_piece(self._pieces, Piece(None, text))
        elif self._inside is not None:
            first = not self._begun and self._sent[self._inside]  # a further message begins on a new line
            self._parts[self._inside].append(f"\n{text}" if first else text)
            self._sent[self._inside] = True
        self._begun = True


def with_thinking(message: Message) -> Message:
    """A message with its thoughts where the template reads them: with a call it takes one text, as a thought."""
    texts = [message.get("thinking") or message.get("reasoning_content") or message.get("reasoning")]
    if message.get("tool_calls"):
        message, texts = {**message, "content": ""}, [*texts, message["content"]]
    return {**message, "thinking": "\n".join(map(str, filter(None, texts)))} if any(texts) else message


def harmony_grammar(calls: Tools, answer: str | None, mark: Callable[[str], str]) -> str:
    """A grammar in Lark's syntax: any reasoning and commentary, then one of these calls or a final message.

    `answer` is the Lark rule or terminal of the final message; None if there must be a call. `mark` writes a mark in
    Lark's syntax: a special token by its id, other text as a string.
    """
    start, channel, constrain, message, end = map(mark, (START, CHANNEL, CONSTRAIN, MESSAGE, END))
    last = [] if answer is None else [f'"final" {message} {answer.partition(":")[0]}']
    for name, schema in calls.items():
        to = json.dumps(f"commentary to=functions.{name} ")
        last.append(f'{to} {constrain} "json" {message} %json {json.dumps({**schema, **COMPACT})}')
    note = f'{channel} ("analysis" | "commentary") {message} TEXT {end} {start} "assistant"'
    lines = [LARK, f"start: note* {channel} last", f"note: {note}", f"last: {' | '.join(last)}", ANY_TEXT]
    return "\n".join(lines if answer in (None, ANY_TEXT) else [*lines, str(answer)])
