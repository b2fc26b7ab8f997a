"""The bookkeeping of a round as Triton kernels: verdict, places, drafts, n-gram look-up, trees.

Most are one launch with one program per row, where the torch twins need tens of small operations.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.round import verdict
from peregrine.kernels.round.tree import Frontier, Growth
from peregrine.kernels.round.verdict import Ends, Nodes, Verdict
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter
from peregrine.kernels.sampling.triton import (
    LAST_ID,
    NO_KEY,
    divisor_of,
    key_of,
    noise_of,
    number_of_key,
    rank_key,
    score_of_key,
)

PLACES_BLOCK = 128  # entries of a program that computes places
MOVE_CHUNK = 512  # elements of a cache entry that one program moves
TEXT_BLOCK = 4096  # tokens of the history that are compared at once
SPAN = 2048  # scores of a node that one program ranks
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # cache entries are moved as plain words of their size
HEADER = tl.constexpr(verdict.HEADER)
NONE, STOP = tl.constexpr(verdict.FINISH_NONE), tl.constexpr(verdict.FINISH_STOP)
LENGTH, FAULT = tl.constexpr(verdict.FINISH_LENGTH), tl.constexpr(verdict.FINISH_FAULT)


def commit(choices: Tensor, nodes: Nodes, ends: Ends, history: Tensor, depth: int) -> Tensor:
    """The verdict's table [R, HEADER + 2 W]; history, past lengths, done flags and roots are written in place."""
    num_rows, num_nodes = choices.shape
    width = depth + 1
    table = torch.empty(
        num_rows, verdict.HEADER + 2 * width, dtype=torch.int64, device=choices.device
    )  # [R, HEADER + 2 W]
    launch(
        _commit,
        (num_rows,),
        *(choices, nodes.tokens, nodes.parents, nodes.depths, nodes.ancestors, nodes.offered),
        *(ends.past_lens, ends.limits, ends.stop_ids, ends.done.view(torch.uint8), history, table),
        *(nodes.tokens.stride(0), nodes.parents.stride(0), history.stride(0), ends.stop_ids.stride(0)),
        *(num_nodes, width, ends.stop_ids.shape[1]),
        NODES=max(2, triton.next_power_of_2(num_nodes)),
        STOPS=triton.next_power_of_2(ends.stop_ids.shape[1]),
        num_warps=1,  # a row's lengths are read and written: threads of one warp do both in step
        pdl=True,
    )
    return table


