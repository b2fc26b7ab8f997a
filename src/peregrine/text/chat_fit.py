"""Chats fitted to a template: what it has no place for goes where it writes something.

A template that writes a part as it is gets it as it is.
"""

import hashlib
import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from peregrine.text.chat_parts import INSTRUCTIONS, CallForm, call_form, writes_first, writes_later, writes_results
from peregrine.text.chat_sandbox import Message
from peregrine.text.harmony import with_thinking
from peregrine.text.tokenizer import Tokenizer
from peregrine.text.tool_formats import HARMONY, Call, format_of, write_calls

CALLER = {"role": "assistant", "content": ""}  # of the calls after a message's first one
SHORT_ID = 9  # letters and digits


def fit_chat(chat: Sequence[Message], tokenizer: Tokenizer, source: str) -> Sequence[Message]:
    """The chat as the template `source` writes all of it."""
    if format_of(source) == HARMONY:
        chat = [with_thinking(message) for message in chat]
    if any(message["role"] in INSTRUCTIONS for message in chat):
        chat = place_instructions(chat, tokenizer, source)
    calls = [call for message in chat for call in calls_of(message)]
    if (calls or any(message["role"] == "tool" for message in chat)) and all(map(is_call, calls)):
        chat = place_calls(named_results(chat), tokenizer, source)
    return chat


def calls_of(message: Message) -> Sequence[Any]:
    """The calls of a message."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else ()


def is_call(call: object) -> bool:
    """Whether a call looks as OpenAI's do; what others mean is for the template to say."""
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def place_instructions(chat: Sequence[Message], tokenizer: Tokenizer, source: str) -> list[Message]:
    """System and developer messages where the template writes them, else in the message before or after them."""
    placed: list[list[Message]] = []  # those of one list become one message
    held: list[Message] = []  # for the next user message
    for message in chat:
        role = str(message["role"])
        if role == "developer" and not writes_first(tokenizer, source, role):
            role = "system"
        if role == "user":
            placed.append([*held, message])
            held = []
        elif role not in INSTRUCTIONS:
            placed.append([message])
        elif held or not writes_first(tokenizer, source, role):
            held.append(message)
        elif not placed or writes_later(tokenizer, source, role):
            placed.append([{**message, "role": role}])
        elif len(placed) == 1 and placed[0][0]["role"] == role:
            placed[0].append(message)
        else:
            held.append(message)
    if held and placed and placed[-1][-1]["role"] == "user":
        placed[-1] += held
    elif held:
        placed.append([{"role": "user", "content": joined(held)["content"]}])
    return list(map(joined, placed))


def joined(messages: Sequence[Message]) -> Message:
    """One message that says what these say: the user's if there is one, else the first."""
    if len(messages) == 1:
        return messages[0]
    base = next((message for message in reversed(messages) if message["role"] == "user"), messages[0])
    return {**base, "content": "\n\n".join(str(message["content"]) for message in messages)}


def named_results(chat: Sequence[Message]) -> list[Message]:
    """The chat with the tool's name in every result, where a call before it has the result's id."""
    names: dict[object, object] = {}
    told = []
    for message in chat:
        names |= {call["id"]: call["function"]["name"] for call in calls_of(message) if call.get("id")}
        name = names.get(message.get("tool_call_id"))
        told.append({"name": name, **message} if message["role"] == "tool" and name is not None else message)
    return told


def place_calls(chat: Sequence[Message], tokenizer: Tokenizer, source: str) -> list[Message]:
    """Calls and their results in the form in which the template writes them, else as text."""
    null = any(calls_of(message) and message["content"] is None for message in chat)
    form = call_form(tokenizer, source, null)
    if form is None:
        return calls_as_text(chat, format_of(source), writes_results(tokenizer, source))
    told = [in_form(message, form) for message in chat]
    return one_call_each(told) if form.single else told


def in_form(message: Message, form: CallForm) -> Message:
    """A message with calls, or with a result, in this form."""
    told = dict(message)
    if calls := calls_of(message):
        told["tool_calls"] = [spelled(call, form) for call in calls]
        told["content"] = message["content"] or (None if form.null_content else "")
    if "tool_call_id" in message:
        told["tool_call_id"] = id_in_form(message["tool_call_id"], form)
    return told


def spelled(call: dict[str, Any], form: CallForm) -> Message:
    """A call in this form."""
    read = as_text if form.text_arguments else as_json
    function = {**call["function"], "arguments": read(call["function"].get("arguments"))}
    return {**call, "function": function} | ({"id": id_in_form(call["id"], form)} if "id" in call else {})


def as_text(arguments: object) -> str:
    """Arguments as JSON text."""
    return arguments or "{}" if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def as_json(arguments: object) -> object:
    """Arguments as an object; what is no JSON stays text."""
    try:
        return json.loads(as_text(arguments)) if isinstance(arguments, str) else arguments or {}
    except (ValueError, RecursionError):
        return arguments


def id_in_form(id: object, form: CallForm) -> object:
    """An id of nine letters and digits for a template that takes no others, the same for the same id."""
    fits = not form.short_ids or not isinstance(id, str) or (len(id) == SHORT_ID and id.isalnum() and id.isascii())
    return id if fits else hashlib.sha256(str(id).encode()).hexdigest()[:SHORT_ID]


def one_call_each(chat: Sequence[Message]) -> list[Message]:
    """A message with several calls becomes one for each call, followed by that call's result."""
    told: list[Message] = []
    left = deque(chat)
    while left:
        message = left.popleft()
        calls = calls_of(message)
        if len(calls) < 2:
            told.append(message)
            continue
        results: dict[int, Message] = {}  # in their order
        waiting: dict[str, deque[int]] = {}  # their places, by the call's id; without one they are any call's
        while left and left[0]["role"] == "tool":
            waiting.setdefault(str(left[0].get("tool_call_id") or ""), deque()).append(len(results))
            results[len(results)] = left.popleft()
        for place, call in enumerate(calls):
            told.append({**message, "tool_calls": [call]} if place == 0 else {**CALLER, "tool_calls": [call]})
            own = [found for name in {"", str(call.get("id") or "")} if (found := waiting.get(name))]
            if own:
                told.append(results.pop(min(own, key=lambda found: found[0]).popleft()))
        told += results.values()
    return told


def calls_as_text(chat: Sequence[Message], format: str, keeps_results: bool) -> list[Message]:
    """Calls as the model writes them; results too are text, of a user, unless the template keeps them."""
    told: list[list[Message]] = []  # those of one list become one message
    after_result = False
    for message in chat:
        is_result = message["role"] == "tool" and not keeps_results
        if functions := [call["function"] for call in calls_of(message)]:
            text = write_calls(format, [Call(each["name"], as_text(each.get("arguments"))) for each in functions])
            rest = {name: value for name, value in message.items() if name != "tool_calls"}
            message = {**rest, "content": f"{message['content'] or ''}{text}"}
        elif is_result:
            said = f"Result of {message.get('name') or 'the tool'}: {message['content']}"
            message = {"role": "user", "content": said}
        if after_result and message["role"] == "user":
            told[-1].append(message)
        else:
            told.append([message])
        after_result = is_result
    return list(map(joined, told))
