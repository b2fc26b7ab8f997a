"""top-k, top-p and min-p as Triton kernels: the lowest score that they keep, without sorting.

Logits of 16 bits are counted into histograms of their values; other logits and adjusted scores are searched by digits
of their 32 bits. Both find the same score: they add up the same whole numbers, in any order. Rows without a filter and
greedy rows take part in neither.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter
from peregrine.kernels.sampling.adjust_triton import Adjusted
from peregrine.kernels.sampling.params import SamplingTensors
from peregrine.kernels.sampling.scores_triton import (
    COUNT_SPAN,
    INFINITY,
    MASS,
    divisor_of,
    mass_of,
    radix_key,
    score_of_radix_key,
)

CHUNK = 2048  # bins of a histogram that are read at once
HALF_BYTES = 2  # bfloat16 and float16
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
BINS = tl.constexpr(1 << 16)
COLUMNS = tl.constexpr((1 << 16) + 1)  # behind the bins stands the largest that is not empty
SIGN = tl.constexpr(0x8000)

LEVELS = tl.constexpr(3)
DIGIT_BITS = tl.constexpr(11)
DIGITS = tl.constexpr(1 << 11)
KEY_BITS = tl.constexpr(33)  # LEVELS digits: a float's 32 bits and a zero
RADIX_COLUMNS = tl.constexpr(2 * 3 * (1 << 11) + 1)  # counts and masses of each level, then the largest key


def lowest_kept(logits: Tensor, sampling: SamplingTensors, adjusted: Adjusted | None = None) -> Tensor:
    """The score, after temperature, that a token needs to stay: [R, T, V] -> [R, T] f32; -inf where all do.

    Logits of 16 bits are counted into histograms of their values; other logits and adjusted scores are searched by
    digits of their 32 bits. Both find the same score: they add up the same whole numbers.
    """
    lowest = torch.empty(logits.shape[:2], dtype=torch.float32, device=logits.device)
    is_half = logits.element_size() == HALF_BYTES
    if is_half:
        _by_histogram(logits.contiguous(), sampling, adjusted, lowest)
    if not is_half or adjusted is not None:
        _by_digits(logits, sampling, adjusted, lowest)
    return lowest


def _limits(sampling: SamplingTensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.log_min_p


@triton.jit
def _is_filtered(row, temperatures, top_ks, top_ps, log_min_ps, vocab_size):  # type: ignore[no-untyped-def]
    """Whether a filter can drop a token of this row; greedy rows take the best score, which every filter keeps."""
    top_k = tl.load(top_ks + row)
    filtered = ((top_k > 0) & (top_k < vocab_size)) | (tl.load(top_ps + row) < 1)
    filtered = filtered | (tl.load(log_min_ps + row) > -INFINITY)
    return filtered & (tl.load(temperatures + row) > 0)


# There are 65,536 values a logit of 16 bits can have, so a histogram says all there is to know about a node: tokens
# with the same logit have the same mass. It is counted by one launch and read by another, from the largest logit
# downwards, as far as the filters reach.


def _by_histogram(logits: Tensor, sampling: SamplingTensors, adjusted: Adjusted | None, lowest: Tensor) -> None:
    """Write `lowest` for every node of rows that are not adjusted."""
    num_rows, num_nodes, vocab_size = logits.shape
    histograms = torch.zeros(num_rows * num_nodes, COLUMNS.value, dtype=torch.int32, device=logits.device)
    adjusted_rows = histograms if adjusted is None else adjusted.rows
    launch(
        _count_bins,
        (num_rows * num_nodes, triton.cdiv(vocab_size, COUNT_SPAN)),
        *(logits.view(torch.int16), histograms, *_limits(sampling), adjusted_rows, num_nodes, vocab_size),
        SPAN=COUNT_SPAN,
        ADJUSTED=adjusted is not None,
        num_warps=8,
    )
    launch(
        _select_bins,
        (num_rows * num_nodes,),
        *(histograms, *_limits(sampling), adjusted_rows, lowest, num_nodes, vocab_size),
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
    serves = _is_filtered(row, temperatures, top_ks, top_ps, log_min_ps, vocab_size)
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
    if not _is_filtered(row, temperatures, top_ks, top_ps, log_min_ps, vocab_size):
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
        wanted = _wanted_mass(total, top_p)
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


@triton.jit
def _wanted_mass(total, top_p):  # type: ignore[no-untyped-def]
    """The mass that top-p keeps: i64, f32 -> i64; at least 1, which the best token has."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


