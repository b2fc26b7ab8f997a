"""The lowest score that filters keep, of logits of 16 bits: by histograms of their values, in Triton.

There are 65,536 values such a logit can have, so a histogram says all there is to know about a node: tokens with the
same logit have the same mass. It is counted by one launch and read by another, from the largest logit downwards, as far
as the filters reach.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.sampling.adjust_triton import Adjusted
from peregrine.kernels.sampling.filter_limits_triton import is_filtered, limits, wanted_mass
from peregrine.kernels.sampling.params import SamplingTensors
from peregrine.kernels.sampling.scores_triton import COUNT_SPAN, MASS, divisor_of

CHUNK = 2048  # bins of a histogram that are read at once
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
BINS = tl.constexpr(1 << 16)
COLUMNS = tl.constexpr((1 << 16) + 1)  # behind the bins stands the largest that is not empty
SIGN = tl.constexpr(0x8000)


def lowest_by_histogram(logits: Tensor, sampling: SamplingTensors, adjusted: Adjusted | None, lowest: Tensor) -> None:
    """Write `lowest` for every node of rows that are not adjusted."""
    num_rows, num_nodes, vocab_size = logits.shape
    histograms = torch.zeros(num_rows * num_nodes, COLUMNS.value, dtype=torch.int32, device=logits.device)
    adjusted_rows = histograms if adjusted is None else adjusted.rows
    launch(
        _count_bins,
        (num_rows * num_nodes, triton.cdiv(vocab_size, COUNT_SPAN)),
        *(logits.view(torch.int16), histograms, *limits(sampling), adjusted_rows, num_nodes, vocab_size),
        SPAN=COUNT_SPAN,
        ADJUSTED=adjusted is not None,
        num_warps=8,
    )
    launch(
        _select_bins,
        (num_rows * num_nodes,),
        *(histograms, *limits(sampling), adjusted_rows, lowest, num_nodes, vocab_size),
        TYPE=TYPES[logits.dtype],
        CHUNK=CHUNK,
        ADJUSTED=adjusted is not None,
        num_warps=8,
    )


@triton.jit
def _bin_of(bits):  # type: ignore[no-untyped-def]
    """Bins in the order of the floats: 16 bits of a logit, as i32 -> i32; both zeros have the same."""
    bits = bits & 0xFFFF
    bits = tl.where(bits == SIGN, 0, bits)
    return tl.where(bits >= SIGN, bits ^ 0xFFFF, bits ^ SIGN)


@triton.jit
def _score_of_bin(number, divisor, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logit of a bin over the temperature: i32 -> f32."""
    bits = tl.where(number >= SIGN, number ^ SIGN, number ^ 0xFFFF)
    logit = bits.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return tl.math.div_rn(logit, divisor)


@triton.jit
def _mass_of_bin(number, count, best, divisor, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mass of all tokens of a bin together: i64."""
    share = tl.exp(_score_of_bin(number, divisor, TYPE) - best) * MASS  # as `mass_of`; may be infinite above the best
    return tl.where(count > 0, share, 0.0).to(tl.int64) * count


@triton.jit(do_not_specialize=["num_nodes"])
def _count_bins(  # type: ignore[no-untyped-def]
    logits,
    histograms,
    temperatures,
    top_ks,
    top_ps,
    log_min_ps,
    adjusted_rows,
    num_nodes,
    vocab_size,
    SPAN: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """Count a span's logits into its node's histogram."""
    node = tl.program_id(0).to(tl.int64)
    row = node // num_nodes
    serves = is_filtered(row, temperatures, top_ks, top_ps, log_min_ps, vocab_size)
    if ADJUSTED:
        serves = serves & (tl.load(adjusted_rows + row) == 0)
    if serves:
        offsets = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
        inside = offsets < vocab_size
        bits = tl.load(logits + node * vocab_size + offsets, mask=inside, other=0).to(tl.int32)
        number = _bin_of(bits)
        histogram = histograms + node * COLUMNS
        tl.atomic_add(histogram + number, tl.full([SPAN], 1, tl.int32), mask=inside, sem="relaxed")
        tl.atomic_max(histogram + BINS, tl.max(tl.where(inside, number, 0)), sem="relaxed")


@triton.jit(do_not_specialize=["num_nodes"])
def _select_bins(  # type: ignore[no-untyped-def]
    histograms,
    temperatures,
    top_ks,
    top_ps,
    log_min_ps,
    adjusted_rows,
    lowest,
    num_nodes,
    vocab_size,
    TYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """The lowest score kept at one node. A filter's bin is the largest at which its sum from above is reached."""
    node = tl.program_id(0).to(tl.int64)
    row = node // num_nodes
    if ADJUSTED and tl.load(adjusted_rows + row) != 0:
        return
    if not is_filtered(row, temperatures, top_ks, top_ps, log_min_ps, vocab_size):
        tl.store(lowest + node, float("-inf"))
        return
    histogram = histograms + node * COLUMNS
    divisor = divisor_of(tl.load(temperatures + row))
    best_bin = tl.load(histogram + BINS)
    best = _score_of_bin(best_bin, divisor, TYPE)
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
    kept = tl.where((top_k > 0) & (top_k < vocab_size), _score_of_bin(k_bin, divisor, TYPE), float("-inf"))

    top_p = tl.load(top_ps + row)
    if top_p < 1:
        total, start = top_k * 0, first
        reach = total * 0 + 1
        while (reach > 0) & (start >= 0) & (start + CHUNK > k_bin):
            count = tl.load(histogram + start + order).to(tl.int64)
            mass = _mass_of_bin(start + order, count, best, divisor, TYPE)
            total += tl.sum(tl.where(start + order >= k_bin, mass, 0))
            start -= CHUNK
            # Below a score without a mass no token has any.
            reach = _mass_of_bin(start + CHUNK, reach * 0 + 1, best, divisor, TYPE)
        wanted = wanted_mass(total, top_p)
        above, start = total * 0, first
        p_bin = best_bin * 0 - 1
        while (p_bin < 0) & (start >= 0):
            count = tl.load(histogram + start + order).to(tl.int64)
            mass = _mass_of_bin(start + order, count, best, divisor, TYPE)
            sums = above + tl.sum(mass) - tl.cumsum(mass) + mass
            p_bin = tl.max(tl.where(sums >= wanted, start + order, -1))
            above += tl.sum(mass)
            start -= CHUNK
        kept = tl.maximum(kept, _score_of_bin(tl.maximum(p_bin, 0), divisor, TYPE))
    tl.store(lowest + node, tl.maximum(kept, best + tl.load(log_min_ps + row)))
