"""What the device is told of a recorded prompt chunk, by one copy: tokens, where each prompt is read on, and its pages.

    tokens | following | past_lens | q_starts | page_starts | live | 0, pages of the first row, of the second ...

Positions, slots and the page table follow from these on the device, so a recorded forward makes them itself. A row that
is not needed is empty; tokens from `live` on are padding, all at place 0 of the scratch page.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.window import Window
from peregrine.engine.prefill import PromptChunk
from peregrine.engine.rounds import IntArray
from peregrine.spec.types import Chunk

Words = TypeVar("Words", IntArray, Tensor)


def split(words: Words, num_tokens: int, num_rows: int) -> list[Words]:
    """The parts of the copy; each begins at a multiple of 16 bytes, which kernels are compiled for."""
    parts: list[Words] = []
    start = 0
    for size in (num_tokens, num_tokens, num_rows, num_rows + 1, num_rows + 1, 1):
        parts.append(words[start : start + size])
        start += size + size % 2
    parts.append(words[start:])
    return parts


def words_of(num_tokens: int, num_rows: int, num_pages: int) -> int:
    """The most words of the copy, if the rows have so many pages in all."""
    return 2 * num_tokens + 3 * num_rows + 9 + num_pages


def write_inputs(out: IntArray, chunks: Sequence[PromptChunk], num_tokens: int, num_rows: int, page_size: int) -> int:
    """Write the inputs of a forward of so many tokens and rows, padding included; returns the words written."""
    tokens, following, past_lens, q_starts, page_starts, live, pages = split(out, num_tokens, num_rows)
    pages[0], at, page = 0, 0, 1
    for row, chunk in enumerate(chunks):
        request, held = chunk.request, -(-chunk.end // page_size)
        ids = request.ids(chunk.start, min(chunk.end + 1, request.num_tokens))
        end = at + chunk.num_tokens
        tokens[at:end] = ids[: chunk.num_tokens]
        following[end - 1] = 0
        following[at : at + len(ids) - 1] = ids[1:]
        pages[page : page + held] = request.pages[:held]
        past_lens[row], q_starts[row], page_starts[row] = chunk.start, at, page
        at, page = end, page + held
    tokens[at:] = following[at:] = past_lens[len(chunks) :] = 0
    q_starts[len(chunks) : num_rows], q_starts[num_rows] = at, num_tokens
    page_starts[len(chunks) :], live[0] = page, at
    return len(out) - len(pages) + page


def read_inputs(packed: Tensor, window: Window, num_pages: int, page_size: int) -> Chunk:
    """The chunk from what was written, without taps, with a page table of `num_pages` columns. Nothing waits."""
    parts = split(packed, window.num_tokens, window.num_rows)
    tokens, following, past_lens, q_starts, page_starts, live, pages = parts
    column, order = (torch.arange(size, device=packed.device) for size in (num_pages, len(tokens)))
    at = page_starts[:-1, None] + column  # [R, P]
    table = pages[torch.where(at < page_starts[1:, None], at, 0)]
    row = torch.searchsorted(q_starts[1:], order, right=True)  # [N]
    positions = torch.where(order < live, (past_lens - q_starts[:-1])[row] + order, 0)
    slots = table[row, positions.div(page_size, rounding_mode="floor")] * page_size + positions % page_size
    metadata = AttentionMetadata(window, positions, q_starts, past_lens, table, page_size, slots, ancestors=None)
    return Chunk(tokens, following, None, metadata)
