"""Training documents: sources of text with their shares of the mixture, and the hold-out.

Text shards are `name.txt` or `name.txt.xz`; a document ends with a line `<|endoftext|>`. JSONL files hold one object
per line, with a "prompt" or with "messages" for the model's chat template. Whether a document is held out depends on
its text alone, so a copy in another shard is held out too.
"""

import json
import lzma
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from pathlib import Path

from peregrine.errors import ConfigError, read_user_text, reading_utf8, shown

END_OF_TEXT, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
SUFFIXES = (".txt", ".txt.xz")
HELD_OUT_PER_MILLE = 10

# Shares of training tokens; a source consists of the shards whose names start with its name.
MERLIN_SHARES = {
    "stories_tiny": 0.45,
    "chat_stories_tiny": 0.30,
    "chat_procedural": 0.18,
    "code_procedural": 0.04,
    "chat_format_math": 0.03,
}


@dataclass(frozen=True, slots=True)
class Source:
    """Shards that are mixed as one, and their share of the training tokens."""

    name: str
    paths: tuple[Path, ...]
    share: float
    rewrite: Callable[[str], str | None] | None = None  # replaces a document's text; None drops the document


@dataclass(frozen=True, slots=True)
class Document:
    """A text, or the messages of a chat. A `ready` text is a whole prompt, which must not be cut."""

    text: str
    key: str  # the text before any rewriting; it decides on the hold-out
    messages: tuple[dict[str, str], ...] | None = None
    ready: bool = False


def find_sources(folder: Path, shares: dict[str, float]) -> list[Source]:
    """The sources of a folder, shares normalised to 1. If no shard matches, each is a source, weighted by size."""
    shards = sorted(path for path in folder.glob("*") if path.name.endswith(SUFFIXES))
    if not shards:
        raise ConfigError(f"data={folder}: no {' or '.join(SUFFIXES)} file in it; give a folder of text shards")
    found = {name: tuple(path for path in shards if path.name.startswith(name)) for name in shares}
    weights = {name: shares[name] for name, paths in found.items() if paths}
    if not weights:
        found = {source_name(path): (path,) for path in shards if not path.name.startswith("val_")}
        weights = {name: float(paths[0].stat().st_size) for name, paths in found.items()}
    total = sum(weights.values())
    return [Source(name, found[name], weight / total) for name, weight in weights.items()]


def open_sources(data: Sequence[Path], shares: Sequence[float] | None, named: dict[str, float]) -> list[Source]:
    """One source per file, weighted by size unless shares are given; or the sources of a single folder."""
    if len(data) == 1 and data[0].is_dir():
        if shares is not None:
            raise ConfigError(f"shares={list(shares)}: {data[0]} is a folder; give files, one share each")
        return find_sources(data[0], named)
    if shares is not None and len(shares) != len(data):
        raise ConfigError(f"shares={list(shares)}: there are {len(data)} files; give one share for each")
    for path in data:
        if not path.is_file():
            raise ConfigError(f"data={path}: no such file; give text or JSONL files, or one folder of text files")
        if not path.name.endswith((*SUFFIXES, ".jsonl")):
            raise ConfigError(f"data={path}: is not {', '.join(SUFFIXES)} or .jsonl")
    weights = list(shares) if shares is not None else [float(path.stat().st_size) for path in data]
    if shares is None and not sum(weights):
        raise ConfigError(f"data={', '.join(map(str, data))}: empty; give files with text")
    if not 0 < sum(weights) < math.inf or min(weights) < 0:
        raise ConfigError(f"shares={weights}: must be numbers, not negative and not all zero")
    pairs = zip(data, weights, strict=True)
    return [Source(source_name(path), (path,), weight / sum(weights)) for path, weight in pairs]


def source_name(path: Path) -> str:
    """The file name without its suffixes."""
    return path.name.removesuffix(".xz").removesuffix(".txt").removesuffix(".jsonl")


def read_source(source: Source) -> Iterator[Document]:
    """The documents of a source in file order, rewritten if the source says so."""
    for path in source.paths:
        if path.suffix == ".jsonl":
            for number, line in enumerate(read_user_text("data", path).split("\n"), start=1):
                if line.strip():
                    yield _parse(line, f"{path}, line {number}")
            continue
        for document in read_texts(path):
            text = document if source.rewrite is None else source.rewrite(document)
            if text is not None:
                yield Document(text, document)


def read_texts(path: Path) -> Iterator[str]:
    """The texts of one shard in file order, without the end-of-text line and the newline before it."""
    lines: list[str] = []
    opener = lzma.open if path.suffix == ".xz" else open
    with _unpacking(path), reading_utf8(f"data={str(path)!r}"), opener(path, "rt", encoding="utf-8") as stream:
        for line in chain(stream, [END_OF_TEXT]):
            if line.rstrip("\n") != END_OF_TEXT:
                lines.append(line)
                continue
            if text := "".join(lines).strip("\n"):
                yield text
            lines = []


@contextmanager
def _unpacking(path: Path) -> Iterator[None]:
    try:
        yield
    except (lzma.LZMAError, EOFError) as error:
        raise ConfigError(f"data={path}: is not a whole .xz file ({error}); compress its text again") from error


def held_out(key: str, per_mille: int = HELD_OUT_PER_MILLE) -> bool:
    """Whether a document belongs to the validation split."""
    return _hash_per_mille(key) < per_mille


def sample_texts(source: Source, max_bytes: int) -> Iterator[str]:
    """Training texts, chosen by hash from all shards of the source, about `max_bytes` in all."""
    total_bytes = sum(len(text) for path in source.paths for text in read_texts(path))
    per_mille = min(1000, 1 + 1000 * max_bytes // max(total_bytes, 1))
    for path in source.paths:
        for text in read_texts(path):
            if _hash_per_mille(text, b"sample") < per_mille and not held_out(text):
                yield text


def _hash_per_mille(text: str, person: bytes = b"") -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8, person=person).digest(), "little") % 1000


def _parse(line: str, place: str) -> Document:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"data={place}: is not JSON ({error}); one object a line") from error
    if isinstance(fields, dict) and isinstance(fields.get("prompt"), str):
        return Document(fields["prompt"], fields["prompt"], ready=True)
    messages = fields.get("messages") if isinstance(fields, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f'data={place}: has neither "prompt" nor "messages"')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f'data={place}: a message is {{"role": ..., "content": ...}}, not {shown(message)}')
    # The target writes the last assistant turn itself.
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ConfigError(f"data={place}: holds no user's turn; give chats that begin with one")
    return Document("", json.dumps(messages), tuple(messages))
