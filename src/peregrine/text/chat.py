"""Chats as text, written by the checkpoint's own template.

Messages are checked, and fitted to the template where it has no place for a part of them.
"""

from collections.abc import Mapping, Sequence

from peregrine.errors import RequestError
from peregrine.text.chat_fit import fit_chat
from peregrine.text.chat_parts import needs_tools, writes_first
from peregrine.text.chat_sandbox import Message, run_template
from peregrine.text.tokenizer import Tokenizer


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True, **extra: object
) -> list[int]:
    """Token ids of a chat. No bos is added, since the template writes it."""
    return tokenizer.encode(render_chat(tokenizer, messages, add_generation_prompt, **extra), add_special=False)


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True, **extra: object
) -> str:
    """The text of a chat with its special tokens; `extra` (tools, enable_thinking, ...) goes to the template.

    Use `encode_chat` for ids: encoding this text as a plain prompt would add a second bos.
    """
    return write_chat(tokenizer, messages, None, {"add_generation_prompt": add_generation_prompt, **extra})


def write_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], source: str | None, extra: Mapping[str, object]
) -> str:
    """The text of a chat by the template `source`, or by the one that is for such chats, with these variables."""
    chat: Sequence[Message] = _plain_messages(messages)
    # Templates test these two for None, so they are always defined.
    given = {"tools": None, "documents": None, **{name: _plain(name, value) for name, value in extra.items()}}
    source = source or template_of(tokenizer, chat, with_tools=given["tools"] is not None)
    if given["tools"] is None and needs_tools(tokenizer, source):
        given["tools"] = []
    chat = fit_chat(chat, tokenizer, source)
    return run_template(tokenizer, source, chat, {"add_generation_prompt": True, **given})


def template_of(tokenizer: Tokenizer, chat: Sequence[Message], with_tools: bool) -> str:
    """The template for this chat: `tool_use`, if it is about tools and there is such a template, else `default`."""
    templates = tokenizer.chat_templates
    with_tools = with_tools or any(message.get("tool_calls") or message.get("role") == "tool" for message in chat)
    name = "tool_use" if with_tools and "tool_use" in templates else "default"
    if name not in templates:
        named = f"has only the chat templates {sorted(templates)}" if templates else "has no chat template"
        remedy = "send a plain prompt, or put the template in chat_template.jinja in the model's folder"
        raise RequestError("messages", chat, f"the model {named}", remedy)
    return templates[name]


def has_system_place(tokenizer: Tokenizer) -> bool:
    """Whether the template for ordinary chats writes system messages; True for a model without one."""
    return tokenizer.chat_template is None or writes_first(tokenizer, tokenizer.chat_template, "system")


def _plain_messages(messages: Sequence[Message]) -> list[Message]:
    """A checked copy of the messages; RequestError names the wrong message and field."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError("messages", messages, "is not a list", 'send [{"role": "user", "content": "..."}]')
    if not messages:
        raise RequestError("messages", messages, "is empty", "send at least one message")
    chat: list[Message] = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(field, message, "is not an object", 'send {"role": "user", "content": "..."}')
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise RequestError(f"{field}.role", role, "is not a role", "use system, user, assistant or tool")
        # A message with tool calls may have no content.
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RequestError(f"{field}.content", content, "is not a string", "send the text as one string")
        # Templates look for fields, so one that says nothing is left out, but for the content.
        given = {name: value for name, value in message.items() if value is not None}
        if not message.get("tool_calls"):
            given.pop("tool_calls", None)
        try:
            plain = {str(name): _plain(f"{field}.{name}", value) for name, value in given.items()}
        except RecursionError:
            raise RequestError(field, "...", "nests too deeply", "send flatter values") from None
        chat.append({"content": None, **plain})
    return chat


def _plain(field: str, value: object) -> object:
    """A deep copy of JSON-like data. Other objects are refused, because their methods would escape the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    try:
        if isinstance(value, Mapping):
            return {str(name): _plain(f".{name}", item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [_plain(f"[{index}]", item) for index, item in enumerate(value)]
    except RequestError as error:  # the field's whole name is made on the way out
        raise RequestError(f"{field}{error.field}", error.value, error.problem, error.remedy) from None
    raise RequestError(field, value, f"is a {type(value).__name__}", "send only what JSON can hold")
