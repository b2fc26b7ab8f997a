"""The choice of tokens as Triton kernels: the largest sum of score and noise. Adjusted scores: `adjust_triton.py`.

A node's scores are cut into spans, one program each. The cut depends on the vocabulary and on whether noise is drawn,
never on the batch. Programs of a node are combined by maxima and by sums of whole numbers alone, which have the same
result in any order.
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
    BROKEN,
    INFINITY,
    LAST_ID,
    LOWER_HALF,
    dense_vocab,
    divisor_of,
    key_of,
    noise_of,
    rank_key,
)

WHOLE = 32768  # scores that one program takes at once where there is no noise to draw
SPAN = 8192  # scores of a program where a node has more
NOISY_SPAN = 2048  # noise is work: more programs share it
SCORES_PER_THREAD = 32


def span_of(vocab_size: int, sampled: bool) -> int:
    """How many scores of a node one program takes."""
    whole: int = triton.next_power_of_2(vocab_size)
    if sampled:
        return min(NOISY_SPAN, whole)
    return whole if whole <= WHOLE else SPAN


def best_tokens(
    scores: Tensor,
    positions: Tensor,
    sampling: SamplingTensors,
    sampled: bool,
    ids: Tensor | None,
    lowest: Tensor | None,
    checked: bool,
    out: Tensor,
    adjusted: Adjusted | None = None,
) -> None:
    """The token of the largest sum at each node, lowest on ties, into `out`, a dense [R, T] i64.

    scores [R, T, V] of any float type are those of token ids [V] (None: 0, 1, ...), positions are [R, T]. Scores
    below `lowest` [R, T], after temperature, are passed over. Checked: -1 if a score is not finite; otherwise
    what is not a number counts as -inf. Rows with adjusted scores take those instead.
    """
    scores = dense_vocab(scores)
    num_rows, num_nodes, vocab_size = scores.shape
    span = span_of(vocab_size, sampled)
    num_spans = triton.cdiv(vocab_size, span)
    keys = out
    if num_spans > 1:
        keys = torch.empty(num_rows * num_nodes, num_spans, dtype=torch.int64, device=scores.device)
    adjusted_rows, adjusted_scores = (out, out) if adjusted is None else (adjusted.rows, adjusted.scores)
    launch(
        _best_of_span,
        (num_rows * num_nodes, num_spans),
        *(scores, positions, sampling.temperature, sampling.seeds),
        *(out if ids is None else ids, sampling.temperature if lowest is None else lowest),
        *(adjusted_rows, adjusted_scores, out, keys),
        *(*scores.stride()[:2], *positions.stride(), num_nodes, vocab_size),
        SPAN=span,
        ALONE=num_spans == 1,
        SAMPLED=sampled,
        NAMED=ids is not None,
        FILTERED=lowest is not None,
        CHECKED=checked,
        ADJUSTED=adjusted is not None,
        num_warps=max(1, min(32, span // (32 * SCORES_PER_THREAD) * (2 if sampled else 1))),
        enable_fp_fusion=False,  # every variant of the kernel rounds alike
        pdl=True,
    )
    if num_spans > 1:
        launch(
            _best_of_node,
            (num_rows * num_nodes,),
            *(keys, out if ids is None else ids, out, num_spans),
            PADDED=triton.next_power_of_2(num_spans),
            NAMED=ids is not None,
            num_warps=1,
            pdl=True,
        )


@triton.jit
def _token_of(key, ids, NAMED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The token that a key stands for: -1 if it is BROKEN."""
    token = (key & LOWER_HALF) ^ LAST_ID
    broken = key == BROKEN
    if NAMED:
        token = tl.load(ids + tl.where(broken, 0, token))
    return tl.where(broken, -1, token)


@triton.jit(do_not_specialize=["position_row_stride", "position_node_stride", "num_nodes"])
def _best_of_span(  # type: ignore[no-untyped-def]
    scores,
    positions,
    temperatures,
    seeds,
    ids,
    lowest,
    adjusted_rows,
    adjusted_scores,
    out,
    keys,
    row_stride,
    node_stride,
    position_row_stride,
    position_node_stride,
    num_nodes,
    vocab_size,
    SPAN: tl.constexpr,
    ALONE: tl.constexpr,
    SAMPLED: tl.constexpr,
    NAMED: tl.constexpr,
    FILTERED: tl.constexpr,
    CHECKED: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """The key of the best score of one span; if it is the only one, the token itself."""
    enter()
    node, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, place = node // num_nodes, node % num_nodes
    offsets = span * SPAN + tl.arange(0, SPAN)
    inside = offsets < vocab_size
    start = scores + row * row_stride + place * node_stride
    if ADJUSTED:
        is_adjusted = tl.load(adjusted_rows + row) != 0
        if is_adjusted:
            score = tl.load(adjusted_scores + node * vocab_size + offsets, mask=inside, other=0.0)
        else:
            score = tl.load(start + offsets, mask=inside, other=0.0).to(tl.float32)
        finite = (score == score) & (is_adjusted | (tl.abs(score) < INFINITY))  # adjusted scores may be -inf
    else:
        score = tl.load(start + offsets, mask=inside, other=0.0).to(tl.float32)
        finite = tl.abs(score) < float("inf")  # false for what is not a number
    broken = tl.sum((~finite).to(tl.int32)) > 0
    if not CHECKED:
        score = tl.where(score == score, score, float("-inf"))
    if SAMPLED:
        temperature = tl.load(temperatures + row)
        score = tl.math.div_rn(score, divisor_of(temperature))
        if FILTERED:
            score = tl.where(score >= tl.load(lowest + node), score, float("-inf"))
        if temperature > 0:
            position = tl.load(positions + row * position_row_stride + place * position_node_stride)
            token_ids = offsets.to(tl.int64)
            if NAMED:
                token_ids = tl.load(ids + offsets, mask=inside, other=0)
            score += noise_of(key_of(tl.load(seeds + row), position), token_ids)
    score = tl.where(inside, score, float("-inf"))
    best = tl.max(score)
    first = tl.min(tl.where(inside & (score == best), offsets, LAST_ID))
    key = rank_key(best, first)
    if CHECKED:
        key = tl.where(broken, BROKEN, key)
    if ALONE:
        tl.store(out + node, _token_of(key, ids, NAMED))
    else:
        tl.store(keys + node * tl.num_programs(1) + span, key)


@triton.jit(do_not_specialize=["num_spans"])
def _best_of_node(keys, ids, out, num_spans, PADDED: tl.constexpr, NAMED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The token of a node's largest key: the largest score, the lowest id among equals."""
    enter()
    node, span = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    of_spans = tl.load(keys + node * num_spans + span, mask=span < num_spans, other=-BROKEN)
    tl.store(out + node, _token_of(tl.max(of_spans), ids, NAMED))
