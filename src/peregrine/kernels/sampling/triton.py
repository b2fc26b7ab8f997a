"""The choosing law as Triton kernels: temperature, noise and the largest sum, straight from the model's logits.

A node's scores are cut into spans, one program each, and a second launch takes the best of a node's spans; a
node that one program can read in one go needs none. The cut depends on the vocabulary and on whether noise is
drawn, never on the batch; and nothing is added up, so the largest is the largest in any order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter
from peregrine.kernels.sampling.noise_triton import key_of, noise_of
from peregrine.kernels.sampling.params import COLDEST, SamplingTensors

WHOLE = 32768  # scores that one program takes at once where there is no noise to draw
SPAN = 8192  # scores of a program where a node has more
NOISY_SPAN = 2048  # noise is work: more programs share it
SCORES_PER_THREAD = 32
LAST_ID = tl.constexpr(0x7FFFFFFF)
BROKEN = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # above the key of every score
LOWER_HALF = tl.constexpr(0xFFFFFFFF)
LEAST_DIVISOR = tl.constexpr(COLDEST)


def span_of(vocab_size: int, sampled: bool) -> int:
    """How many scores of a node one program takes."""
    whole: int = triton.next_power_of_2(vocab_size)
    if sampled:
        return min(NOISY_SPAN, whole)
    return whole if whole <= WHOLE else SPAN


def best_tokens(
    scores: Tensor,
    positions: Tensor,
    law: SamplingTensors,
    sampled: bool,
    ids: Tensor | None,
    lowest: Tensor | None,
    checked: bool,
    out: Tensor,
) -> None:
    """The token of the largest sum at each node, lowest on ties, into `out`, a dense [R, T] i64.

    scores [R, T, V] of any float type are those of token ids [V] (None: 0, 1, ...), positions are [R, T]. Scores
    below `lowest` [R, T], after temperature, are passed over. Checked: -1 if a score is not finite; otherwise
    what is not a number counts as -inf.
    """
    scores = scores if scores.stride(2) == 1 or scores.shape[2] == 1 else scores.contiguous()
    num_rows, num_nodes, vocab_size = scores.shape
    span = span_of(vocab_size, sampled)
    num_spans = triton.cdiv(vocab_size, span)
    keys = out
    if num_spans > 1:
        keys = torch.empty(num_rows * num_nodes, num_spans, dtype=torch.int64, device=scores.device)
    launch(
        _best_of_span,
        (num_rows * num_nodes, num_spans),
        *(scores, positions, law.temperature, law.seeds),
        *(out if ids is None else ids, law.temperature if lowest is None else lowest, out, keys),
        *(*scores.stride()[:2], *positions.stride(), num_nodes, vocab_size),
        SPAN=span,
        ALONE=num_spans == 1,
        SAMPLED=sampled,
        NAMED=ids is not None,
        FILTERED=lowest is not None,
        CHECKED=checked,
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
def order_of(score):  # type: ignore[no-untyped-def]
    """Integers in the order of the floats: f32 -> i32; the two zeros differ."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def divisor_of(temperature):  # type: ignore[no-untyped-def]
    """What scores are divided by: the temperature, and 1 for greedy rows."""
    return tl.where(temperature > 0, tl.maximum(temperature, LEAST_DIVISOR), 1.0)


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
):
    """The key of the best score of one span; if it is the only one, the token itself."""
    enter()
    node, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, place = node // num_nodes, node % num_nodes
    offsets = span * SPAN + tl.arange(0, SPAN)
    inside = offsets < vocab_size
    start = scores + row * row_stride + place * node_stride
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
    # Zeros are equal: both count as the positive one.
    key = (order_of(tl.where(best == 0, 0.0, best)).to(tl.int64) << 32) | (first ^ LAST_ID).to(tl.int64)
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
