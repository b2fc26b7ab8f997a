"""An independent generator to compare the engine with: no cache, no batch, no drafts, no device.

Every token is recomputed from the whole text before it, and sampled by plain Python and numpy in float64, with the
noise hash in Python integers.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from peregrine.sampling import SamplingParams

Logits = Callable[[list[int]], np.ndarray]  # all tokens so far -> [V] logits of the next


def generate(logits: Logits, prompt: Sequence[int], params: SamplingParams, eos: Sequence[int] = ()) -> list[int]:
    """The tokens a request must produce."""
    tokens, made = list(prompt), []
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    assert params.max_tokens is not None
    assert params.seed is not None
    while len(made) < params.max_tokens:
        banned = ends if len(made) < params.min_tokens else set()
        token = choose(logits(tokens).astype(np.float64), tokens, made, params, banned)
        tokens.append(token)
        made.append(token)
        if token in ends:
            break
    return made


def choose(x: np.ndarray, tokens: list[int], made: list[int], params: SamplingParams, banned: set[int]) -> int:
    """The last step of sampling: the largest processed logit plus noise."""
    x = process(x, tokens, made, params, banned)
    return int((x + gumbel(params.seed or 0, len(tokens), len(x)) if params.temperature else x).argmax())


def process(x: np.ndarray, tokens: list[int], made: list[int], params: SamplingParams, banned: set[int]) -> np.ndarray:
    """The other steps of sampling, in order."""
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in set(tokens):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(made):
        x[token] -= params.presence_penalty + params.frequency_penalty * made.count(token)
    x[list(banned)] = -math.inf
    if params.temperature == 0:
        return x
    x = x / params.temperature
    if params.top_k:
        x[x < np.sort(x)[::-1][min(params.top_k, len(x)) - 1]] = -math.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])  # mass of everything likelier
    x[p < p[order][before < params.top_p][-1]] = -math.inf
    x[p < params.min_p * p.max()] = -math.inf
    return x


def gumbel(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """Noise of every token at a position: SplitMix64 of SplitMix64, upper 32 bits, -log(-log(1 - v))."""
    key = splitmix(np.array([seed], dtype=np.uint64), np.array([position], dtype=np.uint64))
    bits = splitmix(key, np.arange(vocab_size, dtype=np.uint64)) >> np.uint64(32)
    v = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2**-24))
    return -np.log(-np.log1p(-v.astype(np.float64)))


def splitmix(seeds: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Output number `index` of SplitMix64; its last fold is left out: it does not change the upper half."""
    with np.errstate(over="ignore"):
        z = seeds + index * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))