@triton.jit(do_not_specialize=["token_stride", "link_stride", "num_nodes", "width", "num_stops"])
def _commit(  # type: ignore[no-untyped-def]
    choices,
    tokens,
    parents,
    depths,
    ancestors,
    offered,
    past_lens,
    limits,
    stop_ids,
    done,
    history,
    table,
    token_stride,
    link_stride,
    history_stride,
    stop_stride,
    num_nodes,
    width,
    num_stops,
    NODES: tl.constexpr,
    STOPS: tl.constexpr,
):
    enter()
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES).to(tl.int64)
    inside = node < num_nodes
    token = tl.load(tokens + row * token_stride + node, mask=inside, other=-2)
    parent = tl.load(parents + row * link_stride + node, mask=inside, other=0)
    depth = tl.load(depths + row * link_stride + node, mask=inside, other=0)
    word = tl.load(ancestors + row * link_stride + node, mask=inside, other=0)
    choice = tl.load(choices + row * num_nodes + node, mask=inside, other=0)
    asked = tl.load(choices + row * num_nodes + parent, mask=inside, other=-1)
    deepest, past = tl.load(offered + row), tl.load(past_lens + row)
    room = tl.load(limits + row) - past - 1
    ended_before = tl.load(done + row) != 0

    # Which nodes are on the path, and at which place; the others follow it in order.
    on_offer = inside & (depth > 0) & (depth <= deepest)
    right = (node == 0) | (on_offer & (token == asked))
    bits = tl.sum(tl.where(right, tl.full([NODES], 1, tl.int64) << node, 0))
    accepted = inside & ((word & bits) == word)
    length = tl.sum(accepted.to(tl.int64))
    spare = inside & ~accepted
    place = tl.where(accepted, tl.cumsum(accepted.to(tl.int64)) - 1, length + tl.cumsum(spare.to(tl.int64)) - 1)
    on_path = inside & (place < width)

    # The first token that ends the row.
    stop = tl.arange(0, STOPS)
    stops = tl.load(stop_ids + row * stop_stride + stop, mask=stop < num_stops, other=-1)
    is_stop = tl.sum((choice[:, None] == stops[None, :]).to(tl.int32), axis=1) > 0
    fault = tl.min(tl.where(accepted & (choice < 0), place, width))
    first = tl.minimum(fault, tl.min(tl.where(accepted & is_stop & (choice >= 0), place, width)))
    is_fault = (first < width) & (fault == first)
    accept = tl.minimum(length, first + 1) - is_fault.to(tl.int64)  # a fault has no token
    finish = tl.where(is_fault, FAULT, tl.where(first < width, STOP, NONE))
    full = (accept > room) | ((accept == room) & (finish != STOP))
    finish = tl.where(ended_before, NONE, tl.where(full, LENGTH, finish)).to(tl.int64)
    accept = tl.where(ended_before, 0, tl.minimum(accept, room))
    drafted = tl.where(ended_before, 0, tl.sum(on_offer.to(tl.int64)))

    line = table + row * (HEADER + 2 * width)
    valid = tl.maximum(choice, 0)
    tl.store(line, accept)
    tl.store(line + 1, tl.minimum(length - 1, accept))
    tl.store(line + 2, drafted)
    tl.store(line + 3, finish)
    tl.store(line + HEADER + place, valid, mask=on_path)
    tl.store(line + HEADER + width + place, node, mask=on_path)

    newest = tl.sum(tl.where(accepted & (place == accept - 1), choice, 0))
    tl.store(history + row * history_stride + past + 1 + place, valid, mask=on_path)
    tl.store(past_lens + row, past + accept)
    tl.store(tokens + row * token_stride, newest, mask=accept > 0)
    tl.store(done + row, (ended_before | (finish != NONE)).to(tl.uint8))


def window_places(past_lens: Tensor, depths: Tensor, table: Tensor, page_size: int, max_len: int) -> tuple[Tensor, ...]:
    """The fields of WindowPlaces."""
    num_rows, num_nodes = depths.shape
    count = num_rows * num_nodes
    past_copy, positions, next_positions, slots = _cut(past_lens, num_rows, count, count, count)
    launch(
        _window_places,
        (triton.cdiv(count, PLACES_BLOCK),),
        *(past_lens, depths, table, past_copy, positions, next_positions, slots),
        *(depths.stride(0), table.stride(0), page_size, max_len, num_nodes, count),
        BLOCK=PLACES_BLOCK,
        pdl=True,
    )
    return past_copy, positions.view(depths.shape), next_positions.view(depths.shape), slots


def path_places(
    past_lens: Tensor,
    new_past_lens: Tensor,
    history: Tensor,
    table: Tensor,
    page_size: int,
    width: int,
    behind: int,
    max_len: int,
) -> tuple[Tensor, ...]:
    """The fields of PathPlaces."""
    num_rows = past_lens.shape[0]
    count = num_rows * width
    tokens, positions, slots, live, live_positions = _cut(past_lens, count, count, count, num_rows, num_rows)
    launch(
        _path_places,
        (triton.cdiv(count, PLACES_BLOCK),),
        *(past_lens, new_past_lens, history, table, tokens, positions, slots, live, live_positions),
        *(history.stride(0), table.stride(0), page_size, max_len, behind, width, count),
        BLOCK=PLACES_BLOCK,
        pdl=True,
    )
    return tokens, positions.view(num_rows, width), slots, live, live_positions.view(num_rows, 1)


