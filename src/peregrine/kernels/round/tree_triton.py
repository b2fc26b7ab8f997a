"""Growing and selecting draft trees as Triton kernels: a program per row, and one per span of a node's scores."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.round.tree import Frontier, Growth
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.sampling.scores_triton import (
    LAST_ID,
    NO_KEY,
    divisor_of,
    key_of,
    noise_of,
    number_of_key,
    rank_key,
    score_of_key,
)

SPAN = 2048  # scores of a node that one program ranks


def grow(
    growth: Growth, logits: Tensor, positions: Tensor, before: Frontier | None, level: int, step: tuple[float, float]
) -> tuple[Tensor, ...]:
    """The fields of the next Frontier; the level's candidates are written to `growth`. `step`: STEP_COST and LEAST."""
    logits = logits.contiguous()
    rows, count, vocab_size = logits.shape
    width, ids, sampling, device = growth.width, growth.target_ids, growth.sampling, logits.device
    span = min(SPAN, triton.next_power_of_2(vocab_size))
    num_spans = triton.cdiv(vocab_size, span)
    keys = torch.empty(rows * count, num_spans, width, dtype=torch.int64, device=device)
    masses = torch.empty(2, rows * count, num_spans, dtype=torch.float32, device=device)
    launch(
        _best_children,
        (rows * count, num_spans),
        *(logits, positions, sampling.temperature, sampling.seeds, keys if ids is None else ids, keys, masses),
        *(*positions.stride(), count, vocab_size),
        WIDTH=width,
        SPAN=span,
        SAMPLED=growth.features.sampled,
        NAMED=ids is not None,
        num_warps=4,
    )
    tokens, origins = (torch.empty(rows * width, dtype=torch.int64, device=device) for _ in range(2))
    numbers, words = (torch.empty(rows, width, dtype=torch.int64, device=device) for _ in range(2))
    scores = torch.empty(rows, width, dtype=torch.float32, device=device)
    old = (scores, numbers, words) if before is None else (before.scores, before.numbers, before.words)
    launch(
        _grow,
        (rows,),
        *(keys, masses, keys if ids is None else ids, growth.scores, growth.tokens, growth.parents),
        *(*old, tokens, origins, scores, numbers, words),
        *(count, num_spans, growth.scores.shape[1], growth.level(level).start, level, *step),
        WIDTH=width,
        NODES=max(2, triton.next_power_of_2(count)),
        CHILDREN=max(2, triton.next_power_of_2(width)),
        KEYS=max(2, triton.next_power_of_2(num_spans * width)),
        SPANS=max(2, triton.next_power_of_2(num_spans)),
        NAMED=ids is not None,
        FIRST=before is None,
        num_warps=8,
    )
    return tokens, origins, scores, numbers, words


def select(growth: Growth, nodes: int, depth: int) -> tuple[Tensor, ...]:
    """The window's tokens, parents, depths and ancestor words; see tree.py."""
    rows, count = growth.scores.shape
    tokens = torch.empty(rows, nodes - 1, dtype=torch.int64, device=growth.scores.device)
    parents, depths, words = torch.empty(3, rows, nodes, dtype=torch.int64, device=growth.scores.device)
    launch(
        _select,
        (rows,),
        *(growth.scores, growth.tokens, growth.parents, tokens, parents, depths, words),
        *(count, nodes, growth.width),
        DEPTH=depth,
        COUNT=max(2, triton.next_power_of_2(count)),
        num_warps=4,
    )
    return tokens, parents, depths, words


