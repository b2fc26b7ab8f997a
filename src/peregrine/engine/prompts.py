"""What callers of the offline interface pass, as lists of prompts and lists of token ids."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real

import numpy as np
from torch import Tensor

from peregrine.errors import RequestError

Prompt = str | Sequence[int] | Tensor | np.ndarray
Message = Mapping[str, object]

EXPECTED = "pass text, token ids, or a list of either"


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """A list of prompts from one or several: text is one prompt, and so are ids; a matrix has one in each row."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Tensor | np.ndarray):
        return [prompts] if prompts.ndim == 1 else list(checked(prompts))
    items = list(checked(prompts))
    if items and isinstance(items[0], Mapping):
        raise RequestError("prompts", items, "is a list of messages", "use llm.chat(messages)")
    return [items] if items and is_number(items[0]) else items


def token_ids(prompt: Prompt) -> list[int]:
    """The ids of a prompt that is not text; whether the model has them is checked at admission."""
    if isinstance(prompt, Tensor | np.ndarray):
        if prompt.ndim != 1:
            raise RequestError("prompt", prompt, f"has {prompt.ndim} dimensions", "pass a list of ids")
        prompt = prompt.tolist()
    return [token if type(token) is int else as_int(token) for token in checked(prompt)]


def as_conversations(messages: Sequence[Message] | Iterable[Sequence[Message]]) -> list[Sequence[Message]]:
    """A list of chats from one or several: a list of messages is one."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        problem = "is not a list of messages"
        raise RequestError("messages", messages, problem, 'pass [{"role": "user", "content": "..."}]')
    items: list = list(messages)  # type: ignore[type-arg]
    return [items] if not items or isinstance(items[0], Mapping) else items


def is_number(value: object) -> bool:
    """Whether this is one number, and so its list one prompt; numpy's and 0-dimensional tensors count."""
    return isinstance(value, Real) or (isinstance(value, Tensor | np.ndarray) and value.ndim == 0)


def as_int(value: object) -> int:
    """An id of another library as an int; anything else is left for admission to refuse by name."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        value = value.tolist()
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value  # type: ignore[return-value]


def checked(value: object) -> Iterable:  # type: ignore[type-arg]
    """The value, if its items can be prompts or ids."""
    if isinstance(value, bytes | bytearray):
        raise RequestError("prompt", value, "is bytes", "decode them to text")
    if isinstance(value, Mapping):
        chat = "role" in value
        raise RequestError(
            "prompt", value, "is a message" if chat else "is a mapping", "use llm.chat([message])" if chat else EXPECTED
        )
    if not isinstance(value, Iterable) or (isinstance(value, Tensor | np.ndarray) and value.ndim == 0):
        raise RequestError("prompt", value, f"is of the type {type(value).__name__}", EXPECTED)
    return value
