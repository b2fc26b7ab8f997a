"""Gumbel noise as a pure function of (seed, position, token id): no state, no order, no batch.

The bits are SplitMix64 twice over. Seeded with the request's seed, its output number `position` is the key of
that position; seeded with the key, the upper half of its output number `id` is the token's 32 random bits.
Integers wrap alike on every device, so the bits agree everywhere; the logarithms may differ in the last place
between device types.
"""

import torch
from torch import Tensor

from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready
from peregrine.kernels.sampling.params import SamplingTensors

_scores_triton = DeviceFile("peregrine.kernels.sampling.scores_triton")


def _signed(word: int) -> int:
    """The 64-bit word as torch's int64 writes it."""
    return word - (1 << 64) if word >> 63 else word


# Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators": increment and multipliers.
GOLDEN = _signed(0x9E3779B97F4A7C15)
MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
LARGEST = 1 - 2**-24  # the largest float32 below 1: no token's noise is minus infinity


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise of each row's positions and of token ids: [R], [R, T], [V] i64 -> [R, T, V] f32.

    Between -2.82 and 22.9. With v uniform in (0, 1), -log(-log(1 - v)) is finest where the noise is large.
    """
    if triton_ready(seeds):
        noise: Tensor = _scores_triton.gumbel(seeds, positions, ids)
        return noise
    return gumbel_torch(seeds, positions, ids)


def gumbel_torch(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """The torch twin of `gumbel`; logarithms may differ in the last place."""
    bits = random_bits(seeds, positions, ids).float()  # [R, T, V]
    minus_v = bits.add_(0.5).mul_(-(2.0**-32)).clamp_(min=-LARGEST)
    return minus_v.log1p_().neg_().log_().neg_()


def random_bits(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """32 random bits each: [R], [R, T], [V] i64 -> [R, T, V] i64 in [0, 2^32)."""
    keys = _spread(seeds[:, None] + positions * GOLDEN)  # [R, T]
    keys ^= (keys >> 31) & ((1 << 33) - 1)
    words = _spread(keys[:, :, None] + ids * GOLDEN)  # [R, T, V]
    # SplitMix64's last step folds upper bits into lower ones; of the upper half it would change one bit.
    return (words >> 32).bitwise_and_(0xFFFFFFFF)


def _spread(words: Tensor) -> Tensor:
    """SplitMix64's two multiplications, in place; right shifts of int64 copy the sign, hence the masks."""
    words ^= (words >> 30).bitwise_and_((1 << 34) - 1)
    words *= MULTIPLIERS[0]
    words ^= (words >> 27).bitwise_and_((1 << 37) - 1)
    words *= MULTIPLIERS[1]
    return words


def add_noise(scores: Tensor, positions: Tensor, ids: Tensor | None, sampling: SamplingTensors) -> Tensor:
    """Scores [R, T, V] plus the noise of token ids [V], except in greedy rows."""
    if ids is None:
        ids = torch.arange(scores.shape[2], device=scores.device)
    noise = gumbel(sampling.seeds, positions, ids)
    # Noise times 0 or 1 is exact, so it is all one if the product and the sum are fused.
    return torch.addcmul(scores, noise, (sampling.temperature > 0).float()[:, None, None])