@triton.jit(do_not_specialize=["position_row_stride", "position_node_stride", "num_nodes"])
def _best_children(  # type: ignore[no-untyped-def]
    logits,
    positions,
    temperatures,
    seeds,
    ids,
    keys,
    masses,
    position_row_stride,
    position_node_stride,
    num_nodes,
    vocab_size,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    SAMPLED: tl.constexpr,
    NAMED: tl.constexpr,
):
    """The keys of a span's WIDTH best pick scores, its largest score, and the sum of exp(score - largest)."""
    node, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, place = node // num_nodes, node % num_nodes
    offsets = span * SPAN + tl.arange(0, SPAN)
    left = offsets < vocab_size
    score = tl.load(logits + node * vocab_size + offsets, mask=left, other=0.0).to(tl.float32)
    if SAMPLED:
        temperature = tl.load(temperatures + row)
        score = tl.math.div_rn(score, divisor_of(temperature))
        if temperature > 0:
            position = tl.load(positions + row * position_row_stride + place * position_node_stride)
            token_ids = offsets.to(tl.int64)
            if NAMED:
                token_ids = tl.load(ids + offsets, mask=left, other=0)
            score += noise_of(key_of(tl.load(seeds + row), position), token_ids)
    score = tl.where(left & (score == score), score, float("-inf"))
    top = tl.maximum(tl.max(score), -3.0e38)  # finite: the difference of two infinities is not a number
    num_spans = tl.num_programs(1)
    entry = node * num_spans + span
    tl.store(masses + entry, top)
    tl.store(masses + tl.num_programs(0) * num_spans + entry, tl.sum(tl.exp(score - top)))
    for rank in tl.static_range(WIDTH):
        best = tl.max(tl.where(left, score, float("-inf")))
        first = tl.min(tl.where(left & (score == best), offsets, LAST_ID))
        tl.store(keys + entry * WIDTH + rank, tl.where(first == LAST_ID, NO_KEY, rank_key(best, first)))
        left = left & (offsets != first)


