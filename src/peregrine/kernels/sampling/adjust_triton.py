"""Scores after bias, penalties, min_tokens and grammar as Triton kernels, for the rows that ask for any of them.

A program whose row has neutral parameters ends at once. So a row's bits do not depend on what other rows of the batch
ask for, and their requests cost it next to nothing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter
from peregrine.kernels.sampling.params import Context, Features, SamplingTensors
from peregrine.kernels.sampling.scores_triton import COUNT_SPAN, INFINITY

IN_PROMPT = tl.constexpr(1 << 30)  # added to a token's count in the output


@dataclass(frozen=True, slots=True)
class Adjusted:
    """Scores after bias, penalties, min_tokens and grammar, for the rows that have any of them."""

    rows: Tensor  # [R] i32: 1 if the row has adjusted scores
    scores: Tensor  # [R * T, V] f32, written in those rows alone; NaN where a logit is not finite


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
