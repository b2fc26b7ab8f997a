"""Prompts for benchmarks: four built-in sets, and JSONL files.

A line of a file is {"prompt": "..."} for text to be continued, or {"messages": [{"role": ..., "content": ...}, ...]}
for a chat.
"""

import json
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

from peregrine.errors import ConfigError, read_user_text

Prompt = str | list[dict[str, str]]  # text, or the messages of a chat

FOLDER = Path(__file__).parent
SETS = ("short-chat", "code", "summarise", "long")
SHAPE = 'a line is {"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}]}'
QUESTION = "Which of these notes is the most surprising, and why? Quote one sentence from it."


def load_prompts(file: Path | None, name: str) -> list[Prompt]:
    """The prompts of a file if one is given, else of the built-in set of that name."""
    if file is not None:
        return read_prompts(file)
    if name not in SETS:
        raise ConfigError(f"set={name!r}: no such set; choose one of {', '.join(SETS)}")
    return list(long_prompts()) if name == "long" else read_prompts(FOLDER / f"{name}.jsonl")


def read_prompts(file: Path) -> list[Prompt]:
    """Every prompt of a JSONL file; ConfigError names a line that holds none."""
    lines = read_user_text("prompts", file).split("\n")  # splitlines would also split at U+2028, inside a text
    prompts = [read_line(f"{file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"prompts={str(file)!r}: is empty; {SHAPE}")
    return prompts


def read_line(place: str, line: str) -> Prompt:
    """One prompt."""
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place}: is not JSON ({error}); {SHAPE}") from error
    match entry:
        case {"prompt": str(text)} if text:
            return text
        case {"messages": [_, *_] as messages} if all(map(is_message, messages)):
            return list(messages)
    raise ConfigError(f"{place}: {line[:60]!r} is not a prompt; {SHAPE}")


def is_message(entry: object) -> bool:
    """Whether this is a chat's message with a role and text."""
    return isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in ("role", "content"))


def long_prompts() -> Iterator[Prompt]:
    """All passages of the set `summarise`, rotated so that no two prompts share a prefix, then a question."""
    passages = [text.partition("\n\n")[2] for text in map(last_words, read_prompts(FOLDER / "summarise.jsonl"))]
    for first in range(len(passages)):
        order = [*passages[first:], *passages[:first]]
        notes = "\n\n".join(f"Note {number}. {text}" for number, text in enumerate(order, 1))
        yield [{"role": "user", "content": f"{notes}\n\n{QUESTION}"}]


def last_words(prompt: Prompt) -> str:
    """The prompt's text, or its last message."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def repeated(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, starting over when they run out."""
    return list(islice(cycle(prompts), count))
