"""The choice of tokens as Triton kernels: bias and penalties, then the largest sum of score and noise.

Work is done for the rows that ask for it: a program whose row has neutral parameters ends at once. So a row's bits
do not depend on what other rows of the batch ask for, and their requests cost it next to nothing.

A node's scores are cut into spans, one program each. The cut depends on the vocabulary and on whether noise is drawn,
never on the batch. Programs of a node are combined by maxima and by sums of whole numbers alone, which have the same
result in any order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter
from peregrine.kernels.sampling.params import Context, Features, SamplingTensors
from peregrine.kernels.sampling.scores_triton import (
    BROKEN,
    COUNT_SPAN,
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

IN_PROMPT = tl.constexpr(1 << 30)  # added to a token's count in the output


def span_of(vocab_size: int, sampled: bool) -> int:
    """How many scores of a node one program takes."""
    whole: int = triton.next_power_of_2(vocab_size)
    if sampled:
        return min(NOISY_SPAN, whole)
    return whole if whole <= WHOLE else SPAN


@dataclass(frozen=True, slots=True)
class Adjusted:
    """Scores after bias, penalties, min_tokens and grammar, for the rows that have any of them."""

    rows: Tensor  # [R] i32: 1 if the row has adjusted scores
    scores: Tensor  # [R * T, V] f32, written in those rows alone; NaN where a logit is not finite


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


def adjust(
    logits: Tensor, positions: Tensor, sampling: SamplingTensors, features: Features, context: Context | None
) -> Adjusted:
    """Scores after bias, penalties, min_tokens and grammar, of the rows that have any of them.

    A first launch counts the tokens of penalised rows, a second computes scores.
    """
    num_rows, num_nodes, vocab_size = logits.shape
    rows = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    scores = torch.empty(num_rows * num_nodes, vocab_size, dtype=torch.float32, device=logits.device)
    counts = rows
    history = window_tokens = ancestors = sampling.stop_ids  # read where a context is given
    prompt_lens = lens = sampling.min_lens
    if features.penalised and context is not None:
        counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=logits.device)
        history, prompt_lens, lens = context.history, context.prompt_lens, context.lens
        window_tokens, ancestors = context.window_tokens, context.ancestors
    parts = {"PENALISED": features.penalised, "BIASED": features.biased, "MIN_LEN": features.min_len}
    masks = sampling.masks if features.masked else None
    mask_rows, words = (rows, counts) if masks is None else (masks.rows, masks.words.contiguous())
    parts["MASKED"] = masks is not None
    penalties = (sampling.repetition, sampling.presence, sampling.frequency)
    launch(
        _count_tokens,
        (num_rows, triton.cdiv(history.shape[1], COUNT_SPAN) if features.penalised else 1),
        *(history, prompt_lens, lens, *penalties, sampling.bias_ids, sampling.min_lens, mask_rows, rows, counts),
        *(history.stride(0), sampling.bias_ids.stride(0), vocab_size),
        SPAN=COUNT_SPAN,
        **parts,
    )
    launch(
        _adjust,
        (num_rows * num_nodes, triton.cdiv(vocab_size, COUNT_SPAN)),
        *(logits, positions, rows, counts, window_tokens, ancestors, *penalties),
        *(sampling.bias_ids, sampling.bias_values, sampling.stop_ids, sampling.min_lens, mask_rows, words, scores),
        *(*logits.stride()[:2], *positions.stride(), window_tokens.stride(0), *ancestors.stride()),
        *(sampling.bias_ids.stride(0), sampling.stop_ids.stride(0), triton.cdiv(vocab_size, 32)),
        *(sampling.bias_ids.shape[1], sampling.stop_ids.shape[1], num_nodes, vocab_size),
        SPAN=COUNT_SPAN,
        **parts,
        num_warps=8,
        enable_fp_fusion=False,  # products and differences are rounded one after the other
        pdl=True,
    )
    return Adjusted(rows, scores)


@triton.jit
def _count_tokens(  # type: ignore[no-untyped-def]
    history,
    prompt_lens,
    lens,
    repetitions,
    presences,
    frequencies,
    bias_ids,
    min_lens,
    mask_rows,
    rows,
    counts,
    history_stride,
    bias_stride,
    vocab_size,
    SPAN: tl.constexpr,
    PENALISED: tl.constexpr,
    BIASED: tl.constexpr,
    MIN_LEN: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Whether a row is adjusted at all; and for penalised rows how often each token came before the window."""
    enter()
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    penalised = row < 0
    if PENALISED:
        penalised = tl.load(repetitions + row) != 1
        penalised = penalised | (tl.load(presences + row) != 0) | (tl.load(frequencies + row) != 0)
    adjusted = penalised
    if BIASED:
        adjusted = adjusted | (tl.load(bias_ids + row * bias_stride) >= 0)
    if MIN_LEN:
        adjusted = adjusted | (tl.load(min_lens + row) > 0)
    if MASKED:
        adjusted = adjusted | (tl.load(mask_rows + row) != 0)
    if span == 0:
        tl.store(rows + row, adjusted.to(tl.int32))
    if PENALISED:
        length = tl.load(lens + row)
        if penalised & (span * SPAN < length):
            place = span * SPAN + tl.arange(0, SPAN)
            inside = place < length
            token = tl.load(history + row * history_stride + place, mask=inside, other=0)
            count = counts + row * vocab_size + tl.minimum(tl.maximum(token, 0), vocab_size - 1)
            in_prompt = place < tl.load(prompt_lens + row)
            tl.atomic_add(count, tl.full([SPAN], 1, tl.int32), mask=inside & ~in_prompt, sem="relaxed")
            tl.atomic_or(count, tl.full([SPAN], IN_PROMPT, tl.int32), mask=inside & in_prompt, sem="relaxed")


