"""Gumbel noise inside Triton kernels: the bits of `noise.py`, the device's logarithms."""

import triton
import triton.language as tl

from peregrine.kernels.sampling import noise

WORD = (1 << 64) - 1
GOLDEN = tl.constexpr(noise.GOLDEN & WORD)
FIRST, SECOND = (tl.constexpr(multiplier & WORD) for multiplier in noise.MULTIPLIERS)
LARGEST = tl.constexpr(noise.LARGEST)


@triton.jit
def _spread(words):  # type: ignore[no-untyped-def]
    """SplitMix64's two multiplications."""
    words ^= words >> 30
    words *= FIRST
    words ^= words >> 27
    words *= SECOND
    return words


@triton.jit
def key_of(seed, position):  # type: ignore[no-untyped-def]
    """The key of a position: i64 -> u64."""
    key = _spread(seed.to(tl.uint64, bitcast=True) + position.to(tl.uint64, bitcast=True) * GOLDEN)
    return key ^ (key >> 31)


@triton.jit
def random_bits(key, ids):  # type: ignore[no-untyped-def]
    """32 random bits for each token id under a key: u64, i64 -> u32."""
    return (_spread(key + ids.to(tl.uint64, bitcast=True) * GOLDEN) >> 32).to(tl.uint32)


@triton.jit
def noise_of(key, ids):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise for each token id under a key: u64, i64 -> f32."""
    v = tl.minimum((random_bits(key, ids).to(tl.float32) + 0.5) * 2.0**-32, LARGEST)
    rest = 1.0 - v
    # log(1 - v) by the logarithm of the rounded difference, times what the rounding took from v.
    exponential = tl.where(rest == 1.0, v, -tl.log(rest) * tl.math.div_rn(v, 1.0 - rest))
    return -tl.log(exponential)
