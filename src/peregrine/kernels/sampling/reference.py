"""Sampling: which token a request takes at a position, greedy or sampled, on any device.

The token is a function of (logits, seed, position, parameters, what came before) alone: the largest sum of
processed logit and Gumbel noise, lowest id on ties. The maximum of logits plus Gumbel noise is a draw from
their softmax, and since the noise is a hash and not a stream, all nodes of a draft tree are chosen at once
and as if each came alone. Temperature 0 has no noise.

Order: bias, penalties, min_tokens, grammar, temperature, top-k, top-p, min-p, noise.

A row's bits depend on that row alone: every step is elementwise, a maximum, or a sum of whole numbers.
Nothing waits for the device.
"""

import torch
from torch import Tensor

from peregrine.errors import EngineFault
from peregrine.kernels.runtime.cpu import numba_ready
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready
from peregrine.kernels.sampling.filters import divisors, filter_scores, masses
from peregrine.kernels.sampling.noise import add_noise
from peregrine.kernels.sampling.params import MASS, Context, Features, Masks, SamplingTensors

_cpu = DeviceFile("peregrine.kernels.sampling.cpu")
_triton = DeviceFile("peregrine.kernels.sampling.triton")
_adjust_triton = DeviceFile("peregrine.kernels.sampling.adjust_triton")
_filters_triton = DeviceFile("peregrine.kernels.sampling.filters_triton")
_logprobs_triton = DeviceFile("peregrine.kernels.sampling.logprobs_triton")

FAULT = -1  # chosen where there is nothing to choose from


def choose(
    logits: Tensor, positions: Tensor, sampling: SamplingTensors, features: Features, context: Context | None
) -> Tensor:
    """The token at each node: logits [R, T, V], positions [R, T] -> [R, T] i64; -1 if a logit is not finite.

    A position is that of the token to be chosen. Without penalties no context is needed.
    """
    if features.penalised and context is None:
        raise EngineFault("context=None: penalties count what came before; pass a Context")
    if triton_ready(logits):
        return _choose_triton(logits, positions, sampling, features, context)
    if not numba_ready(logits):
        return choose_torch(logits, positions, sampling, features, context)
    if not features.adjusted:
        tokens: Tensor = _cpu.choose(logits, positions, None, sampling, features, True)
        return tokens
    scores = adjust(logits, positions, sampling, features, context)
    tokens = _cpu.choose(scores, positions, None, sampling, features, False)
    return _mark_faults(tokens, logits.amin(dim=2), logits.amax(dim=2))


def _choose_triton(
    logits: Tensor, positions: Tensor, sampling: SamplingTensors, features: Features, context: Context | None
) -> Tensor:
    """`choose` on a GPU. Rows without bias, penalties, min_tokens and grammar keep their raw logits."""
    tokens = torch.empty(positions.shape, dtype=torch.int64, device=logits.device)
    adjusted = _adjust_triton.adjust(logits, positions, sampling, features, context) if features.adjusted else None
    lowest = None
    if features.sampled and features.filtered:
        lowest = _filters_triton.lowest_kept(logits, sampling, adjusted)
    _triton.best_tokens(logits, positions, sampling, features.sampled, None, lowest, True, tokens, adjusted)
    return tokens


def choose_torch(
    logits: Tensor, positions: Tensor, sampling: SamplingTensors, features: Features, context: Context | None
) -> Tensor:
    """The torch twin of `choose`. Noise and masses are those of the device, so that tokens are equal."""
    lowest = logits.amin(dim=2)
    if features.plain:
        highest, tokens = logits.max(dim=2)  # torch promises the first of equals
    else:
        highest = logits.amax(dim=2)
        scores = process(logits, positions, sampling, features, context)
        if features.sampled:
            scores = add_noise(scores, positions, None, sampling)
        tokens = scores.max(dim=2).indices
    return _mark_faults(tokens, lowest, highest)


def process(
    logits: Tensor, positions: Tensor, sampling: SamplingTensors, features: Features, context: Context | None
) -> Tensor:
    """Logits whose softmax is the distribution of the token: [R, T, V] f32; dropped tokens are at -inf.

    Without any feature in use it may be the very tensor that was given.
    """
    scores = adjust(logits, positions, sampling, features, context)
    if features.sampled:
        scores = scores / divisors(sampling)
    if features.filtered:
        scores = filter_scores(scores, sampling)
    return scores


def adjust(
    logits: Tensor, positions: Tensor, sampling: SamplingTensors, features: Features, context: Context | None
) -> Tensor:
    """Logits after bias, penalties, min_tokens and grammar: [R, T, V] f32; the very tensor if none is in use."""
    scores = logits.float()
    if features.biased:
        # x + -0.0 is x, bit for bit, even if x is -0.0.
        values = torch.where(sampling.bias_ids < 0, -0.0, sampling.bias_values)
        ids = _at_nodes(sampling.bias_ids, scores)
        scores = scores.scatter_add(2, ids, values[:, None].expand_as(ids))
    if features.penalised:
        assert context is not None
        scores = penalise(scores, sampling, context)
    if features.min_len:
        early = positions < sampling.min_lens[:, None]  # [R, T]
        limits = torch.where(early[:, :, None] & (sampling.stop_ids >= 0)[:, None], -torch.inf, torch.inf)  # [R, T, S]
        scores = scores.scatter_reduce(2, _at_nodes(sampling.stop_ids, scores), limits, "amin")
    if features.masked and sampling.masks is not None:
        scores = mask(scores, sampling.masks)
    return scores