def ahead_places(
    new_past_lens: Tensor, table: Tensor, page_size: int, first_place: int, depth: int, width: int, max_len: int
) -> tuple[Tensor, ...]:
    """The fields of AheadPlaces."""
    num_rows, num_steps = new_past_lens.shape[0], depth - 1
    step_size = num_rows * width
    base_lens, positions, slots, next_positions = _cut(
        new_past_lens, num_rows, num_steps * step_size, num_steps * step_size, depth * step_size
    )
    launch(
        _ahead_places,
        (triton.cdiv(depth * step_size, PLACES_BLOCK),),
        *(new_past_lens, table, base_lens, positions, slots, next_positions),
        *(table.stride(0), page_size, max_len, first_place, width, step_size, depth),
        BLOCK=PLACES_BLOCK,
        pdl=True,
    )
    shape = num_rows, width
    return (
        base_lens,
        positions.view(num_steps, *shape),
        slots.view(num_steps, step_size),
        next_positions.view(depth, *shape),
    )


def _cut(like: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """Dense i64 pieces of one allocation."""
    pieces: tuple[Tensor, ...] = torch.empty(sum(sizes), dtype=torch.int64, device=like.device).split(sizes)  # type: ignore[no-untyped-call]
    return pieces


@triton.jit
def slot_of(table_row, place, page_size, inside):  # type: ignore[no-untyped-def]
    """The slot of a place, by the row of the page table that starts at `table_row`."""
    return tl.load(table_row + place // page_size, mask=inside, other=0) * page_size + place % page_size


@triton.jit(do_not_specialize=["depth_stride", "num_nodes", "count"])
def _window_places(  # type: ignore[no-untyped-def]
    past_lens,
    depths,
    table,
    past_copy,
    positions,
    next_positions,
    slots,
    depth_stride,
    table_stride,
    page_size,
    max_len,
    num_nodes,
    count,
    BLOCK: tl.constexpr,
):
    enter()
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    row, node = entry // num_nodes, entry % num_nodes
    past = tl.load(past_lens + row, mask=inside, other=0)
    position = past + tl.load(depths + row * depth_stride + node, mask=inside, other=0)
    tl.store(past_copy + row, past, mask=inside & (node == 0))
    tl.store(positions + entry, tl.minimum(position, max_len - 1), mask=inside)
    tl.store(next_positions + entry, position + 1, mask=inside)
    tl.store(slots + entry, slot_of(table + row * table_stride, past + node, page_size, inside), mask=inside)


@triton.jit(do_not_specialize=["behind", "width", "count"])
def _path_places(  # type: ignore[no-untyped-def]
    past_lens,
    new_past_lens,
    history,
    table,
    tokens,
    positions,
    slots,
    live,
    live_positions,
    history_stride,
    table_stride,
    page_size,
    max_len,
    behind,
    width,
    count,
    BLOCK: tl.constexpr,
):
    enter()
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    row, index = entry // width, entry % width
    past = tl.load(past_lens + row, mask=inside, other=0)
    newest = tl.load(new_past_lens + row, mask=inside, other=0)
    alive = tl.maximum(newest - past - behind, 0)
    token = tl.load(history + row * history_stride + past + index + behind, mask=inside, other=0)
    tl.store(tokens + entry, token, mask=inside)
    tl.store(positions + entry, tl.minimum(past + index, max_len - 1), mask=inside)
    tl.store(slots + entry, slot_of(table + row * table_stride, past + index, page_size, inside), mask=inside)
    tl.store(live + row, row * width + alive, mask=inside & (index == 0))
    tl.store(live_positions + row, tl.minimum(past + alive, max_len - 1), mask=inside & (index == 0))


@triton.jit(do_not_specialize=["first_place", "width", "step_size", "depth"])
def _ahead_places(  # type: ignore[no-untyped-def]
    new_past_lens,
    table,
    base_lens,
    positions,
    slots,
    next_positions,
    table_stride,
    page_size,
    max_len,
    first_place,
    width,
    step_size,
    depth,
    BLOCK: tl.constexpr,
):
    enter()
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < depth * step_size
    is_step = entry < (depth - 1) * step_size
    step, row, node = entry // step_size, entry % step_size // width, entry % width
    newest = tl.load(new_past_lens + row, mask=inside, other=0)
    base = newest + first_place
    tl.store(base_lens + row, base, mask=inside & (step == 0) & (node == 0))
    tl.store(next_positions + entry, newest + 1 + step, mask=inside)
    tl.store(positions + entry, tl.minimum(base + step, max_len - 1), mask=is_step)
    place = base + step * width + node
    tl.store(slots + entry, slot_of(table + row * table_stride, place, page_size, is_step), mask=is_step)


def keep_drafts(
    window_tokens: Tensor,
    offered: Tensor,
    caps: Tensor,
    tokens: Tensor,
    depths: Tensor | int,
    links: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """One program per row; links are a tree's parents, depths and ancestors, or nothing."""
    num_rows, num_nodes = window_tokens.shape
    ends = [end for pair in links for end in pair] or [tokens] * 6
    strides = (links[0][0].stride(0), links[0][1].stride(0)) if links else (0, 0)
    launch(
        _keep_drafts,
        (num_rows,),
        *(window_tokens, offered, caps, tokens, caps if isinstance(depths, int) else depths, *ends),
        *(window_tokens.stride(0), *tokens.stride(), *strides, num_nodes),
        *(depths if isinstance(depths, int) else 0,),
        NODES=max(2, triton.next_power_of_2(num_nodes)),
        SAME_DEPTH=isinstance(depths, int),
        LINKED=bool(links),
        num_warps=1,
        pdl=True,
    )


def move_path(stores: Sequence[Tensor], past_lens: Tensor, said: Verdict, table: Tensor, page_size: int) -> None:
    """A program moves one piece of every entry of a row's path in one layer of keys or values."""
    words = [store.view(WORDS[store.element_size()]).flatten(2) for store in stores]  # [L, slots, X] each
    keys, values = words[0], words[-1]
    num_layers, _, size = keys.shape
    launch(
        _move_path,
        (past_lens.shape[0], len(stores) * num_layers, triton.cdiv(size, MOVE_CHUNK)),
        *(keys, values, past_lens, said.table, table),
        *(said.width, keys.stride(0), table.stride(0), page_size, size),
        WIDTH=max(2, triton.next_power_of_2(said.width)),
        CHUNK=MOVE_CHUNK,
        STORES=len(stores),
    )


@triton.jit(
    do_not_specialize=[
        "window_stride",
        "token_row_stride",
        "token_stride",
        "from_stride",
        "link_stride",
        "num_nodes",
        "same_depth",
    ]
)
def _keep_drafts(  # type: ignore[no-untyped-def]
    window_tokens,
    offered,
    caps,
    tokens,
    depths,
    parents_from,
    parents,
    depths_from,
    node_depths,
    ancestors_from,
    ancestors,
    window_stride,
    token_row_stride,
    token_stride,
    from_stride,
    link_stride,
    num_nodes,
    same_depth,
    NODES: tl.constexpr,
    SAME_DEPTH: tl.constexpr,
    LINKED: tl.constexpr,
):
    enter()
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    inside = node < num_nodes
    is_draft = inside & (node > 0)
    token = tl.load(tokens + row * token_row_stride + (node - 1) * token_stride, mask=is_draft, other=0)
    tl.store(window_tokens + row * window_stride + node, token, mask=is_draft)
    cap = tl.load(caps + row)
    if SAME_DEPTH:
        tl.store(offered + row, tl.minimum(cap, same_depth))
    else:
        tl.store(offered + row, tl.minimum(cap, tl.load(depths + row)))
    if LINKED:
        source, target = row * from_stride + node, row * link_stride + node
        tl.store(parents + target, tl.load(parents_from + source, mask=inside, other=0), mask=inside)
        tl.store(node_depths + target, tl.load(depths_from + source, mask=inside, other=0), mask=inside)
        tl.store(ancestors + target, tl.load(ancestors_from + source, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["width"])
def _move_path(  # type: ignore[no-untyped-def]
    keys,
    values,
    past_lens,
    verdicts,
    table,
    width,
    layer_stride,
    table_stride,
    page_size,
    size,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    STORES: tl.constexpr,
):
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1) // STORES
    store = keys
    if tl.program_id(1) % STORES == 1:
        store = values
    store += layer.to(tl.int64) * layer_stride
    line = verdicts + row * (HEADER + 2 * width)
    place = tl.arange(0, WIDTH)
    node = tl.load(line + HEADER + width + place, mask=place < width, other=0)
    moves = (place < tl.load(line)) & (node != place)  # the root, and often more of the path, is in place already
    past = tl.load(past_lens + row)
    source = slot_of(table + row * table_stride, past + node, page_size, moves)
    target = slot_of(table + row * table_stride, past + place, page_size, moves)
    element = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = moves[:, None] & (element < size)[None, :]
    entries = tl.load(store + source[:, None] * size + element[None, :], mask=inside, other=0)
    tl.debug_barrier()  # one thread's target may be another's source
    tl.store(store + target[:, None] * size + element[None, :], entries, mask=inside)


def find_repeats(history: Tensor, newest: Tensor, count: int, max_gram: int, min_gram: int) -> tuple[Tensor, Tensor]:
    """Tokens [R, count] and how many of them are text [R]; without a match the tokens are those at the start."""
    num_rows, num_places = history.shape
    tokens = torch.empty(num_rows, count, dtype=torch.int64, device=history.device)
    known = torch.empty(num_rows, dtype=torch.int64, device=history.device)
    launch(
        _find_repeats,
        (num_rows,),
        *(history, newest, tokens, known, history.stride(0), num_places, count),
        COUNT=max(2, triton.next_power_of_2(count)),
        MAX_GRAM=max_gram,
        MIN_GRAM=min_gram,
        BLOCK=min(TEXT_BLOCK, triton.next_power_of_2(num_places)),
        num_warps=8,
    )
    return tokens, known


@triton.jit(do_not_specialize=["count"])
def _find_repeats(  # type: ignore[no-untyped-def]
    history,
    newest_places,
    tokens,
    known,
    history_stride,
    num_places,
    count,
    COUNT: tl.constexpr,
    MAX_GRAM: tl.constexpr,
    MIN_GRAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    text = history + row * history_stride
    newest = tl.load(newest_places + row)
    start = newest * 0
    best = start - 1
    while start < newest:
        place = start + tl.arange(0, BLOCK)
        alive = place < newest
        run = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(MAX_GRAM):
            wanted = tl.load(text + newest - back, mask=newest >= back, other=0)
            alive = alive & (place >= back) & (newest >= back)
            alive = alive & (tl.load(text + place - back, mask=alive, other=-1) == wanted)
            run += alive.to(tl.int64)
        # The longest run wins, then the latest place.
        best = tl.maximum(best, tl.max(tl.where(run >= MIN_GRAM, run * num_places + place, -1)))
        start += BLOCK
    place = tl.where(best >= 0, best % num_places, 0)
    order = tl.arange(0, COUNT)
    following = tl.minimum(place + 1 + order, num_places - 1)
    tl.store(tokens + row * count + order, tl.load(text + following), mask=order < count)
    tl.store(known + row, tl.where(best >= 0, tl.minimum(newest - place, count), 0))


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
