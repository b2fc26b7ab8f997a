"""Which parts of a chat a template writes, and in which form: found by rendering short chats with marks in them.

A template may refuse a part, fail at it, or drop it in silence; only trying shows what it does.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from peregrine.errors import CheckpointError, RequestError
from peregrine.text.chat_sandbox import Message, run_template
from peregrine.text.tokenizer import Tokenizer

MARK = "Mark7319"  # a text that is looked for in a rendered chat
MARKS = "Mark2846", "Mark5071"  # of two calls and their results
INSTRUCTIONS = "system", "developer"  # roles
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}
# Ids as OpenAI's clients have them, as Mistral's templates want them, and as Kimi's models write them.
ANY_IDS, NINE, NAMED = "any", "nine letters and digits", "functions.name:number"
PROBED_IDS = {
    ANY_IDS: ("call_25dd1a8f6c0e4b", "call_6e93b0714fd2ac"),
    NINE: ("Call00001", "Call00002"),
    NAMED: tuple(f"functions.fly_{mark}:{number}" for number, mark in enumerate(MARKS)),
}
TEXT_BESIDE, TEXT_BEFORE, NO_TEXT = "in the message of the calls", "in a message before", "nowhere"


@dataclass(frozen=True, slots=True)
class CallForm:
    """What messages with calls have to look like for a template."""

    null_content: bool  # without text the content is null, not ""
    text_arguments: bool  # arguments are JSON text, not an object
    ids: str
    text: str  # where it writes what an assistant says beside calls
    single: bool  # a message has one call


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
def writes_alone(tokenizer: Tokenizer, source: str, role: str) -> bool:
    """Whether a template writes a chat that is one message of this role."""
    return MARK in _written(tokenizer, source, [{"role": role, "content": MARK}])


@lru_cache(maxsize=64)
def writes_tools(tokenizer: Tokenizer, source: str) -> bool:
    """Whether a template describes the tools that it is given."""
    return MARK in _written(tokenizer, source, [USER], [_tool(MARK)])


@lru_cache(maxsize=64)
def takes_tools(tokenizer: Tokenizer, source: str) -> bool:
    """Whether a template that is given tools writes the chat."""
    return MARK in _written(tokenizer, source, [{**USER, "content": MARK}], [_tool("fly")])


@lru_cache(maxsize=64)
def needs_tools(tokenizer: Tokenizer, source: str) -> bool:
    """Whether a template writes chats only with a list of tools, which may be empty."""
    chat = [{**USER, "content": MARK}]
    return MARK not in _tried(tokenizer, source, chat, None) and MARK in _tried(tokenizer, source, chat, [])


@lru_cache(maxsize=64)
def writes_results(tokenizer: Tokenizer, source: str) -> bool:
    """Whether a template writes what a tool's message says, even if it writes no calls."""
    result = {"role": "tool", "tool_call_id": PROBED_IDS[ANY_IDS][0], "name": "fly", "content": MARK}
    return MARK in _written(tokenizer, source, [USER, ANSWER, result], [_tool("fly")])


@lru_cache(maxsize=64)
def call_form(tokenizer: Tokenizer, source: str) -> CallForm | None:
    """The form of the calls that a template writes; None: it writes none in any form that is known."""
    for as_text, ids in product((False, True), PROBED_IDS):
        forms = [CallForm(null, as_text, ids, TEXT_BESIDE, single=False) for null in (False, True)]
        written = [(len(text), form) for form in forms if (text := _with_calls(tokenizer, source, form, 1))]
        if written:
            # A template that writes both writes too much for one of them: "None", or a turn that says nothing.
            form = min(written, key=lambda found: found[0])[1]
            for place in (TEXT_BESIDE, TEXT_BEFORE, NO_TEXT):
                form = replace(form, text=place)
                if place == NO_TEXT or _with_calls(tokenizer, source, form, 1, said=MARK):
                    break
            return replace(form, single=not _with_calls(tokenizer, source, form, 2))
    return None


def _with_calls(tokenizer: Tokenizer, source: str, form: CallForm, count: int, said: str = "") -> str:
    """What a template writes for this many calls and their results; nothing unless all of it is there."""
    marks, ids = MARKS[:count], PROBED_IDS[form.ids]
    calls, results = [], []
    for mark, id in zip(marks, ids, strict=False):
        arguments = {"to": f"to_{mark}"}
        given = json.dumps(arguments) if form.text_arguments else arguments
        # The call's name is neither the described tool's nor the result's, which a template may write, too.
        calls.append({"id": id, "type": "function", "function": {"name": f"fly_{mark}", "arguments": given}})
        results.append({"role": "tool", "tool_call_id": id, "name": "fly", "content": f"is_{mark}"})
    asks = {"role": "assistant", "content": None if form.null_content else "", "tool_calls": calls}
    before: list[Message] = [USER]
    if said and form.text == TEXT_BEFORE:
        before.append({**ANSWER, "content": said})
    elif said:
        asks["content"] = said
    # A plain message before calls may break the order of roles that a template insists on; later turns show that.
    behind = [ANSWER, USER] if len(before) > 1 else []
    written = _written(tokenizer, source, [*before, asks, *results, *behind], [_tool("fly")])
    parts = [said, *(part + mark for mark in marks for part in ("fly_", "to_", "is_"))]
    return written if all(part in written for part in parts) else ""


def _tool(name: str) -> Message:
    to = {"type": "string", "description": "Where."}
    parameters = {"type": "object", "properties": {"to": to}, "required": ["to"]}
    return {"type": "function", "function": {"name": name, "description": "Fly.", "parameters": parameters}}


def _written(tokenizer: Tokenizer, source: str, chat: Sequence[Message], tools: Sequence[Message] | None = None) -> str:
    """What the template writes for a chat; nothing if it refuses it. Without tools some want an empty list of them."""
    return _tried(tokenizer, source, chat, tools) or ("" if tools else _tried(tokenizer, source, chat, []))


def _tried(tokenizer: Tokenizer, source: str, chat: Sequence[Message], tools: Sequence[Message] | None) -> str:
    try:
        return run_template(tokenizer, source, chat, {"tools": tools, "documents": None, "add_generation_prompt": True})
    except (RequestError, CheckpointError):
        return ""
