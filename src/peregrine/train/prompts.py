"""What a head is trained on: prompts for the target to continue, and whole documents.

A prompt is the opening of a document, or a chat up to an assistant turn. Documents can be trained on as they are,
because the target's distribution is the label whatever the text; they cost no sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from peregrine.errors import ConfigError
from peregrine.text.chat import encode_chat
from peregrine.text.tokenizer import Tokenizer
from peregrine.train.documents import ASSISTANT, Document, Source, held_out, read_source
from peregrine.train.samples import Samples

MAX_DOCUMENTS = 400_000  # of one source
MAX_USES = 8  # of one document, as prompts that differ in length, temperature and seed
MIN_DOCUMENTS = 16
SHORTEST_OPENING, OPENING_CHARACTERS = 4, 400
HELD_OUT_PER_MILLE = (10, 20, 50, 100, 200)  # the first that gives enough prompts to evaluate on


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue, and the name of their source."""

    source: str
    tokens: list[int]


class PromptBook:
    """The documents of every source, split into training and held-out ones."""

    def __init__(self, sources: Sequence[Source], num_held_out: int) -> None:
        """Read the sources; refuse too little text to train and evaluate on."""
        self.shares = [source.share for source in sources]
        self.names = [source.name for source in sources]
        everything = [list(islice(read_source(source), MAX_DOCUMENTS)) for source in sources]
        total = sum(map(len, everything))
        if total < MIN_DOCUMENTS:
            raise ConfigError(f"data: {total} documents; give at least {MIN_DOCUMENTS}, better thousands")
        for per_mille in HELD_OUT_PER_MILLE:
            self.held_out = [[d for d in documents if held_out(d.key, per_mille)] for documents in everything]
            if sum(map(len, self.held_out)) >= num_held_out:
                break
        self.train = [[d for d in documents if not held_out(d.key, per_mille)] for documents in everything]
        if not any(self.held_out):
            raise ConfigError(f"data: none of {total} documents is held out to measure on; give more text")

    def check(self, num_prompts: int, tokens: int) -> None:
        """Refuse more prompts than the documents can give."""
        count = sum(map(len, self.train))
        if num_prompts > MAX_USES * count:
            raise ConfigError(
                f"tokens={tokens}: needs about {num_prompts} prompts, and {count} documents give {MAX_USES * count}; "
                f"give more text, or ask for at most {tokens * MAX_USES * count // num_prompts} tokens"
            )

    def prompts(self, tokenizer: Tokenizer, count: int, longest: int, seed: int, *, train: bool) -> list[Prompt]:
        """`count` prompts of at most `longest` tokens, mixed by share; a function of documents and seed."""
        generator = np.random.default_rng((seed, int(train)))
        documents, split = (self.train, "training") if train else (self.held_out, "held-out")
        shares = np.array([share if found else 0.0 for share, found in zip(self.shares, documents, strict=True)])
        if not shares.sum():
            raise ConfigError(f"shares={list(self.shares)}: files with a share hold no {split} documents; give others")
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

    def texts(self, tokenizer: Tokenizer, tokens: int, longest: int, seed: int) -> Samples:
        """About `tokens` tokens of whole training documents, mixed by share, each used at most once."""
        generator = np.random.default_rng((seed, 2))
        rows: list[list[int]] = []
        prompt_lens: list[int] = []
        for documents, share in zip(self.train, self.shares, strict=True):
            left = int(tokens * share)
            for index in generator.permutation(len(documents)):
                if left <= 0:
                    break
                row, prompt_len = encode_text(documents[index], tokenizer, longest)
                if len(row) > prompt_len + 1:
                    rows.append(row)
                    prompt_lens.append(prompt_len)
                    left -= len(row)
        if not rows:
            raise ConfigError(f"text_tokens={tokens}: the data holds no whole texts; give .txt files")
        order = generator.permutation(len(rows))
        return Samples.pack([rows[i] for i in order], [prompt_lens[i] for i in order])


def prompt_tokens(
    document: Document, tokenizer: Tokenizer, longest: int, generator: np.random.Generator
) -> list[int] | None:
    """The document's prompt, or None if it is longer than `longest` and must not be cut."""
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
        most = max(1, min(longest, len(tokens) // 2))  # half of a short text is left for the target to write
        return tokens[: int(generator.integers(min(SHORTEST_OPENING, most), most + 1))] or None
    return tokens if 0 < len(tokens) <= longest else None


def encode_text(document: Document, tokenizer: Tokenizer, longest: int) -> tuple[list[int], int]:
    """(tokens with the end-of-text token, cut to `longest`; number of prompt tokens). Prompts and chats: ([], 0)."""
    if document.messages is not None or document.ready:
        return [], 0
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    row = (tokenizer.encode(document.text) + end)[:longest]
    head, marker, _ = document.text.partition(f"{ASSISTANT}\n")
    return row, len(tokenizer.encode(head + marker)) if marker else 1
