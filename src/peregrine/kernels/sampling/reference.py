"""The choosing law: which token a request takes at a position, greedy or sampled, on any device.

The token is a function of (logits, seed, position, parameters, what came before) alone: the largest sum of
processed logit and Gumbel noise, lowest id on ties. The maximum of logits plus Gumbel noise is a draw from
their softmax, and since the noise is a hash and not a stream, all nodes of a draft tree are chosen at once
and as if each came alone. Temperature 0 has no noise.

Order: bias, penalties, min_tokens, temperature, top-k, top-p, min-p, noise.

A row's bits depend on that row alone: every step is elementwise, a maximum, or a sum of whole numbers.
Nothing waits for the device.
"""

import torch
from torch import Tensor

from peregrine.errors import EngineFault
from peregrine.kernels.runtime.cpu import numba_ready
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready
from peregrine.kernels.sampling.filters import divisors, filter_scores, lowest_kept_of_logits, masses
from peregrine.kernels.sampling.noise import gumbel
from peregrine.kernels.sampling.params import COLDEST, MASS, Context, Features, SamplingTensors
from peregrine.kernels.sampling.penalties import penalise

_cpu = DeviceFile("peregrine.kernels.sampling.cpu")
_triton = DeviceFile("peregrine.kernels.sampling.triton")

__all__ = ["Context", "Features", "SamplingTensors", "choose", "logprobs", "pick", "pick_scores", "process"]

FAULT = -1  # chosen where there is nothing to choose from


def choose(
    logits: Tensor, positions: Tensor, law: SamplingTensors, features: Features, context: Context | None
) -> Tensor:
    """The token at each node: logits [R, T, V], positions [R, T] -> [R, T] i64; -1 if a logit is not finite.

    A position is that of the token to be chosen. Without penalties no context is needed.
    """
    if triton_ready(logits):
        return _choose_on_gpu(logits, positions, law, features, context)
    if not numba_ready(logits):
        return choose_torch(logits, positions, law, features, context)
    scores = adjust(logits, positions, law, features, context)
    if scores is logits:
        tokens: Tensor = _cpu.choose(logits, positions, law, features, COLDEST)
        return tokens
    tokens = _cpu.choose_unchecked(scores, positions, None, law, features, COLDEST)
    return _mark_faults(tokens, logits.amin(dim=2), logits.amax(dim=2))


def _choose_on_gpu(
    logits: Tensor, positions: Tensor, law: SamplingTensors, features: Features, context: Context | None
) -> Tensor:
    """`choose` where Triton serves; bias, penalties and min_tokens come from the twins."""
    tokens = torch.empty(positions.shape, dtype=torch.int64, device=logits.device)
    raw = not (features.biased or features.penalised or features.min_len)
    scores = logits if raw else adjust(logits, positions, law, features, context)
    lowest = None
    if features.sampled and features.filtered:  # greedy rows take the best score, which every filter keeps
        lowest = lowest_kept_of_logits(scores, law)
    _triton.best_tokens(scores, positions, law, features.sampled, None, lowest, raw, tokens)
    return tokens if raw else _mark_faults(tokens, logits.amin(dim=2), logits.amax(dim=2))


def choose_torch(
    logits: Tensor, positions: Tensor, law: SamplingTensors, features: Features, context: Context | None
) -> Tensor:
    """The twin."""
    lowest = logits.amin(dim=2)
    if features.plain:
        highest, tokens = logits.max(dim=2)  # torch promises the first of equals
    else:
        highest = logits.amax(dim=2)
        scores = process(logits, positions, law, features, context)
        if features.sampled:
            scores = _add_noise(scores, positions, None, law)
        tokens = scores.max(dim=2).indices
    return _mark_faults(tokens, lowest, highest)


def process(
    logits: Tensor, positions: Tensor, law: SamplingTensors, features: Features, context: Context | None
) -> Tensor:
    """Logits whose softmax is the distribution of the token: [R, T, V] f32; dropped tokens are at -inf.

    Without any feature in use it may be the very tensor that was given.
    """
    scores = adjust(logits, positions, law, features, context)
    if features.sampled:
        scores = scores / divisors(law)
    if features.filtered:
        scores = filter_scores(scores, law)
    return scores


def adjust(
    logits: Tensor, positions: Tensor, law: SamplingTensors, features: Features, context: Context | None
) -> Tensor:
    """Logits after bias, penalties and min_tokens: [R, T, V] f32; the very tensor if none is in use."""
    scores = logits.float()
    if features.biased:
        scores = _add_at(scores, law.bias_ids, law.bias_values[:, None])
    if features.penalised:
        if context is None:
            raise EngineFault("context=None: penalties count what came before; pass a Context")
        scores = penalise(scores, law, context)
    if features.min_len:
        early = positions < law.min_lens[:, None]  # [R, T]
        scores = _add_at(scores, law.stop_ids, torch.where(early, -torch.inf, -0.0)[:, :, None])
    return scores