def mask(scores: Tensor, masks: Masks) -> Tensor:
    """Scores [R, T, V] f32 with illegal tokens at -inf, in rows that have masks."""
    if numba_ready(scores):
        masked: Tensor = _cpu.mask(scores, masks)
        return masked
    return mask_torch(scores, masks)


def mask_torch(scores: Tensor, masks: Masks) -> Tensor:
    """The torch twin of `mask`."""
    places = torch.arange(32, dtype=torch.int32, device=scores.device)
    bits = (masks.words[..., None] >> places) & 1  # [R, T, words, 32]
    illegal = (bits.flatten(2)[:, :, : scores.shape[2]] == 0) & (masks.rows != 0)[:, None, None]
    return scores.masked_fill(illegal, -torch.inf)


def penalise(logits: Tensor, sampling: SamplingTensors, context: Context) -> Tensor:
    """Penalised logits [R, T, V] f32; a row with neutral penalties keeps its bits.

    - repetition (Hugging Face's formula): the logit of a token seen in prompt or output is divided by the penalty
      if positive, else multiplied by it;
    - presence and frequency (OpenAI's): a token seen in the output loses `presence` once, and `frequency` for
      each time it was seen there.
    """
    in_prompt, counts = count_tokens(context, logits.shape[2])
    in_output = counts > 0  # [R, T, V]
    factors = torch.where(in_output | in_prompt, sampling.repetition[:, None, None], 1.0)  # [R, T, V]
    logits = torch.where(logits > 0, logits / factors, logits * factors)
    # Products and differences apart: fused, they may round differently in a vector's body and its tail.
    logits = logits - counts.mul_(sampling.frequency[:, None, None])
    return logits - in_output * sampling.presence[:, None, None]


def count_tokens(context: Context, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Whether a token is in the prompt [R, 1, V] bool, and how often in each node's output [R, T, V] f32.

    The window's root is committed, hence part of the history; another node counts for itself and its descendants.
    """
    history, window, num_nodes = context.history, context.window_tokens, context.ancestors.shape[1]
    num_rows = len(window)
    places = torch.arange(history.shape[1], device=history.device)
    committed = places < context.lens[:, None]  # [R, C]
    of_prompt = committed & (places < context.prompt_lens[:, None])
    ids = history.clamp(0, vocab_size - 1)  # garbage past the end must still be an index
    none = torch.zeros(num_rows, vocab_size, device=history.device)
    in_prompt = none.scatter_add(1, ids, of_prompt.float()) > 0
    counts = none.scatter_add_(1, ids, (committed ^ of_prompt).float())[:, None]  # [R, 1, V]

    nodes = torch.arange(1, window.shape[1], device=window.device)
    counted = (context.ancestors[:, :, None] >> nodes) & 1  # [R, n, T - 1]
    drafts = window[:, None, 1:].clamp(0, vocab_size - 1).expand_as(counted)
    # Sums of ones are exact in float32 up to 2^24, whatever their order.
    counts = counts.expand(-1, num_nodes, -1).scatter_add(2, drafts, counted.float())
    return in_prompt[:, None], counts


def logprobs(
    logits: Tensor, tokens: Tensor, path: Tensor | None, asked: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under the model's own distribution, from raw logits [R, T, V], of tokens [R, W].

    The token at place w of a row was chosen at node path[r, w] (None: at node w). Returns the tokens' own [R, W]
    f32, then ids [R, W, count] and log-probabilities [R, W, count] f32 of the likeliest, largest first, lowest id
    first among equals. A GPU computes as many of those as a row asked for [R] (None: all), and leaves rows that
    asked for -1 unwritten.
    """
    if triton_ready(logits):
        chosen, ids, values = _logprobs_triton.logprobs(logits, tokens, path, asked, count)
        return chosen, ids, values
    return logprobs_torch(logits, tokens, path, count)


def logprobs_torch(logits: Tensor, tokens: Tensor, path: Tensor | None, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The torch twin of `logprobs`, for all rows."""
    if path is not None:
        logits = logits.gather(1, path[:, :, None].expand(-1, -1, logits.shape[2]))
    scores = logits.float()  # [R, W, V]
    best = scores.amax(dim=2, keepdim=True)
    total = masses(scores, best).sum(dim=2, keepdim=True)  # [R, W, 1] i64
    norm = best.double() + (total.double() / MASS).log()
    top_ids = _largest(scores, count)
    ids = torch.cat([tokens.clamp(min=0)[:, :, None], top_ids], dim=2)
    values = (scores.gather(2, ids) - norm).float()  # [R, W, 1 + n]
    return values[:, :, 0], top_ids, values[:, :, 1:]


def _mark_faults(tokens: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """Tokens [R, T] with -1 where the lowest or the highest logit is not finite."""
    # 0 * x is 0 for a finite x, else NaN, which differs from everything.
    return tokens.masked_fill_(highest * 0 != lowest * 0, FAULT)


def _at_nodes(ids: Tensor, scores: Tensor) -> Tensor:
    """Token ids [R, B] as indices into scores [R, T, V]: [R, T, B]; an empty entry (-1) is index 0."""
    return ids.clamp(min=0)[:, None].expand(-1, scores.shape[1], -1)


def _largest(scores: Tensor, count: int) -> Tensor:
    """Ids of the largest scores, lowest id first among equals: [..., V] f32 -> [..., count] i64."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: equal scores have equal bits
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    last = scores.shape[-1] - 1
    ranks = torch.arange(last, -1, -1, device=scores.device)
    keys = (order.long() << 32) | ranks  # no two are equal
    return last - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