@triton.jit(do_not_specialize=["position_row_stride", "position_node_stride", "num_nodes", "num_biases", "num_stops"])
def _adjust(  # type: ignore[no-untyped-def]
    logits,
    positions,
    rows,
    counts,
    window_tokens,
    ancestors,
    repetitions,
    presences,
    frequencies,
    bias_ids,
    bias_values,
    stop_ids,
    min_lens,
    mask_rows,
    words,
    scores,
    row_stride,
    node_stride,
    position_row_stride,
    position_node_stride,
    window_stride,
    ancestor_row_stride,
    ancestor_stride,
    bias_stride,
    stop_stride,
    num_words,
    num_biases,
    num_stops,
    num_nodes,
    vocab_size,
    SPAN: tl.constexpr,
    PENALISED: tl.constexpr,
    BIASED: tl.constexpr,
    MIN_LEN: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The adjusted scores of one span of an adjusted node."""
    enter()
    node, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, place = node // num_nodes, node % num_nodes
    if tl.load(rows + row) != 0:
        offsets = span * SPAN + tl.arange(0, SPAN)
        inside = offsets < vocab_size
        start = logits + row * row_stride + place * node_stride
        logit = tl.load(start + offsets, mask=inside, other=0.0).to(tl.float32)
        score = logit
        if BIASED:
            entry = row * bias_stride
            end = entry + num_biases
            biased = tl.load(bias_ids + entry)
            while biased >= 0:  # used entries come first
                score = tl.where(offsets == biased, score + tl.load(bias_values + entry), score)
                entry += 1
                biased = tl.load(bias_ids + entry, mask=entry < end, other=-1)
        if PENALISED:
            seen = tl.load(counts + row * vocab_size + offsets, mask=inside, other=0)
            count = seen & (IN_PROMPT - 1)
            word = tl.load(ancestors + row * ancestor_row_stride + place * ancestor_stride)
            for other in range(1, num_nodes):  # the root is part of the history
                token = tl.load(window_tokens + row * window_stride + other)
                token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)
                count += tl.where(offsets == token, ((word >> other) & 1).to(tl.int32), 0)
            factor = tl.where((seen >= IN_PROMPT) | (count > 0), tl.load(repetitions + row), 1.0)
            score = tl.where(score > 0, tl.math.div_rn(score, factor), score * factor)
            score = score - count.to(tl.float32) * tl.load(frequencies + row)
            score = score - tl.where(count > 0, tl.load(presences + row), 0.0)
        if MIN_LEN:
            position = tl.load(positions + row * position_row_stride + place * position_node_stride)
            if position < tl.load(min_lens + row):
                for number in range(0, num_stops):
                    stop = tl.load(stop_ids + row * stop_stride + number)
                    score = tl.where(offsets == stop, float("-inf"), score)
        if MASKED:
            masked = inside & (tl.load(mask_rows + row) != 0)
            word = tl.load(words + node * num_words + offsets // 32, mask=masked, other=-1)
            score = tl.where(((word >> (offsets % 32)) & 1) != 0, score, float("-inf"))
        score = tl.where(tl.abs(logit) < INFINITY, score, float("nan"))
        tl.store(scores + node * vocab_size + offsets, score, mask=inside)
