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
_scores_triton = DeviceFile("peregrine.kernels.sampling.scores_triton")


def filter_scores(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    """Scores [R, T, V] with the tokens that top-k, top-p or min-p drop at -inf; one at least stays."""
    return scores.masked_fill(scores < lowest_kept(scores, sampling), -torch.inf)


def lowest_kept(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    """The score a token needs to stay: [R, T, V] f32 -> [R, T, 1]; ties with it stay.

    top-k: the k-th largest score. top-p: of the distribution that top-k leaves, the smallest set of largest
    scores whose mass reaches p. min-p: a probability of at least min_p times the largest.
    """
    if numba_ready(scores):
        lowest: Tensor = _cpu.lowest_kept(scores, sampling)
        return lowest
    return lowest_kept_torch(scores, sampling)


def lowest_kept_torch(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    """The torch twin of `lowest_kept`, by sorting. Its masses are those of the device, so that sets are equal."""
    vocab_size = scores.shape[2]
    ranked = scores.sort(dim=2, descending=True).values  # [R, T, V]
    best = ranked[:, :, :1]

    last_rank = torch.where(sampling.top_k > 0, sampling.top_k, vocab_size).clamp(max=vocab_size) - 1  # [R]
    top_k = ranked.gather(2, last_rank[:, None, None].expand_as(best))  # [R, T, 1]

    reached = masses(ranked, best).cumsum(dim=2)  # [R, T, V] i64
    num_left = (ranked >= top_k).sum(dim=2, keepdim=True)  # more than k where the k-th has ties
    total = reached.gather(2, num_left.clamp(min=1) - 1)  # NaN rows leave nothing, and must not fault
    wanted = (total.double() * sampling.top_p[:, None, None].double()).ceil().long()
    nucleus = torch.searchsorted(reached, wanted).clamp(max=vocab_size - 1)  # [R, T, 1]
    # Tokens whose mass rounds to nothing would be lost at p = 1.
    top_p = torch.where(sampling.top_p[:, None, None] < 1, ranked.gather(2, nucleus), -torch.inf)

    min_p = best + sampling.log_min_p[:, None, None]
    return torch.maximum(torch.maximum(top_k, top_p), min_p)


def divisors(sampling: SamplingTensors) -> Tensor:
    """What logits are divided by [R, 1, 1]: the temperature, and 1 for greedy rows."""
    return torch.where(sampling.temperature > 0, sampling.temperature.clamp(min=COLDEST), 1.0)[:, None, None]


def masses(scores: Tensor, best: Tensor) -> Tensor:
    """exp(score - best) in units of 1 / MASS, rounded down: [..., V], [..., 1] f32 -> [..., V] i64.

    Every kernel of a device takes its exponentials from the same function, and so does this.
    """
    if triton_ready(scores) or numba_ready(scores, best):
        found: Tensor = (_scores_triton if triton_ready(scores) else _cpu).masses(scores, best)
        return found
    return masses_torch(scores, best)


def masses_torch(scores: Tensor, best: Tensor) -> Tensor:
    """The torch twin of `masses`; exponentials may differ in the last place."""
    return (scores - best).exp_().mul_(MASS).long()
