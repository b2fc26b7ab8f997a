"""Prompts for sampling from a target: the openings of documents, and chats up to the assistant's turn.

Text files hold documents that end with `<|endoftext|>`; a document with an `<|assistant|>` line is a chat and is
cut after one. JSONL files hold an object a line, with a "prompt" or with "messages" for the model's template.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from peregrine.errors import ConfigError
from peregrine.text.chat import encode_chat
from peregrine.text.tokenizer import Tokenizer
from peregrine.train.data import SUFFIXES, Source, find_sources, held_out, read_documents, shard_name
from peregrine.train.tokenizer import ASSISTANT

MAX_DOCUMENTS = 400_000  # of one source
MAX_USES = 8  # of one document, as prompts that differ in length, temperature and seed
MIN_DOCUMENTS = 16
SHORTEST_OPENING, OPENING_CHARACTERS = 4, 400
HELD_OUT_PER_MILLE = (10, 20, 50, 100, 200)  # the first that gives enough prompts to measure on


@dataclass(frozen=True, slots=True)
class Document:
    """What one prompt is made from; `messages` are a chat, and a `ready` text is a prompt as it stands."""

    text: str
    key: str  # the text as it was read; it decides on the hold-out
    messages: tuple[dict[str, str], ...] | None = None
    ready: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue, and the source they came from."""

    source: str
    tokens: list[int]


class PromptBook:
    """The documents of every source, split into those to train on and those to measure on."""

    def __init__(self, sources: Sequence[Source], num_held_out: int) -> None:
        """Reads the sources; refuses what is too little to train and to measure on."""
        self.shares = [source.share for source in sources]
        self.names = [source.name for source in sources]
        everything = [read_source(source) for source in sources]
        total = sum(map(len, everything))
        if total < MIN_DOCUMENTS:
            raise ConfigError(f"data: {total} documents; give at least {MIN_DOCUMENTS}, better thousands")
        for per_mille in HELD_OUT_PER_MILLE:
            kept = [[d for d in documents if held_out(d.key, per_mille)] for documents in everything]
            if sum(map(len, kept)) >= num_held_out:
                break
        self.held_out = kept
        self.train = [[d for d in documents if not held_out(d.key, per_mille)] for documents in everything]
        if not any(self.held_out):
            raise ConfigError(f"data: none of {total} documents is held out to measure on; give more text")

    def check(self, num_prompts: int, tokens: int) -> None:
        """Refuses to ask more prompts of the documents than they have to give."""
        count = sum(map(len, self.train))
        if num_prompts > MAX_USES * count:
            raise ConfigError(
                f"tokens={tokens}: needs about {num_prompts} prompts, and {count} documents give {MAX_USES * count}; "
                f"give more text, or ask for at most {tokens * MAX_USES * count // num_prompts} tokens"
            )

    def prompts(self, tokenizer: Tokenizer, count: int, longest: int, seed: int, *, train: bool) -> list[Prompt]:
        """So many prompts, sources mixed by their shares, a function of the documents and the seed."""
        generator = np.random.default_rng((seed, int(train)))
        documents = self.train if train else self.held_out
        shares = np.array([share if found else 0.0 for share, found in zip(self.shares, documents, strict=True)])
        orders = [generator.permutation(len(found)) for found in documents]
        taken = [0] * len(documents)
        prompts: list[Prompt] = []
        failures = 0
        while len(prompts) < count and failures <= 10 * count + 100:
            source = int(generator.choice(len(documents), p=shares / shares.sum()))
            order = orders[source]
            document = documents[source][order[taken[source] % len(order)]]
            taken[source] += 1
            tokens = prompt_tokens(document, tokenizer, longest, generator)
            if tokens:
                prompts.append(Prompt(self.names[source], tokens))
            else:
                failures += 1
        if not prompts:
            raise ConfigError(f"prompt_tokens={longest}: no document gives a prompt of at most that length; raise it")
        return prompts


def prompt_tokens(
    document: Document, tokenizer: Tokenizer, longest: int, generator: np.random.Generator
) -> list[int] | None:
    """The document's prompt, or None if it is longer than `longest` and may not be cut."""
    if document.messages is not None:
        tokens = encode_chat(tokenizer, document.messages)
    elif document.ready:
        tokens = tokenizer.encode(document.text)
    elif f"{ASSISTANT}\n" in document.text:
        turns = document.text.split(f"{ASSISTANT}\n")
        answered = int(generator.integers(1, len(turns)))
        tokens = tokenizer.encode(f"{ASSISTANT}\n".join(turns[:answered]) + f"{ASSISTANT}\n")
    else:
        tokens = tokenizer.encode(document.text[:OPENING_CHARACTERS])
        # Half of a short text is left for the model to write.
        most = max(1, min(longest, len(tokens) // 2))
        return tokens[: int(generator.integers(min(SHORTEST_OPENING, most), most + 1))] or None
    return tokens if 0 < len(tokens) <= longest else None


def open_sources(data: Sequence[Path], shares: Sequence[float] | None, named: dict[str, float]) -> list[Source]:
    """A source for each file, by size unless shares are given; a folder gives the sources found in it."""
    if len(data) == 1 and data[0].is_dir():
        if shares is not None:
            raise ConfigError(f"shares={list(shares)}: {data[0]} is a folder; give files, one share each")
        return find_sources(data[0], named)
    if shares is not None and len(shares) != len(data):
        raise ConfigError(f"shares={list(shares)}: there are {len(data)} files; give one share for each")
    for path in data:
        if not path.is_file():
            raise ConfigError(f"data={path}: no such file; give text or JSONL files, or one folder of them")
        if not path.name.endswith((*SUFFIXES, ".jsonl")):
            raise ConfigError(f"data={path}: is not {', '.join(SUFFIXES)} or .jsonl")
    weights = list(shares) if shares is not None else [float(path.stat().st_size) for path in data]
    if sum(weights) <= 0 or min(weights) < 0:
        raise ConfigError(f"shares={weights}: must not be negative, nor all zero")
    return [
        Source(shard_name(path).removesuffix(".jsonl"), (path,), weight / sum(weights))
        for path, weight in zip(data, weights, strict=True)
    ]


def read_source(source: Source) -> list[Document]:
    """The documents of a source, up to a limit."""
    return list(islice((d for path in source.paths for d in _read(path, source)), MAX_DOCUMENTS))


def _read(path: Path, source: Source) -> Iterator[Document]:
    if path.suffix != ".jsonl":
        for read in read_documents(path):
            text = read if source.rewrite is None else source.rewrite(read)
            if text is not None:
                yield Document(text, read)
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            yield _parse(line, f"{path}, line {number}")


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
    # The target shall say the last turn itself.
    while messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ConfigError(f"data={place}: holds no user's turn; give chats that begin with one")
    return Document("", json.dumps(messages), tuple(messages))
