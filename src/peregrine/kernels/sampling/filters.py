"""top-k, top-p and min-p: each is a lowest score that may be chosen, so the highest of the three decides.

Probabilities are summed as whole numbers, so that the order of the sum, and with it the number of rows and
the device, cannot change a bit.
"""

import torch
from torch import Tensor

from peregrine.kernels.runtime.cpu import numba_ready
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready
from peregrine.kernels.sampling.params import COLDEST, MASS, SamplingTensors

_cpu = DeviceFile("peregrine.kernels.sampling.filters_cpu")
_triton = DeviceFile("peregrine.kernels.sampling.filters_triton")

HALF_BYTES = 2  # bfloat16 and float16


def filter_scores(scores: Tensor, law: SamplingTensors) -> Tensor:
    """Scores [R, T, V] with the tokens that top-k, top-p or min-p drop at -inf; one at least stays."""
    return scores.masked_fill(scores < lowest_kept(scores, law), -torch.inf)


def lowest_kept(scores: Tensor, law: SamplingTensors) -> Tensor:
    """The score a token needs to stay: [R, T, V] f32 -> [R, T, 1]; ties with it stay.

    top-k: the k-th largest score. top-p: of the distribution that top-k leaves, the smallest set of largest
    scores whose mass reaches p. min-p: a probability of at least min_p times the largest.
    """
    if numba_ready(scores):
        lowest: Tensor = _cpu.lowest_kept(scores, law)
        return lowest
    return lowest_kept_torch(scores, law)


def lowest_kept_torch(scores: Tensor, law: SamplingTensors) -> Tensor:
    """The twin."""
    vocab_size = scores.shape[2]
    ranked = scores.sort(dim=2, descending=True).values  # [R, T, V]
    best = ranked[:, :, :1]

    last_rank = torch.where(law.top_k > 0, law.top_k, vocab_size).clamp(max=vocab_size) - 1  # [R]
    top_k = ranked.gather(2, last_rank[:, None, None].expand_as(best))  # [R, T, 1]

    reached = masses(ranked, best).cumsum(dim=2)  # [R, T, V] i64
    num_left = (ranked >= top_k).sum(dim=2, keepdim=True)  # more than k where the k-th has ties
    total = reached.gather(2, num_left.clamp(min=1) - 1)  # NaN rows leave nothing, and must not fault
    wanted = (total.double() * law.top_p[:, None, None].double()).ceil().long()
    nucleus = torch.searchsorted(reached, wanted).clamp(max=vocab_size - 1)  # [R, T, 1]
    # Tokens whose mass rounds to nothing would be lost at p = 1.
    top_p = torch.where(law.top_p[:, None, None] < 1, ranked.gather(2, nucleus), -torch.inf)

    min_p = best + law.min_p.log()[:, None, None]
    return torch.maximum(torch.maximum(top_k, top_p), min_p)


def lowest_kept_of_logits(logits: Tensor, law: SamplingTensors) -> Tensor:
    """`lowest_kept` of logits [R, T, V] that the temperature has not divided yet: -> [R, T] f32."""
    if triton_ready(logits) and logits.element_size() == HALF_BYTES:
        lowest: Tensor = _triton.lowest_kept(logits, law)
        return lowest
    return lowest_kept(logits / divisors(law), law)[:, :, 0]


def divisors(law: SamplingTensors) -> Tensor:
    """What logits are divided by [R, 1, 1]: the temperature, and 1 for greedy rows."""
    return torch.where(law.temperature > 0, law.temperature.clamp(min=COLDEST), 1.0)[:, None, None]


def masses(scores: Tensor, best: Tensor) -> Tensor:
    """exp(score - best) in units of 1 / MASS, rounded down: [..., V], [..., 1] f32 -> [..., V] i64."""
    if numba_ready(scores, best):
        found: Tensor = _cpu.masses(scores, best)
        return found
    return masses_torch(scores, best)


def masses_torch(scores: Tensor, best: Tensor) -> Tensor:
    """The twin."""
    return (scores - best).exp_().mul_(MASS).long()
