"""The lowest score that filters keep, of scores of 32 bits: searched digit by digit, in Triton.

The counts (top-k) or masses (top-p) of a digit's 2,048 values say which value holds the score that is looked for, and
the next launch looks at the scores that begin with it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter
from peregrine.kernels.sampling.adjust_triton import Adjusted
from peregrine.kernels.sampling.filter_limits_triton import is_filtered, limits, wanted_mass
from peregrine.kernels.sampling.params import SamplingTensors
from peregrine.kernels.sampling.scores_triton import COUNT_SPAN, divisor_of, mass_of, radix_key, score_of_radix_key

HALF_BYTES = 2  # bfloat16 and float16
LEVELS = tl.constexpr(3)
DIGIT_BITS = tl.constexpr(11)
DIGITS = tl.constexpr(1 << 11)
KEY_BITS = tl.constexpr(33)  # LEVELS digits: a float's 32 bits and a zero
RADIX_COLUMNS = tl.constexpr(2 * 3 * (1 << 11) + 1)  # counts and masses of each level, then the largest key


def lowest_by_digits(logits: Tensor, sampling: SamplingTensors, adjusted: Adjusted | None, lowest: Tensor) -> None:
    """Write `lowest` for nodes of adjusted rows, and for all others too if logits have 32 bits."""
    num_rows, num_nodes, vocab_size = logits.shape
    bins = torch.zeros(num_rows * num_nodes, RADIX_COLUMNS.value, dtype=torch.int64, device=logits.device)
    adjusted_rows, adjusted_scores = (bins, lowest) if adjusted is None else (adjusted.rows, adjusted.scores)
    for weighed in (False, True):
        for level in range(LEVELS.value):
            launch(
                _sum_digits,
                (num_rows * num_nodes, triton.cdiv(vocab_size, COUNT_SPAN)),
                *(logits, adjusted_rows, adjusted_scores, *limits(sampling), bins),
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
        *(adjusted_rows, *limits(sampling), bins, lowest, num_nodes, vocab_size),
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
    return wanted_mass(tl.sum(tl.load(bins + tl.arange(0, DIGITS))), top_p)


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
    serves = is_filtered(row, temperatures, top_ks, top_ps, log_min_ps, vocab_size)
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
    adjusted_rows, temperatures, top_ks, top_ps, log_min_ps, bins, lowest, num_nodes, vocab_size, HALF: tl.constexpr
):
    """The lowest score kept at one node, from all digits."""
    enter()
    node = tl.program_id(0).to(tl.int64)
    row = node // num_nodes
    if HALF and tl.load(adjusted_rows + row) == 0:
        return
    kept = float("-inf")
    if is_filtered(row, temperatures, top_ks, top_ps, log_min_ps, vocab_size):
        bins += node * RADIX_COLUMNS
        top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
        kept = score_of_radix_key(tl.load(bins + 2 * LEVELS * DIGITS)) + tl.load(log_min_ps + row)
        if (top_k > 0) & (top_k < vocab_size):
            kept = tl.maximum(kept, score_of_radix_key(_kept_by_rank(bins, top_k, vocab_size)))
        if top_p < 1:
            weights = bins + LEVELS * DIGITS
            kept = tl.maximum(kept, score_of_radix_key(_prefix_of(weights, _kept_mass(weights, top_p), LEVELS)))
    tl.store(lowest + node, kept)
