"""Places, positions and slots compiled for the CPU: one call each, where the torch twins need a dozen operations."""

import torch
from torch import Tensor

from peregrine.kernels.runtime.cpu_jit import arguments_of, claim, cpu_kernel, longs_at, words_of


def parts(*sizes: int) -> tuple[Tensor, ...]:
    """Uninitialised integers, cut into parts of these sizes."""
    return torch.empty(sum(sizes), dtype=torch.int64).split_with_sizes(sizes)


def window_places(past_lens: Tensor, depths: Tensor, table: Tensor, page_size: int, max_len: int) -> list[Tensor]:
    """The fields of `WindowPlaces`."""
    num_rows, num_nodes = depths.shape
    count = num_rows * num_nodes
    copied, positions, following, slots = parts(num_rows, count, count, count)
    inputs = past_lens.contiguous(), depths, table
    pointers = (x.data_ptr() for x in (*inputs, copied, positions, following, slots))
    _window(1, *pointers, depths.stride(0), table.stride(0), num_rows, num_nodes, page_size, max_len)
    return [copied, positions.view(num_rows, num_nodes), following.view(num_rows, num_nodes), slots]


def path_places(
    past_lens: Tensor,
    new_past_lens: Tensor,
    history: Tensor,
    table: Tensor,
    page_size: int,
    width: int,
    behind: int,
    max_len: int,
) -> list[Tensor]:
    """The fields of `PathPlaces`."""
    num_rows = past_lens.shape[0]
    count = num_rows * width
    tokens, positions, slots, live, live_positions = parts(count, count, count, num_rows, num_rows)
    inputs = past_lens.contiguous(), new_past_lens.contiguous(), history, table
    pointers = (x.data_ptr() for x in (*inputs, tokens, positions, slots, live, live_positions))
    sizes = history.stride(0), table.stride(0), num_rows, width, behind, page_size, max_len
    _path(1, *pointers, *sizes)
    return [tokens, positions.view(num_rows, width), slots, live, live_positions.view(num_rows, 1)]


def ahead_places(
    new_past_lens: Tensor, table: Tensor, page_size: int, first_place: int, depth: int, width: int, max_len: int
) -> list[Tensor]:
    """The fields of `AheadPlaces`."""
    num_rows, num_steps = new_past_lens.shape[0], depth - 1
    count = num_rows * width
    sizes = num_rows, num_steps * count, num_steps * count, depth * count
    base_lens, positions, slots, following = parts(*sizes)
    pointers = (x.data_ptr() for x in (new_past_lens.contiguous(), table, base_lens, positions, slots, following))
    _ahead(1, *pointers, table.stride(0), num_rows, depth, width, first_place, page_size, max_len)
    return [
        base_lens,
        positions.view(num_steps, num_rows, width),
        slots.view(num_steps, count),
        following.view(depth, num_rows, width),
    ]


@cpu_kernel("q" * 13)
def _window(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    past, depths, table, copied, positions, following, slots = arguments_of(block, 7)
    depth_stride, table_stride, rows, nodes = words[9], words[10], words[11], words[12]
    page_size, max_len = words[13], words[14]
    if claim(words) != 0:
        return
    for r in range(rows):
        begin, own = longs_at(past, rows)[r], longs_at(depths + r * depth_stride * 8, nodes)
        pages = longs_at(table + r * table_stride * 8, table_stride)
        longs_at(copied, rows)[r] = begin
        for i in range(nodes):
            n, place, position = r * nodes + i, begin + i, begin + own[i]
            longs_at(positions, rows * nodes)[n] = min(position, max_len - 1)
            longs_at(following, rows * nodes)[n] = position + 1
            longs_at(slots, rows * nodes)[n] = pages[place // page_size] * page_size + place % page_size


@cpu_kernel("q" * 16)
def _path(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    past, new_past, history, table, tokens, positions, slots, live, live_positions = arguments_of(block, 9)
    history_stride, table_stride, rows, width = words[11], words[12], words[13], words[14]
    behind, page_size, max_len = words[15], words[16], words[17]
    if claim(words) != 0:
        return
    for r in range(rows):
        begin, pages = longs_at(past, rows)[r], longs_at(table + r * table_stride * 8, table_stride)
        text = longs_at(history + r * history_stride * 8, history_stride)
        newest = max(longs_at(new_past, rows)[r] - begin - behind, 0)
        longs_at(live, rows)[r] = r * width + newest
        longs_at(live_positions, rows)[r] = min(begin + newest, max_len - 1)
        for i in range(width):
            n, place = r * width + i, begin + i
            longs_at(tokens, rows * width)[n] = text[place + behind]
            longs_at(positions, rows * width)[n] = min(place, max_len - 1)
            longs_at(slots, rows * width)[n] = pages[place // page_size] * page_size + place % page_size


@cpu_kernel("q" * 13)
def _ahead(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    new_past, table, base_lens, positions, slots, following = arguments_of(block, 6)
    table_stride, rows, depth, width = words[8], words[9], words[10], words[11]
    first_place, page_size, max_len = words[12], words[13], words[14]
    if claim(words) != 0:
        return
    total = depth * rows * width
    for r in range(rows):
        newest, pages = longs_at(new_past, rows)[r], longs_at(table + r * table_stride * 8, table_stride)
        begin = newest + first_place
        longs_at(base_lens, rows)[r] = begin
        for step in range(depth):
            for node in range(width):
                n = (step * rows + r) * width + node
                longs_at(following, total)[n] = newest + 1 + step
                if step < depth - 1:
                    place = begin + step * width + node
                    longs_at(positions, total)[n] = min(begin + step, max_len - 1)
                    longs_at(slots, total)[n] = pages[place // page_size] * page_size + place % page_size