def pick_scores(
    draft_logits: Tensor, positions: Tensor, target_ids: Tensor | None, law: SamplingTensors, features: Features
) -> Tensor:
    """What a drafter should maximise to guess the target's choice: [R, n, Vd], [R, n] -> [R, n, Vd] f32.

    The same noise that the target will add, keyed by target ids [Vd] (None: draft ids are target ids). A
    drafter knows neither penalties nor filters; a wrong guess costs time, not tokens.
    """
    if not features.sampled:
        return draft_logits.float()
    if numba_ready(draft_logits):
        scores: Tensor = _cpu.pick_scores(draft_logits, positions, target_ids, law, COLDEST)
        return scores
    return pick_scores_torch(draft_logits, positions, target_ids, law)


def pick_scores_torch(
    draft_logits: Tensor, positions: Tensor, target_ids: Tensor | None, law: SamplingTensors
) -> Tensor:
    """The twin, where some row is sampled."""
    return _add_noise(draft_logits.float() / divisors(law), positions, target_ids, law)


def pick(
    draft_logits: Tensor,
    positions: Tensor,
    target_ids: Tensor | None,
    law: SamplingTensors,
    features: Features,
    out: Tensor,
) -> None:
    """The target id of the largest pick score, lowest draft id on ties: [R, n, Vd], [R, n] -> `out`, a dense [R, n]."""
    if triton_ready(draft_logits):
        _triton.best_tokens(draft_logits, positions, law, features.sampled, target_ids, None, False, out)
    elif numba_ready(draft_logits):
        unfiltered = Features(sampled=features.sampled)
        straight = out if target_ids is None else None
        ids: Tensor = _cpu.choose_unchecked(draft_logits, positions, target_ids, law, unfiltered, COLDEST, straight)
        if target_ids is not None:
            torch.index_select(target_ids, 0, ids.view(-1), out=out.view(-1))
    else:
        pick_torch(draft_logits, positions, target_ids, law, features, out)


def pick_torch(
    draft_logits: Tensor,
    positions: Tensor,
    target_ids: Tensor | None,
    law: SamplingTensors,
    features: Features,
    out: Tensor,
) -> None:
    """The twin."""
    ids = pick_scores(draft_logits, positions, target_ids, law, features).max(dim=2).indices
    out.copy_(ids if target_ids is None else target_ids[ids])


def logprobs(logits: Tensor, chosen: Tensor, top_n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under the model's own distribution, from raw logits [N, V] and token ids [N].

    Returns the chosen tokens' [N] f32, then ids [N, n] and log-probabilities [N, n] f32 of the n likeliest,
    largest first, lowest id first among equals.
    """
    scores = logits.float()
    best = scores.amax(dim=1, keepdim=True)
    total = masses(scores, best).sum(dim=1, keepdim=True)  # [N, 1] i64
    norm = best.double() + (total.double() / MASS).log()
    top_ids = _largest(scores, top_n)
    ids = torch.cat([chosen.clamp(min=0)[:, None], top_ids], dim=1)
    values = (scores.gather(1, ids) - norm).float()  # [N, 1 + n]
    return values[:, 0], top_ids, values[:, 1:]


def _mark_faults(tokens: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """Tokens [R, T] with -1 where the lowest or the highest logit is not finite."""
    # 0 * x is 0 for a finite x, else NaN, which differs from everything.
    return tokens.masked_fill_(highest * 0 != lowest * 0, FAULT)


def _add_noise(scores: Tensor, positions: Tensor, ids: Tensor | None, law: SamplingTensors) -> Tensor:
    """Scores [R, T, V] plus the noise of token ids [V], except in greedy rows."""
    if ids is None:
        ids = torch.arange(scores.shape[2], device=scores.device)
    noise = gumbel(law.seeds, positions, ids)
    # Noise times 0 or 1 is exact, so it is all one if the product and the sum are fused.
    return torch.addcmul(scores, noise, (law.temperature > 0).float()[:, None, None])


def _add_at(scores: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Scores [R, T, V] with values [R, 1 or T, 1 or B] added at token ids [R, B]; id -1 adds to none."""
    # x + -0.0 is x, bit for bit, even if x is -0.0.
    values = torch.where(ids[:, None] < 0, -0.0, values)
    ids = ids.clamp(min=0)[:, None].expand(-1, scores.shape[1], -1)
    return scores.scatter_add(2, ids, values.expand_as(ids))


def _largest(scores: Tensor, count: int) -> Tensor:
    """Ids of the largest scores, lowest id first among equals: [N, V] f32 -> [N, count] i64."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: equal scores have equal bits
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    last = scores.shape[1] - 1
    ranks = torch.arange(last, -1, -1, device=scores.device)
    keys = (order.long() << 32) | ranks  # no two are equal
    return last - (keys.topk(count, dim=1).values & 0xFFFFFFFF)
