"""Chats fitted to a template: what it has no place for goes where it writes something.

A template that writes a part as it is gets it as it is.
"""

from collections.abc import Sequence

from peregrine.text.chat_calls import calls_of, is_call, joined, place_calls
from peregrine.text.chat_parts import INSTRUCTIONS, writes_alone, writes_first, writes_later
from peregrine.text.chat_sandbox import Message
from peregrine.text.harmony import with_thinking
from peregrine.text.tokenizer import Tokenizer
from peregrine.text.tool_formats import HARMONY, format_of

THOUGHTS = "reasoning", "reasoning_content"  # templates read the one or the other


def fit_chat(chat: Sequence[Message], tokenizer: Tokenizer, source: str) -> Sequence[Message]:
    """The chat as the template `source` writes all of it."""
    chat = [with_both_names(message) for message in chat]
    if format_of(source) == HARMONY:
        chat = [with_thinking(message) for message in chat]
    if any(message["role"] in INSTRUCTIONS for message in chat):
        chat = place_instructions(chat, tokenizer, source)
    calls = [call for message in chat for call in calls_of(message)]
    if (calls or any(message["role"] == "tool" for message in chat)) and all(map(is_call, calls)):
        chat = place_calls(chat, tokenizer, source)
    return chat


def with_both_names(message: Message) -> Message:
    """A message whose thoughts have both names."""
    thoughts = [message[name] for name in THOUGHTS if message.get(name)]
    return {**message, **dict.fromkeys(THOUGHTS, thoughts[0])} if len(thoughts) == 1 else message


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
        elif len(placed) == 1 and placed[0][0]["role"] in INSTRUCTIONS:
            placed[0].append(message)
        else:
            held.append(message)
    if held and placed and placed[-1][-1]["role"] == "user":
        placed[-1] += held
    elif held:
        placed.append([{"role": "user", "content": joined(held)["content"]}])
    told = list(map(joined, placed))
    if len(told) == 1 and told[0]["role"] in INSTRUCTIONS:
        alone = writes_alone(tokenizer, source, str(told[0]["role"]))
        return told if alone else [{**told[0], "role": "user"}]
    return told
