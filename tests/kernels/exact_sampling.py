"""A plain implementation of sampling, one row and one token at a time, in float64: the oracle of the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from peregrine.kernels.sampling.params import Context, Masks, SamplingTensors


@dataclass(frozen=True)
class Params:
    """One row's sampling parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    stops: tuple[int, ...] = ()
    min_len: int = 0
    logprobs: int = -1


def sampling_of(rows: Sequence[Params], width: int = 4) -> SamplingTensors:
    """The rows' parameters as tensors; ids are padded to `width`."""

    def reals(name):
        return torch.tensor([getattr(row, name) for row in rows], dtype=torch.float32)

    def wholes(name):
        return torch.tensor([getattr(row, name) for row in rows], dtype=torch.int64)

    def padded(lists, fill, dtype):
        return torch.tensor([[*entries, *[fill] * (width - len(entries))] for entries in lists], dtype=dtype)

    return SamplingTensors(
        temperature=reals("temperature"),
        top_k=wholes("top_k"),
        top_p=reals("top_p"),
        log_min_p=reals("min_p").log(),
        repetition=reals("repetition"),
        presence=reals("presence"),
        frequency=reals("frequency"),
        seeds=wholes("seed"),
        bias_ids=padded([row.bias.keys() for row in rows], -1, torch.int64),
        bias_values=padded([row.bias.values() for row in rows], 7.0, torch.float32),
        stop_ids=padded([row.stops for row in rows], -1, torch.int64),
        min_lens=wholes("min_len"),
        logprobs=wholes("logprobs"),
    )


def masks_of(rows: Sequence[int], nodes: int, vocab_size: int) -> Masks:
    """Random masks for the rows whose flag is 1; every node has a legal token."""
    generator = torch.Generator().manual_seed(vocab_size)
    words = torch.randint(1, 1 << 32, (len(rows), nodes, -(-vocab_size // 32)), generator=generator)
    return Masks(torch.tensor(rows, dtype=torch.int32), words.int())


def legal_at(masks: Masks, row: int, node: int, vocab_size: int) -> list[bool]:
    """Whether each token is legal at a node, by Python's integers."""
    words = masks.words[row, node].tolist()
    return [masks.rows[row].item() == 0 or bool((words[v // 32] >> v % 32) & 1) for v in range(vocab_size)]


def context_of(prompts, outputs, windows, ancestors, garbage=0) -> Context:
    """A context of prompts and outputs, padded with garbage; every argument is a list per row."""
    width = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)) + 3
    history = [p + o + [garbage] * (width - len(p) - len(o)) for p, o in zip(prompts, outputs, strict=True)]
    return Context(
        history=torch.tensor(history),
        prompt_lens=torch.tensor([len(p) for p in prompts]),
        lens=torch.tensor([len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)]),
        window_tokens=torch.tensor(windows),
        ancestors=torch.tensor(ancestors),
    )


def penalised(logits, params, prompt, output):
    """Logits [V] after repetition, presence and frequency penalties."""
    result = logits.astype(np.float64).copy()
    for token in range(len(result)):
        if token in prompt or token in output:
            result[token] = (
                result[token] / params.repetition if result[token] > 0 else result[token] * params.repetition
            )
        result[token] -= params.frequency * output.count(token)
        result[token] -= params.presence * (token in output)
    return result


def kept_tokens(probabilities, params):
    """Tokens kept by top-k, then top-p of what is left, then min-p: [V] bool."""
    kept = np.ones(len(probabilities), dtype=bool)
    ranked = np.sort(probabilities)[::-1]
    if params.top_k:
        kept &= probabilities >= ranked[min(params.top_k, len(ranked)) - 1]
    if params.top_p < 1:
        left = np.where(kept, probabilities, 0.0)
        left = left / left.sum()
        order = np.sort(left)[::-1]
        reach = np.searchsorted(np.cumsum(order), params.top_p)
        kept &= left >= order[min(reach, len(order) - 1)]
    return kept & (probabilities >= params.min_p * probabilities.max())


def distribution(logits, params, position=0, prompt=(), output=()):
    """The exact probabilities [V] of the token at `position`."""
    scores = np.asarray(logits, dtype=np.float64).copy()
    for token, bias in params.bias.items():
        scores[token] += bias
    scores = penalised(scores, params, list(prompt), list(output))
    if position < params.min_len:
        scores[list(params.stops)] = -np.inf
    scores = scores / params.temperature
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    left = np.where(kept_tokens(probabilities, params), probabilities, 0.0)
    return left / left.sum()


def assert_drawn_from(tokens, probabilities):
    """Chi-square: the tokens are draws from these probabilities, and none has probability 0."""
    from scipy import stats

    counts = np.bincount(np.asarray(tokens).ravel(), minlength=len(probabilities))
    assert counts.shape == probabilities.shape
    assert not counts[probabilities == 0].any()
    expected = probabilities * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    if len(observed) > 1:
        assert stats.chisquare(observed, expected).pvalue > 1e-4
