"""The one reader of a checkpoint's small files, which may come from strangers.

A file is read if it is a regular file of a bounded size; JSON has a bounded depth. FIFOs and devices are never opened:
they would block, or never end. Every refusal is a CheckpointError that names the file and the remedy.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from peregrine.errors import CheckpointError

MAX_CONFIG_BYTES = 16 << 20
MAX_TOKENIZER_BYTES = 256 << 20  # the largest public ones are a tenth of it
MAX_TEMPLATE_BYTES = 1 << 20
MAX_DEPTH = 64  # of lists and objects inside each other
REMEDY = "download the checkpoint again"


def check_regular(path: Path) -> int:
    """Refuse what is not a regular file, links followed; a missing file is refused, too. Returns its size."""
    try:
        found = path.stat()
    except FileNotFoundError:
        raise CheckpointError(f"no {path.name} in {str(path.parent)!r}; give a folder in Hugging Face format") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is not a regular file; {REMEDY}")
    return found.st_size


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes."""
    size, content = check_regular(path), b""
    try:
        # What took the file's place since it was looked at does not block either.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            content = file.read(limit + 1 if size <= limit else 0)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    if max(size, len(content)) > limit:
        raise CheckpointError(f"{path} is larger than the {limit >> 20} MiB such a file may have; {REMEDY}")
    return content


def read_text(path: Path, limit: int = MAX_TEMPLATE_BYTES) -> str:
    """The text of a small UTF-8 file."""
    return _decoded(path, read_bytes(path, limit))


def read_object(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file."""
    return parse_object(path, read_text(path, limit))


def parse_object(path: Path, text: str) -> dict[str, Any]:
    """The JSON object in a file's text."""
    try:
        values = json.loads(text)
        if "\\ud" in text.lower():  # half of an escaped pair is a string that nothing can write
            json.dumps(values, ensure_ascii=False).encode()
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); {REMEDY}") from error
    except RecursionError:
        raise _too_deep(path) from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not an object; {REMEDY}")
    level: list[Any] = [values]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return values
        lists = [value.values() if type(value) is dict else value for value in level]
        level = [item for items in lists for item in items if type(item) in (dict, list)]
    raise _too_deep(path)


def _decoded(path: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text (byte {error.start}); {REMEDY}") from error


def _too_deep(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} nests lists and objects more than {MAX_DEPTH} deep; {REMEDY}")
