"""A vocabulary of any size, for benchmarks of shapes: what a grammar's mask costs follows from it."""

import json
import random
from dataclasses import replace

from tokenizers import Tokenizer as Backend

from peregrine.text.tokenizer import Tokenizer

LONGEST_PARTS = 8, 4  # characters of the two parts of a new token
# Tokens with a quote, a backslash, a control character or a part of a character are what masks in a string take time
# for. One in eight merges of any tokens is such a one; with this share of merges of any tokens, 1.4 % of all tokens
# are, as in SmolLM2's vocabulary.
SHARE_OF_ANY = 0.1


def grown(tokenizer: Tokenizer, size: int, seed: int = 0) -> Tokenizer:
    """The byte-level BPE tokenizer with random merges of its tokens added, until it has `size` ids."""
    rng = random.Random(seed)
    fields = json.loads(tokenizer.backend.to_str())
    vocabulary, merges = fields["model"]["vocab"], fields["model"]["merges"]
    space = "\u0120"  # as byte-level vocabularies write it
    firsts, seconds = ([token for token in vocabulary if len(token) <= most] for most in LONGEST_PARTS)
    seconds = [token for token in seconds if not token.startswith(space)]
    plain = [[token for token in parts if is_plain(token.replace(space, "", 1))] for parts in (firsts, seconds)]
    last = tokenizer.vocab_size
    while last < size:
        first, second = map(rng.choice, (firsts, seconds) if rng.random() < SHARE_OF_ANY else plain)
        if first + second in vocabulary:
            continue
        vocabulary[first + second] = last
        merges.append([first, second])
        last += 1
    return replace(tokenizer, backend=Backend.from_str(json.dumps(fields)), vocab_size=last)


def is_plain(token: str) -> bool:
    """Whether a token of a byte-level vocabulary, which writes other bytes as other characters, is text in ASCII."""
    return token.isascii() and not set(token) & {'"', "\\"}