# Scores of 32 bits are searched digit by digit: the counts (top-k) or masses (top-p) of a digit's 2,048 values say
# which value holds the score that is looked for, and the next launch looks at the scores that begin with it.


def _by_digits(logits: Tensor, sampling: SamplingTensors, adjusted: Adjusted | None, lowest: Tensor) -> None:
    """Write `lowest` for nodes of adjusted rows, and for all others too if logits have 32 bits."""
    num_rows, num_nodes, vocab_size = logits.shape
    bins = torch.zeros(num_rows * num_nodes, RADIX_COLUMNS.value, dtype=torch.int64, device=logits.device)
    adjusted_rows, adjusted_scores = (bins, lowest) if adjusted is None else (adjusted.rows, adjusted.scores)
    for weighed in (False, True):
        for level in range(LEVELS.value):
            launch(
                _sum_digits,
                (num_rows * num_nodes, triton.cdiv(vocab_size, COUNT_SPAN)),
                *(logits, adjusted_rows, adjusted_scores, *_limits(sampling), bins),
                *(*logits.stride()[:2], num_nodes, vocab_size),
                SPAN=COUNT_SPAN,
                LEVEL=level,
                WEIGHED=weighed,
                ADJUSTED=adjusted is not None,
                HALF=logits.element_size() == HALF_BYTES,
                num_warps=8,
                enable_fp_fusion=False,
                pdl=weighed or level > 0,  # the first one follows the zeros
            )
    launch(
        _select_digits,
        (num_rows * num_nodes,),
        *(adjusted_rows, *_limits(sampling), bins, lowest, num_nodes, vocab_size),
        ADJUSTED=adjusted is not None,
        HALF=logits.element_size() == HALF_BYTES,
        num_warps=8,
        pdl=True,
    )


