"""Which parts of a chat a template writes, and in which form: found by rendering short chats with marks in them.

A template may refuse a part, fail at it, or drop it in silence; only trying shows what it does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from peregrine.errors import CheckpointError, RequestError
from peregrine.text.chat_sandbox import Message, run_template
from peregrine.text.tokenizer import Tokenizer

MARK = "Mark7319"  # a text that is looked for in a rendered chat
MARKS = "Mark2846", "Mark5071"  # of two calls and their results
INSTRUCTIONS = "system", "developer"  # roles
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}
LONG_IDS, SHORT_IDS = ("call_25dd1a8f6c0e4b", "call_6e93b0714fd2ac"), ("Call00001", "Call00002")


@dataclass(frozen=True, slots=True)
class CallForm:
    """What calls have to look like for a template."""

    null_content: bool  # a message that has nothing but calls has null as its content, not ""
    text_arguments: bool  # arguments are JSON text, not an object
    short_ids: bool  # ids have nine letters and digits
    single: bool  # a message has one call

    def call(self, name: str, arguments: dict[str, object], text: str, id: str) -> Message:
        """A call as the template takes it; `text` is its arguments as JSON."""
        function = {"name": name, "arguments": text if self.text_arguments else arguments}
        return {"id": id, "type": "function", "function": function}


@lru_cache(maxsize=64)
def writes_first(tokenizer: Tokenizer, source: str, role: str) -> bool:
    """Whether a template writes what a first message of this role says."""
    written = _written(tokenizer, source, [{"role": role, "content": MARK}, USER])
    # A template that fails at a plain user message has other needs: nothing follows for this role.
    return MARK in written or MARK not in _written(tokenizer, source, [{**USER, "content": MARK}])


@lru_cache(maxsize=64)
def writes_later(tokenizer: Tokenizer, source: str, role: str) -> bool:
    """Whether a template writes what a message of this role says in the midst of a chat, too."""
    if not writes_first(tokenizer, source, role):
        return False
    first, later = ({"role": role, "content": mark} for mark in MARKS)
    if MARKS[0] not in _written(tokenizer, source, [first, USER, ANSWER, USER]):
        return True  # nothing follows, as above
    written = _written(tokenizer, source, [first, USER, ANSWER, later, USER])
    return all(mark in written for mark in MARKS)


@lru_cache(maxsize=64)
def writes_tools(tokenizer: Tokenizer, source: str) -> bool:
    """Whether a template describes the tools that it is given."""
    return MARK in _written(tokenizer, source, [USER], [_tool(MARK)])


@lru_cache(maxsize=64)
def writes_results(tokenizer: Tokenizer, source: str) -> bool:
    """Whether a template writes what a tool's message says, even if it writes no calls."""
    result = {"role": "tool", "tool_call_id": LONG_IDS[0], "name": "fly", "content": MARK}
    return MARK in _written(tokenizer, source, [USER, ANSWER, result], [_tool("fly")])


@lru_cache(maxsize=64)
def call_form(tokenizer: Tokenizer, source: str, null_content: bool) -> CallForm | None:
    """The form of the calls that a template writes; None: it writes none in any form that is known.

    `null_content` is what messages with calls have, so it is tried first.
    """
    for empty, text, short in product((null_content, not null_content), (False, True), (False, True)):
        form = CallForm(empty, text, short, single=False)
        if _writes_calls(tokenizer, source, form, 1):
            many = _writes_calls(tokenizer, source, form, 2)
            return CallForm(empty, text, short, single=not many)
    return None


def _writes_calls(tokenizer: Tokenizer, source: str, form: CallForm, count: int) -> bool:
    """Whether a template writes this many calls and their results."""
    ids, marks = (SHORT_IDS if form.short_ids else LONG_IDS)[:count], MARKS[:count]
    names = [f"fly_{mark}" for mark in marks]  # the tool that is described has another one
    calls = [
        form.call(name, {"to": f"to_{mark}"}, f'{{"to": "to_{mark}"}}', id)
        for name, mark, id in zip(names, marks, ids, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": id, "name": name, "content": f"is_{mark}"}
        for name, mark, id in zip(names, marks, ids, strict=True)
    ]
    asks = {"role": "assistant", "content": None if form.null_content else "", "tool_calls": calls}
    written = _written(tokenizer, source, [USER, asks, *results], [_tool("fly")])
    return all(part + mark in written for mark in marks for part in ("fly_", "to_", "is_"))


def _tool(name: str) -> Message:
    to = {"type": "string", "description": "Where."}
    parameters = {"type": "object", "properties": {"to": to}, "required": ["to"]}
    return {"type": "function", "function": {"name": name, "description": "Fly.", "parameters": parameters}}


def _written(tokenizer: Tokenizer, source: str, chat: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
    """What the template writes for a chat; nothing if it refuses it."""
    try:
        return run_template(tokenizer, source, chat, tools=tools, documents=None, add_generation_prompt=True)
    except (RequestError, CheckpointError):
        return ""
