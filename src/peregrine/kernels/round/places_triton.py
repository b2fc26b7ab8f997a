"""Positions and slots of a round as Triton kernels, one launch each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter

PLACES_BLOCK = 128  # entries of a program that computes places


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
