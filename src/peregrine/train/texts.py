"""Documents as they stand, to train a head on beside the target's own samples.

The target's distribution is the lesson whoever wrote the text, and documents cost no sampling. The samples stay
what they are for, the contexts that decoding really meets: they are repeated until they are a fair share.
"""

from collections.abc import Sequence

import numpy as np

from peregrine.errors import ConfigError
from peregrine.text.tokenizer import Tokenizer
from peregrine.train.prompts import Document, PromptBook
from peregrine.train.sampling import Samples
from peregrine.train.tokenizer import ASSISTANT

OWN_SHARE = 0.25  # of the tokens of an epoch, at least, are the target's own samples and their prompts


def gather_texts(book: PromptBook, tokenizer: Tokenizer, tokens: int, longest: int, seed: int) -> Samples:
    """Training documents of about so many tokens in all, sources mixed by their shares; each is used once at most."""
    generator = np.random.default_rng((seed, 2))
    rows: list[list[int]] = []
    firsts: list[int] = []
    for documents, share in zip(book.train, book.shares, strict=True):
        left = int(tokens * share)
        for index in generator.permutation(len(documents)):
            if left <= 0:
                break
            row, first = encode_text(documents[index], tokenizer, longest)
            if len(row) > first + 1:
                rows.append(row)
                firsts.append(first)
                left -= len(row)
    if not rows:
        raise ConfigError(f"text_tokens={tokens}: the data holds no whole texts; give .txt files")
    order = generator.permutation(len(rows))
    return pack_samples([rows[i] for i in order], [firsts[i] for i in order])


def encode_text(document: Document, tokenizer: Tokenizer, longest: int) -> tuple[list[int], int]:
    """(tokens, ended as the target ends; how many of them are a prompt)."""
    if document.messages is not None or document.ready:
        return [], 0
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    row = (tokenizer.encode(document.text) + end)[:longest]
    head, marker, _ = document.text.partition(f"{ASSISTANT}\n")
    return row, len(tokenizer.encode(head + marker)) if marker else 1


def pack_samples(rows: Sequence[Sequence[int]], prompt_lens: Sequence[int]) -> Samples:
    """Rows of tokens, one after the other."""
    starts = np.cumsum([0] + [len(row) for row in rows], dtype=np.int64)
    tokens = np.concatenate([np.array(row, dtype=np.int32) for row in rows])
    return Samples(tokens, starts, np.array(prompt_lens, dtype=np.int64))


def join(samples: Samples, texts: Samples | None) -> Samples:
    """One epoch: the texts, and the samples as often as it takes."""
    if texts is None:
        return samples
    wanted = OWN_SHARE / (1 - OWN_SHARE) * len(texts.tokens)
    repeats = max(1, round(wanted / len(samples.tokens)))
    parts = [samples] * repeats + [texts]
    lens = np.concatenate([np.diff(part.starts) for part in parts])
    return Samples(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([[0], np.cumsum(lens)]),
        np.concatenate([part.prompt_lens for part in parts]),
    )