@triton.jit
def _prefix_of(bins, wanted, LEVEL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first LEVEL digits of the largest key at which the sum from above reaches `wanted`: i64."""
    digit = tl.arange(0, DIGITS)
    prefix = wanted * 0
    for level in tl.static_range(LEVEL):
        found = tl.load(bins + level * DIGITS + digit)
        sums = tl.sum(found) - tl.cumsum(found) + found  # of each digit and those above it
        chosen = tl.max(tl.where(sums >= wanted, digit, 0))
        wanted -= tl.sum(tl.where(digit > chosen, found, 0))
        prefix = (prefix << DIGIT_BITS) | chosen
    return prefix


@triton.jit
def _kept_by_rank(bins, top_k, vocab_size):  # type: ignore[no-untyped-def]
    """The key of the k-th largest score; 0, below all keys, without top-k."""
    key = top_k * 0
    if (top_k > 0) & (top_k < vocab_size):
        key = _prefix_of(bins, top_k, LEVELS)
    return key


@triton.jit
def _kept_mass(bins, top_p):  # type: ignore[no-untyped-def]
    """The mass that top-p keeps, from the masses of the first digit."""
    return _wanted_mass(tl.sum(tl.load(bins + tl.arange(0, DIGITS))), top_p)


@triton.jit(do_not_specialize=["num_nodes"])
def _sum_digits(  # type: ignore[no-untyped-def]
    logits,
    adjusted_rows,
    adjusted_scores,
    temperatures,
    top_ks,
    top_ps,
    log_min_ps,
    bins,
    row_stride,
    node_stride,
    num_nodes,
    vocab_size,
    SPAN: tl.constexpr,
    LEVEL: tl.constexpr,
    WEIGHED: tl.constexpr,
    ADJUSTED: tl.constexpr,
    HALF: tl.constexpr,
):
    """Add a span's scores, counted or weighed, to the sums of digit LEVEL of the key that is looked for."""
    enter()
    node, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, place = node // num_nodes, node % num_nodes
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    serves = _is_filtered(row, temperatures, top_ks, top_ps, log_min_ps, vocab_size)
    if WEIGHED:
        serves = serves & (top_p < 1)
    elif LEVEL > 0:
        serves = serves & (top_k > 0) & (top_k < vocab_size)
    is_adjusted = row < 0
    if ADJUSTED:
        is_adjusted = tl.load(adjusted_rows + row) != 0
    if HALF:
        serves = serves & is_adjusted
    if serves:
        offsets = span * SPAN + tl.arange(0, SPAN)
        inside = offsets < vocab_size
        if is_adjusted:
            score = tl.load(adjusted_scores + node * vocab_size + offsets, mask=inside, other=0.0)
        else:
            start = logits + row * row_stride + place * node_stride
            score = tl.load(start + offsets, mask=inside, other=0.0).to(tl.float32)
        score = tl.math.div_rn(score, divisor_of(tl.load(temperatures + row)))
        key = radix_key(score)
        bins += node * RADIX_COLUMNS
        largest = bins + 2 * LEVELS * DIGITS
        weight = tl.full([SPAN], 1, tl.int64)
        if WEIGHED:
            inside = inside & (key >= _kept_by_rank(bins, top_k, vocab_size))
            weight = mass_of(score, score_of_radix_key(tl.load(largest)))
            bins += LEVELS * DIGITS
            wanted = top_k * 0
            if LEVEL > 0:
                wanted = _kept_mass(bins, top_p)
        else:
            wanted = top_k
            if LEVEL == 0:
                tl.atomic_max(largest, tl.max(tl.where(inside, key, 0)), sem="relaxed")
        inside = inside & ((key >> (KEY_BITS - LEVEL * DIGIT_BITS)) == _prefix_of(bins, wanted, LEVEL))
        digit = (key >> (KEY_BITS - (LEVEL + 1) * DIGIT_BITS)) & (DIGITS - 1)
        tl.atomic_add(bins + LEVEL * DIGITS + digit, weight, mask=inside & (weight > 0), sem="relaxed")


@triton.jit(do_not_specialize=["num_nodes"])
def _select_digits(  # type: ignore[no-untyped-def]
    adjusted_rows,
    temperatures,
    top_ks,
    top_ps,
    log_min_ps,
    bins,
    lowest,
    num_nodes,
    vocab_size,
    ADJUSTED: tl.constexpr,
    HALF: tl.constexpr,
):
    """The lowest score kept at one node, from all digits."""
    enter()
    node = tl.program_id(0).to(tl.int64)
    row = node // num_nodes
    if HALF and tl.load(adjusted_rows + row) == 0:
        return
    kept = float("-inf")
    if _is_filtered(row, temperatures, top_ks, top_ps, log_min_ps, vocab_size):
        bins += node * RADIX_COLUMNS
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        kept = score_of_radix_key(tl.load(bins + 2 * LEVELS * DIGITS)) + tl.load(log_min_ps + row)
        if (top_k > 0) & (top_k < vocab_size):
            kept = tl.maximum(kept, score_of_radix_key(_kept_by_rank(bins, top_k, vocab_size)))
        if top_p < 1:
            weights = bins + LEVELS * DIGITS
            kept = tl.maximum(kept, score_of_radix_key(_prefix_of(weights, _kept_mass(weights, top_p), LEVELS)))
    tl.store(lowest + node, kept)
