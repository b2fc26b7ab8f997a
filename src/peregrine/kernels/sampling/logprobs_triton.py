"""Log-probabilities as Triton kernels, for the rows that ask for them."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter
from peregrine.kernels.sampling.scores_triton import (
    COUNT_SPAN,
    MASS,
    NO_KEY,
    dense_vocab,
    mass_of,
    number_of_key,
    radix_key,
    rank_key,
    score_of_key,
    score_of_radix_key,
)


def logprobs(
    logits: Tensor, tokens: Tensor, path: Tensor | None, asked: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.logprobs` on a GPU; rows that request no log-probabilities are left unwritten."""
    logits, tokens = dense_vocab(logits), tokens.contiguous()
    num_rows, width = tokens.shape
    vocab_size, device = logits.shape[2], logits.device
    span = min(COUNT_SPAN, triton.next_power_of_2(vocab_size))
    num_spans = triton.cdiv(vocab_size, span)
    sums = torch.zeros(2, num_rows * width, dtype=torch.int64, device=device)  # the largest key, the total mass
    keys = torch.empty(num_rows * width, num_spans, max(count, 1), dtype=torch.int64, device=device)
    chosen = torch.empty(num_rows, width, dtype=torch.float32, device=device)
    top_ids = torch.empty(num_rows, width, count, dtype=torch.int64, device=device)
    top = torch.empty(num_rows, width, count, dtype=torch.float32, device=device)
    path_stride = 0 if path is None else path.stride(0)
    where = (logits, tokens if path is None else path, tokens if asked is None else asked)
    sizes = (*logits.stride()[:2], path_stride, width, vocab_size)
    flags: dict[str, Any] = {"COUNT": count, "PATH": path is not None, "ASKED": asked is not None}
    for kernel, out in ((_rank_span, keys), (_weigh_span, sums)):
        grid = (num_rows * width, num_spans)
        launch(kernel, grid, *where, sums, out, *sizes, SPAN=span, num_warps=8, pdl=out is sums, **flags)
    launch(
        _logprobs_of_node,
        (num_rows * width,),
        *(*where, sums, keys, tokens, chosen, top_ids, top),
        *(*sizes, num_spans),
        KEYS=triton.next_power_of_2(num_spans * max(count, 1)),
        num_warps=8,
        pdl=True,
        **flags,
    )
    return chosen, top_ids, top


@triton.jit
def _logprobs_asked(row, asked, COUNT: tl.constexpr, ASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of the likeliest tokens a row asked for; below 0: no log-probabilities at all."""
    num = (row * 0 + COUNT).to(tl.int32)
    if ASKED:
        num = tl.minimum(tl.load(asked + row).to(tl.int32), COUNT)
    return num


@triton.jit
def _logits_at(logits, path, row, place, row_stride, node_stride, path_stride, PATH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The address of the logits at a place of a row's path."""
    node = place
    if PATH:
        node = tl.load(path + row * path_stride + place)
    return logits + row * row_stride + node * node_stride


@triton.jit(do_not_specialize=["path_stride", "width"])
def _rank_span(  # type: ignore[no-untyped-def]
    logits,
    path,
    asked,
    sums,
    keys,
    row_stride,
    node_stride,
    path_stride,
    width,
    vocab_size,
    SPAN: tl.constexpr,
    COUNT: tl.constexpr,
    PATH: tl.constexpr,
    ASKED: tl.constexpr,
):
    """The rank keys of the largest logits of one span, and its largest logit into the node's."""
    enter()
    entry, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, place = entry // width, entry % width
    num = _logprobs_asked(row, asked, COUNT, ASKED)
    if num >= 0:
        start = _logits_at(logits, path, row, place, row_stride, node_stride, path_stride, PATH)
        offsets = span * SPAN + tl.arange(0, SPAN)
        left = offsets < vocab_size
        score = tl.load(start + offsets, mask=left, other=0.0).to(tl.float32)
        tl.atomic_max(sums + entry, tl.max(tl.where(left, radix_key(score), 0)), sem="relaxed")
        key = tl.where(left, rank_key(score, offsets), NO_KEY)
        for rank in range(0, num):
            best = tl.max(key)
            tl.store(keys + (entry * tl.num_programs(1) + span) * COUNT + rank, best)
            key = tl.where(key == best, NO_KEY, key)


@triton.jit(do_not_specialize=["path_stride", "width"])
def _weigh_span(  # type: ignore[no-untyped-def]
    logits,
    path,
    asked,
    sums,
    out,
    row_stride,
    node_stride,
    path_stride,
    width,
    vocab_size,
    SPAN: tl.constexpr,
    COUNT: tl.constexpr,
    PATH: tl.constexpr,
    ASKED: tl.constexpr,
):
    """The masses of one span, added to the node's total."""
    enter()
    entry, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, place = entry // width, entry % width
    if _logprobs_asked(row, asked, COUNT, ASKED) >= 0:
        start = _logits_at(logits, path, row, place, row_stride, node_stride, path_stride, PATH)
        offsets = span * SPAN + tl.arange(0, SPAN)
        inside = offsets < vocab_size
        score = tl.load(start + offsets, mask=inside, other=0.0).to(tl.float32)
        mass = mass_of(score, score_of_radix_key(tl.load(sums + entry)))
        tl.atomic_add(out + tl.num_programs(0) + entry, tl.sum(tl.where(inside, mass, 0)), sem="relaxed")


@triton.jit(do_not_specialize=["path_stride", "width"])
def _logprobs_of_node(  # type: ignore[no-untyped-def]
    logits,
    path,
    asked,
    sums,
    keys,
    tokens,
    chosen,
    top_ids,
    top,
    row_stride,
    node_stride,
    path_stride,
    width,
    vocab_size,
    num_spans,
    KEYS: tl.constexpr,
    COUNT: tl.constexpr,
    PATH: tl.constexpr,
    ASKED: tl.constexpr,
):
    """Log-probabilities of one node: the chosen token's, and the largest with their ids."""
    enter()
    entry = tl.program_id(0).to(tl.int64)
    row, place = entry // width, entry % width
    num = _logprobs_asked(row, asked, COUNT, ASKED)
    if num >= 0:
        best = score_of_radix_key(tl.load(sums + entry)).to(tl.float64)
        total = tl.load(sums + tl.num_programs(0) + entry).to(tl.float64)
        norm = best + tl.log(total / MASS)
        start = _logits_at(logits, path, row, place, row_stride, node_stride, path_stride, PATH)
        token = tl.minimum(tl.maximum(tl.load(tokens + entry), 0), vocab_size - 1)
        tl.store(chosen + entry, (tl.load(start + token).to(tl.float64) - norm).to(tl.float32))
        if num > 0:
            slot = tl.arange(0, KEYS)
            is_key = (slot < num_spans * COUNT) & (slot % COUNT < num)
            left = tl.load(keys + entry * num_spans * COUNT + slot, mask=is_key, other=NO_KEY)
            for rank in range(0, num):
                largest = tl.max(left)
                tl.store(top_ids + entry * COUNT + rank, number_of_key(largest))
                value = score_of_key(largest).to(tl.float64) - norm
                tl.store(top + entry * COUNT + rank, value.to(tl.float32))
                left = tl.where(left == largest, NO_KEY, left)
