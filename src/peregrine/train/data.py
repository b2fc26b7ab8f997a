"""Text in, documents out: shards of UTF-8 text, a mixture over them, and a hold-out.

A shard is `name.txt` or `name.txt.xz`; a document ends with a line `<|endoftext|>`. Whether a document is
held out for validation depends on its text alone, so a copy of it in another shard is held out too.
"""

import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from peregrine.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
SUFFIXES = (".txt", ".txt.xz")
HELD_OUT_PER_MILLE = 10

# By tokens; a source takes every shard whose name starts with it.
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
    rewrite: Callable[[str], str | None] | None = None  # what becomes of a document; None drops it


def find_sources(folder: Path, shares: dict[str, float]) -> list[Source]:
    """The sources of a folder, shares normalised to 1; with no match, every shard by its size on disk."""
    shards = sorted(path for path in folder.glob("*") if path.name.endswith(SUFFIXES))
    if not shards:
        raise ConfigError(f"data={folder}: no {' or '.join(SUFFIXES)} file in it; give a folder of text shards")
    found = {name: tuple(p for p in shards if p.name.startswith(name)) for name in shares}
    weights = {name: shares[name] for name, paths in found.items() if paths}
    if not weights:
        found = {shard_name(path): (path,) for path in shards if not path.name.startswith("val_")}
        weights = {name: float(paths[0].stat().st_size) for name, paths in found.items()}
    total = sum(weights.values())
    return [Source(name, found[name], weight / total) for name, weight in weights.items()]


def shard_name(path: Path) -> str:
    """The shard's file name without its suffixes."""
    return path.name.removesuffix(".xz").removesuffix(".txt")


def read_documents(path: Path) -> Iterator[str]:
    """The documents of one shard in file order, without the end-of-text line and the newline before it."""
    lines: list[str] = []
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            if line.rstrip("\n") != END_OF_TEXT:
                lines.append(line)
                continue
            yield from _document(lines)
            lines = []
    yield from _document(lines)


def split_documents(source: Source) -> Iterator[tuple[str, bool]]:
    """(document as the source wants it, whether it is held out) in file order.

    The document as it was read decides on the hold-out, so no rewriting brings a held-out text into training.
    """
    for path in source.paths:
        for document in read_documents(path):
            text = document if source.rewrite is None else source.rewrite(document)
            if text is not None:
                yield text, held_out(document)


def held_out(document: str, per_mille: int = HELD_OUT_PER_MILLE) -> bool:
    """Whether the document belongs to the validation split."""
    digest = blake2b(document.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 1000 < per_mille


def sample_documents(source: Source, max_bytes: int) -> Iterator[str]:
    """Training documents spread over the source's shards, until about `max_bytes` of text."""
    total_bytes = 0
    for path in source.paths:
        total_bytes += sum(len(document) for document in read_documents(path))
    # Every document goes when there is too little; otherwise the hash picks them, not their place.
    kept_per_mille = min(1000, 1 + 1000 * max_bytes // max(total_bytes, 1))
    for path in source.paths:
        for document in read_documents(path):
            digest = blake2b(document.encode(), digest_size=8, person=b"sample").digest()
            if int.from_bytes(digest, "little") % 1000 < kept_per_mille and not held_out(document):
                yield document


def _document(lines: list[str]) -> Iterator[str]:
    text = "".join(lines).strip("\n")
    if text:
        yield text
