"""Calls of earlier turns and their results, in the form in which a template writes them, or as text."""

import contextlib
import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from peregrine.text.chat_parts import (
    ANY_IDS,
    NAMED,
    NINE,
    TEXT_BEFORE,
    TEXT_BESIDE,
    CallForm,
    call_form,
    writes_results,
)
from peregrine.text.chat_sandbox import Message
from peregrine.text.tokenizer import Tokenizer
from peregrine.text.tool_formats import Call, format_of, write_calls

CALLER = {"role": "assistant", "content": ""}  # of the calls after a message's first one
SHORT_ID = 9  # letters and digits


def joined(messages: Sequence[Message]) -> Message:
    """One message that says what these say: the user's if there is one, else the first."""
    if len(messages) == 1:
        return messages[0]
    base = next((message for message in reversed(messages) if message["role"] == "user"), messages[0])
    return {**base, "content": "\n\n".join(str(message["content"]) for message in messages if message["content"])}


def calls_of(message: Message) -> Sequence[Any]:
    """The calls of a message."""
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else ()


def is_call(call: object) -> bool:
    """Whether a call looks as OpenAI's do; what others mean is for the template to say."""
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


@dataclass(frozen=True, slots=True)
class Turn:
    """A message, the result of each of its calls, and results behind it that belong to none."""

    message: Message
    results: Sequence[Message | None]
    others: Sequence[Message]

    @property
    def messages(self) -> list[Message]:
        """All of them, in their order."""
        return [self.message, *(result for result in self.results if result is not None), *self.others]


def turns_of(chat: Sequence[Message]) -> Iterator[Turn]:
    """The turns of a chat; a result has its call's name."""
    left = deque(chat)
    while left:
        message = left.popleft()
        calls = calls_of(message)
        if not calls:
            yield Turn(message, (), ())
            continue
        behind: dict[int, Message] = {}  # in their order
        waiting: dict[str, deque[int]] = {}  # their places, by the call's id; without one they are any call's
        while left and left[0]["role"] == "tool":
            waiting.setdefault(str(left[0].get("tool_call_id") or ""), deque()).append(len(behind))
            behind[len(behind)] = left.popleft()
        results: list[Message | None] = []
        for call in calls:
            own = [found for name in {"", str(call.get("id") or "")} if (found := waiting.get(name))]
            place = min(own, key=lambda found: found[0]).popleft() if own else None
            result = None if place is None else behind.pop(place)
            results.append(None if result is None else {"name": call["function"]["name"], **result})
        yield Turn(message, results, tuple(behind.values()))


def place_calls(chat: Sequence[Message], tokenizer: Tokenizer, source: str) -> list[Message]:
    """Calls and their results in the form in which the template writes them, else as text."""
    form = call_form(tokenizer, source)
    if form is None:
        ordered = [message for turn in turns_of(chat) for message in turn.messages]
        return calls_as_text(ordered, format_of(source), writes_results(tokenizer, source))
    ids, told = Ids(form.ids), list[Message]()
    for turn in turns_of(chat):
        told += in_form(turn, form, ids)
    return told


class Ids:
    """Ids of calls as a template takes them."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._count = 0
        self._known: dict[str, str] = {}

    def of_call(self, call: dict[str, Any]) -> dict[str, Any]:
        """A call, which is the chat's next one, with its id."""
        self._count += 1
        id = call.get("id")
        if self._kind == ANY_IDS or (self._kind == NINE and is_short(id)):
            return call
        text = str(id or "")
        told = (
            shortened(text or f"{self._count}")
            if self._kind == NINE
            else f"functions.{call['function']['name']}:{self._count - 1}"
        )
        self._known[text] = told
        return {**call, "id": told}

    def with_known(self, result: Message) -> Message:
        """A result with the id that its call has now; other messages as they are."""
        if result["role"] != "tool" or self._kind == ANY_IDS:
            return result
        id = result.get("tool_call_id")
        told = self._known.get(str(id or ""), id if self._kind == NAMED or is_short(id) else shortened(str(id)))
        return {**result, "tool_call_id": told}


def shortened(id: str) -> str:
    """Nine letters and digits, the same for the same id."""
    return hashlib.sha256(id.encode(errors="surrogatepass")).hexdigest()[:SHORT_ID]


def is_short(id: object) -> bool:
    """Whether an id has nine letters and digits."""
    return isinstance(id, str) and len(id) == SHORT_ID and id.isalnum() and id.isascii()


def in_form(turn: Turn, form: CallForm, ids: Ids) -> list[Message]:
    """The messages of a turn in this form."""
    others = [ids.with_known(other) for other in turn.others]
    if not turn.results:
        return [ids.with_known(turn.message), *others]
    told, nothing = list[Message](), None if form.null_content else ""
    said = turn.message["content"]
    has_text = isinstance(said, str) and (said.strip() or (said and form.text == TEXT_BESIDE))
    asks: dict[str, object] = {**turn.message, "content": said if has_text else nothing}
    if has_text and form.text == TEXT_BEFORE:
        told = [{name: value for name, value in asks.items() if name != "tool_calls"}]
        asks = {**CALLER, "content": nothing}
    calls, results = [], []
    for call, result in zip(calls_of(turn.message), turn.results, strict=True):
        calls.append(ids.of_call(spelled(call, form)))
        same_id = {"tool_call_id": calls[-1]["id"]} if calls[-1].get("id") else {}
        results.append([] if result is None else [{**result, **same_id}])
    if not form.single:
        return [*told, {**asks, "tool_calls": calls}, *chain.from_iterable(results), *others]
    messages: list[Message] = [asks, *({**CALLER, "content": nothing} for _ in calls[1:])]
    for message, call, own in zip(messages, calls, results, strict=True):
        told += [{**message, "tool_calls": [call]}, *own]
    return [*told, *others]


def spelled(call: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    """A call with its arguments in this form."""
    read = as_text if form.text_arguments else as_object
    return {**call, "function": {**call["function"], "arguments": read(call["function"].get("arguments"))}}


def as_text(arguments: object) -> str:
    """Arguments as JSON text."""
    if isinstance(arguments, str):
        return arguments if arguments.strip() else "{}"
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def as_object(arguments: object) -> object:
    """Arguments as an object; text that is none, such as JSON that was cut off, stands under a name."""
    read = arguments
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            read = json.loads(as_text(arguments))
    return {} if read is None else read if isinstance(read, dict) else {"arguments": arguments}


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