@triton.jit(do_not_specialize=["count", "num_spans", "num_candidates", "first_column", "level"])
def _grow(  # type: ignore[no-untyped-def]
    keys,
    masses,
    ids,
    all_scores,
    all_tokens,
    all_parents,
    old_scores,
    old_numbers,
    old_words,
    tokens,
    origins,
    scores,
    numbers,
    words,
    count,
    num_spans,
    num_candidates,
    first_column,
    level,
    step_cost,
    least,
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,
    CHILDREN: tl.constexpr,
    KEYS: tl.constexpr,
    SPANS: tl.constexpr,
    NAMED: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Of one row: the WIDTH best children of each of its `count` nodes, and of those the frontier."""
    row = tl.program_id(0).to(tl.int64)
    node, child = tl.arange(0, NODES), tl.arange(0, CHILDREN)
    is_node = node < count
    flat_node = row * count + node

    # log(sum of exp(score)) of every node.
    span = tl.arange(0, SPANS)
    entry = flat_node[:, None] * num_spans + span[None, :]
    is_entry = is_node[:, None] & (span < num_spans)[None, :]
    tops = tl.load(masses + entry, mask=is_entry, other=-3.0e38)
    sums = tl.load(masses + tl.num_programs(0) * count * num_spans + entry, mask=is_entry, other=0.0)
    top = tl.max(tops, axis=1)  # [n]
    total = tl.sum(sums * tl.exp(tops - top[:, None]), axis=1)
    norm = top + tl.log(tl.where(is_node, total, 1.0))

    # The best children of every node, largest first.
    slot = tl.arange(0, KEYS)
    is_key = is_node[:, None] & (slot < num_spans * WIDTH)[None, :]
    left = tl.load(keys + flat_node[:, None] * (num_spans * WIDTH) + slot[None, :], mask=is_key, other=NO_KEY)
    best = tl.full([NODES, CHILDREN], NO_KEY, tl.int64)
    for rank in tl.static_range(WIDTH):
        largest = tl.max(left, axis=1)
        best = tl.where(child[None, :] == rank, largest[:, None], best)
        left = tl.where(left == largest[:, None], NO_KEY, left)
    inside = is_node[:, None] & (child < WIDTH)[None, :]
    token = tl.where(inside, number_of_key(best), 0)
    if NAMED:
        token = tl.load(ids + token, mask=inside, other=0)
    score = score_of_key(best) - norm[:, None]
    score = tl.where(score > least, score, least) - step_cost  # NaN is not above it
    number = tl.zeros([NODES], tl.int64)
    if not FIRST:
        score += tl.load(old_scores + flat_node, mask=is_node, other=0.0)[:, None]
        number = tl.load(old_numbers + flat_node, mask=is_node, other=0)
    index = node[:, None] * WIDTH + child[None, :]  # within the level
    column = row * num_candidates + first_column + index
    tl.store(all_scores + column, score, mask=inside)
    tl.store(all_tokens + column, token, mask=inside)
    tl.store(all_parents + column, tl.zeros([NODES, CHILDREN], tl.int64) + number[:, None], mask=inside)

    # The best of them all.
    ranked = tl.where(inside, rank_key(score, index), NO_KEY)
    front = tl.full([CHILDREN], NO_KEY, tl.int64)
    for rank in tl.static_range(WIDTH):
        largest = tl.max(tl.max(ranked, axis=1), axis=0)
        front = tl.where(child == rank, largest, front)
        ranked = tl.where(ranked == largest, NO_KEY, ranked)
    is_front = child < WIDTH
    chosen = tl.where(is_front, number_of_key(front), 0)
    origin = chosen // WIDTH
    place = (origin * CHILDREN + chosen % WIDTH).to(tl.int32)
    word = tl.full([CHILDREN], 1, tl.int64) << (level * WIDTH + child)
    if not FIRST:
        word = word | tl.load(old_words + row * WIDTH + origin, mask=is_front, other=0)
    target = row * WIDTH + child
    picked = tl.gather(tl.reshape(token, [NODES * CHILDREN]), place, axis=0)
    tl.store(tokens + target, picked, mask=is_front)
    tl.store(origins + target, row * count + origin, mask=is_front)
    tl.store(scores + target, score_of_key(front), mask=is_front)
    tl.store(numbers + target, chosen + first_column + 1, mask=is_front)
    tl.store(words + target, word, mask=is_front)


@triton.jit(do_not_specialize=["count", "num_nodes", "width"])
def _select(  # type: ignore[no-untyped-def]
    all_scores,
    all_tokens,
    all_parents,
    tokens,
    parents,
    depths,
    words,
    count,
    num_nodes,
    width,
    DEPTH: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The window of one row. Entry i of a sorted array is that of node i + 1."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, COUNT)
    inside = index < count
    score = tl.load(all_scores + row * count + index, mask=inside, other=0.0)
    key = tl.where(inside, rank_key(score, index), NO_KEY)
    ranked = tl.sort(key, descending=True)
    least = tl.max(tl.where(index == num_nodes - 2, ranked, NO_KEY))
    is_kept = inside & (key >= least)
    node_of = tl.cumsum(is_kept.to(tl.int32))  # of a candidate that is kept
    kept = tl.sort(tl.where(is_kept, index, COUNT))

    is_node = index < num_nodes - 1
    source = row * count + tl.where(is_node, kept, 0)
    parent = tl.load(all_parents + source, mask=is_node, other=0).to(tl.int32)
    parent = tl.where(parent > 0, tl.gather(node_of, tl.maximum(parent - 1, 0), axis=0), 0)
    own = tl.full([COUNT], 2, tl.int64) << tl.minimum(index, 62)
    word = own | 1
    for _ in tl.static_range(DEPTH):
        word = own | tl.where(parent > 0, tl.gather(word, tl.maximum(parent - 1, 0), axis=0), 1)
    tl.store(tokens + row * (num_nodes - 1) + index, tl.load(all_tokens + source), mask=is_node)

    target = row * num_nodes + 1 + index
    depth = tl.where(kept < width, 1, (kept - width) // (width * width) + 2)
    tl.store(parents + target, parent.to(tl.int64), mask=is_node)
    tl.store(depths + target, depth.to(tl.int64), mask=is_node)
    tl.store(words + target, word, mask=is_node)
    root = row * num_nodes
    tl.store(parents + root, root * 0)
    tl.store(depths + root, root * 0)
    tl.store(words + root, root * 0 + 1)
