"""The order of scores, their noise and their shares of the total, for every Triton kernel that ranks or draws them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.sampling import noise, params

COUNT_SPAN = 4096  # scores of a program that counts, adjusts or weighs them

INFINITY = tl.constexpr(float("inf"))
LAST_ID = tl.constexpr(0x7FFFFFFF)
BROKEN = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # above the key of every score
NO_KEY = tl.constexpr(-BROKEN.value)  # below the key of every score
LOWER_HALF = tl.constexpr(0xFFFFFFFF)
TOP_BIT = tl.constexpr(1 << 31)
LEAST_DIVISOR = tl.constexpr(params.COLDEST)
MASS = tl.constexpr(params.MASS)

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


@triton.jit
def order_of(score):  # type: ignore[no-untyped-def]
    """Integers in the order of the floats: f32 -> i32; the two zeros differ."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of_order(order):  # type: ignore[no-untyped-def]
    """The float of an integer from `order_of`: i32 -> f32."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rank_key(score, number):  # type: ignore[no-untyped-def]
    """Keys in the order of scores, and among equal scores the lowest number first: f32, i32 -> i64.

    Both zeros count as the positive one.
    """
    return (order_of(tl.where(score == 0, 0.0, score)).to(tl.int64) << 32) | (number ^ LAST_ID).to(tl.int64)


@triton.jit
def number_of_key(key):  # type: ignore[no-untyped-def]
    """The number in a rank key: i64 -> i64."""
    return (key & LOWER_HALF) ^ LAST_ID


@triton.jit
def score_of_key(key):  # type: ignore[no-untyped-def]
    """The score in a rank key: i64 -> f32."""
    return score_of_order((key >> 32).to(tl.int32))


@triton.jit
def divisor_of(temperature):  # type: ignore[no-untyped-def]
    """What scores are divided by: the temperature, and 1 for greedy rows."""
    return tl.where(temperature > 0, tl.maximum(temperature, LEAST_DIVISOR), 1.0)


@triton.jit
def mass_of(score, best):  # type: ignore[no-untyped-def]
    """exp(score - best) in units of 1 / MASS, rounded down: f32 -> i64; 0 for what is not a number."""
    share = tl.exp(score - best) * MASS
    return tl.where(share == share, share, 0.0).to(tl.int64)


@triton.jit
def radix_key(score):  # type: ignore[no-untyped-def]
    """Keys of KEY_BITS bits in the order of the scores: f32 -> i64; both zeros count as the positive one."""
    return ((order_of(tl.where(score == 0, 0.0, score)).to(tl.int64) + TOP_BIT) & LOWER_HALF) << 1


@triton.jit
def score_of_radix_key(key):  # type: ignore[no-untyped-def]
    """The score of a key from `radix_key`: i64 -> f32."""
    return score_of_order(((key >> 1) - TOP_BIT).to(tl.int32))


def dense_vocab(scores: Tensor) -> Tensor:
    """Scores [R, T, V] with those of a node side by side."""
    return scores if scores.stride(2) == 1 or scores.shape[2] == 1 else scores.contiguous()


def masses(scores: Tensor, best: Tensor) -> Tensor:
    """exp(score - best) in units of 1 / MASS, rounded down: [..., V], [..., 1] f32 -> [..., V] i64."""
    scores, best = scores.contiguous(), best.contiguous()
    found = torch.empty(scores.shape, dtype=torch.int64, device=scores.device)
    grid = (best.numel(), triton.cdiv(scores.shape[-1], COUNT_SPAN))
    launch(_masses, grid, scores, best, found, scores.shape[-1], SPAN=COUNT_SPAN)
    return found


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise: [R], [R, T], [V] i64 -> [R, T, V] f32."""
    seeds, positions, ids = seeds.contiguous(), positions.contiguous(), ids.contiguous()
    num_nodes, vocab_size = positions.shape[1], ids.numel()
    drawn = torch.empty(*positions.shape, vocab_size, dtype=torch.float32, device=seeds.device)
    grid = (positions.numel(), triton.cdiv(vocab_size, COUNT_SPAN))
    arguments = (seeds, positions, ids, drawn, num_nodes, vocab_size)
    launch(_gumbel, grid, *arguments, SPAN=COUNT_SPAN, enable_fp_fusion=False)
    return drawn


@triton.jit
def _masses(scores, best, found, width, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    node = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    score = tl.load(scores + node * width + offsets, mask=offsets < width, other=0.0)
    tl.store(found + node * width + offsets, mass_of(score, tl.load(best + node)), mask=offsets < width)


@triton.jit(do_not_specialize=["num_nodes"])
def _gumbel(seeds, positions, ids, drawn, num_nodes, vocab_size, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    node = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    token_ids = tl.load(ids + offsets, mask=offsets < vocab_size, other=0)
    key = key_of(tl.load(seeds + node // num_nodes), tl.load(positions + node))
    tl.store(drawn + node * vocab_size + offsets, noise_of(key, token_ids), mask=offsets < vocab_size)
