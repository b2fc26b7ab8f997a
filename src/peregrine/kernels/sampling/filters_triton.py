"""The lowest score that top-k, top-p and min-p keep, for logits of 16 bits, without sorting.

There are 65,536 values a logit can have, so a histogram says all there is to know about a node: tokens with the
same logit have the same mass. It is counted by one launch and read by another, from the largest logit downwards,
as far as the filters reach. Counts and masses are whole numbers, so no order of adding them can change the answer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.sampling.params import MASS as WHOLE_MASS
from peregrine.kernels.sampling.params import SamplingTensors
from peregrine.kernels.sampling.triton import divisor_of

SPAN = 4096  # logits that one program counts
CHUNK = 2048  # bins that are read at once
BINS = tl.constexpr(1 << 16)
COLUMNS = tl.constexpr((1 << 16) + 1)  # behind the bins stands the largest that is not empty
SIGN, REST = tl.constexpr(0x8000), tl.constexpr(0x7FFF)
MASS = tl.constexpr(WHOLE_MASS)
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def lowest_kept(logits: Tensor, law: SamplingTensors) -> Tensor:
    """The score, after temperature, that a token needs to stay: [R, T, V] of 16 bits -> [R, T] f32."""
    logits = logits.contiguous()
    num_rows, num_nodes, vocab_size = logits.shape
    histograms = torch.zeros(num_rows * num_nodes, COLUMNS.value, dtype=torch.int32, device=logits.device)
    lowest = torch.empty(num_rows, num_nodes, dtype=torch.float32, device=logits.device)
    launch(
        _count,
        (num_rows * num_nodes, triton.cdiv(vocab_size, SPAN)),
        *(logits.view(torch.int16), histograms, vocab_size),
        SPAN=SPAN,
        num_warps=8,
    )
    launch(
        _select,
        (num_rows * num_nodes,),
        *(histograms, law.temperature, law.top_k, law.top_p, law.min_p, lowest, num_nodes, vocab_size),
        TYPE=TYPES[logits.dtype],
        CHUNK=CHUNK,
        num_warps=8,
    )
    return lowest


@triton.jit
def _bin_of(bits):  # type: ignore[no-untyped-def]
    """Bins in the order of the floats: 16 bits of a logit, as i32 -> i32; both zeros have the same."""
    bits = bits & 0xFFFF
    bits = tl.where(bits == SIGN, 0, bits)
    return tl.where(bits >= SIGN, bits ^ 0xFFFF, bits ^ SIGN)


@triton.jit
def _score_of(number, divisor, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logit of a bin over the temperature: i32 -> f32."""
    bits = tl.where(number >= SIGN, number ^ SIGN, number ^ 0xFFFF)
    logit = bits.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return tl.math.div_rn(logit, divisor)


@triton.jit
def _masses(number, count, best, divisor, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The masses of `filters.py`, of all tokens of a bin together: i64."""
    share = tl.exp(_score_of(number, divisor, TYPE) - best) * MASS
    return tl.where(count > 0, share, 0.0).to(tl.int64) * count


@triton.jit
def _count(logits, histograms, vocab_size, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count a span's logits into its node's histogram."""
    node = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    inside = offsets < vocab_size
    bits = tl.load(logits + node * vocab_size + offsets, mask=inside, other=0).to(tl.int32)
    number = _bin_of(bits)
    histogram = histograms + node * COLUMNS
    tl.atomic_add(histogram + number, tl.full([SPAN], 1, tl.int32), mask=inside, sem="relaxed")
    tl.atomic_max(histogram + BINS, tl.max(tl.where(inside, number, 0)), sem="relaxed")


@triton.jit(do_not_specialize=["num_nodes"])
def _select(  # type: ignore[no-untyped-def]
    histograms,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    lowest,
    num_nodes,
    vocab_size,
    TYPE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The lowest score kept at one node. A filter's bin is the largest at which its sum from above is reached."""
    node = tl.program_id(0).to(tl.int64)
    row = node // num_nodes
    histogram = histograms + node * COLUMNS
    divisor = divisor_of(tl.load(temperatures + row))
    best_bin = tl.load(histogram + BINS)
    best = _score_of(best_bin, divisor, TYPE)
    first = best_bin // CHUNK * CHUNK  # the chunk that holds the best
    order = tl.arange(0, CHUNK)

    top_k = tl.load(top_ks + row)
    k_bin = best_bin * 0
    if (top_k > 0) & (top_k < vocab_size):
        above, start = top_k * 0, first
        k_bin = best_bin * 0 - 1
        while (k_bin < 0) & (start >= 0):
            count = tl.load(histogram + start + order).to(tl.int64)
            sums = above + tl.sum(count) - tl.cumsum(count) + count  # of each bin and those above it
            k_bin = tl.max(tl.where(sums >= top_k, start + order, -1))
            above += tl.sum(count)
            start -= CHUNK
        k_bin = tl.maximum(k_bin, 0)
    kept = tl.where((top_k > 0) & (top_k < vocab_size), _score_of(k_bin, divisor, TYPE), float("-inf"))

    top_p = tl.load(top_ps + row)
    if top_p < 1:
        total, start = top_k * 0, first
        reach = total * 0 + 1
        while (reach > 0) & (start >= 0) & (start + CHUNK > k_bin):
            count = tl.load(histogram + start + order).to(tl.int64)
            mass = _masses(start + order, count, best, divisor, TYPE)
            total += tl.sum(tl.where(start + order >= k_bin, mass, 0))
            start -= CHUNK
            # Below a score without a mass no token has any.
            reach = _masses(start + CHUNK, reach * 0 + 1, best, divisor, TYPE)
        wanted = tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
        above, start = total * 0, first
        p_bin = best_bin * 0 - 1
        while (p_bin < 0) & (start >= 0):
            count = tl.load(histogram + start + order).to(tl.int64)
            mass = _masses(start + order, count, best, divisor, TYPE)
            sums = above + tl.sum(mass) - tl.cumsum(mass) + mass
            # Of bins that exist: a wish of nothing would be met above the best.
            p_bin = tl.max(tl.where((sums >= wanted) & (count > 0), start + order, -1))
            above += tl.sum(mass)
            start -= CHUNK
        kept = tl.maximum(kept, _score_of(tl.maximum(p_bin, 0), divisor, TYPE))
    tl.store(lowest + node, tl.maximum(kept, best + tl.log(tl.load(min_ps + row))))
