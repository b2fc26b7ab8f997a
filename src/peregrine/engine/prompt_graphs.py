"""Recorded forwards of prompt chunks: a chunk costs the host one copy and one launch, whatever its length.

Launched kernel by kernel, a chunk takes the host 20 to 45 ms, which is longer than the device needs for a short one. So
forwards are recorded for some numbers of tokens and rows, and a chunk is padded to the next one. What is left over is a
row on the scratch page whose tokens are all at place 0; a row that is not needed is empty. Padding changes no bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.window import Window
from peregrine.engine.graphs import Graphs
from peregrine.engine.prefill import ChunkPlaces, PromptChunk, chunk_tokens, page_rows
from peregrine.engine.rounds import IntArray, Rounds
from peregrine.hardware import upload
from peregrine.models.parallel import on_every_rank
from peregrine.spec.types import Chunk

LEAST_TOKENS = 64  # of the smallest recorded chunk
MOST_ROWS, ROW_TOKENS = 32, 48  # of a recorded chunk: prompts, and tokens that each has on average at least
MOST_PADDING = 1 / 64  # of a chunk that takes the device longer than the host
HOST_BOUND = 1024  # tokens of a chunk for which the host would take longer: any padding is worth it


def chunk_sizes(most: int) -> list[int]:
    """Tokens of recorded chunks: powers of two, from 256 on one between each two, and the largest chunk."""
    powers = [LEAST_TOKENS << i for i in range(12)]
    between = [size * 3 // 2 for size in powers if size >= 256]
    return sorted({size for size in (*powers, *between) if size < most} | {most})


def rows_of(num_tokens: int) -> int:
    """Prompts that share a recorded chunk of this many tokens."""
    return max(1, min(MOST_ROWS, num_tokens // ROW_TOKENS))


def size_for(sizes: Sequence[int], num_tokens: int, num_rows: int) -> int | None:
    """The recorded size for a chunk of this many tokens and prompts; None: it is launched kernel by kernel."""
    size = next((size for size in sizes if size >= num_tokens and rows_of(size) >= num_rows), None)
    if size is not None and size > HOST_BOUND and size > num_tokens * (1 + MOST_PADDING):
        return None
    return size


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a recorded chunk of N tokens and R rows, the padding's included, reads: views of the shared buffers."""

    packed: Tensor  # [4 N + 2 R + 1]: all of these but the table
    tokens: Tensor  # [N]
    following: Tensor  # [N]
    metadata: AttentionMetadata


class PromptGraphs:
    """The recorded chunks of an engine; every rank has them."""

    def __init__(self, rounds: Rounds, graphs: Graphs[Any], most: int, num_pages: int) -> None:
        """Chunks have up to `most` tokens, a request up to `num_pages` pages."""
        self.target, self.drafter, self.graphs, self.ranks = rounds.target, rounds.drafter, graphs, rounds.ranks
        self.device, self.page_size = rounds.device, rounds.seats.page_size
        self.sizes, rows = chunk_sizes(most), rows_of(most) + 1
        self.most = most
        self._table = torch.zeros(rows, num_pages, dtype=torch.int64, device=self.device)
        self._packed = torch.zeros(4 * most + 2 * rows + 1, dtype=torch.int64, device=self.device)
        # The chunks of a long prompt, which fill the largest, have a graph of one row: attention can plan it better.
        self.inputs = {(most, 1): self._views(most, 1)}
        self.inputs |= {(size, rows_of(size) + 1): self._views(size, rows_of(size) + 1) for size in self.sizes}

    def _views(self, size: int, rows: int) -> Inputs:
        packed = self._packed[: 4 * size + 2 * rows + 1]
        tokens, following, positions, slots, past_lens, q_starts = torch.split_with_sizes(
            packed, [*[size] * 4, rows, rows + 1]
        )
        metadata = AttentionMetadata(
            window=Window(num_rows=rows, num_tokens=size, max_q_len=size, q_len=None),
            positions=positions,
            q_starts=q_starts,
            past_lens=past_lens,
            page_table=self._table[:rows],
            page_size=self.page_size,
            slots=slots,
            ancestors=None,
        )
        return Inputs(packed, tokens, following, metadata)

    def record(self) -> Iterator[int]:
        """Record every size; yields the bytes each one took. The chunks really run once, all padding."""
        for shape in sorted(self.inputs, reverse=True):  # smaller graphs reuse the memory of larger ones
            self._fill(*shape, [])
            yield self.graphs.record(("chunk", *shape), partial(self.forward, *shape))

    @on_every_rank("prompts")
    def forward(self, size: int, rows: int) -> None:
        """Read a chunk whose inputs were written."""
        inputs = self.inputs[size, rows]
        taps = self.target.fill(inputs.tokens, inputs.metadata, self.drafter.taps)
        self.drafter.absorb(Chunk(inputs.tokens, inputs.following, taps, inputs.metadata))

    def replay(self, chunks: Sequence[PromptChunk]) -> bool:
        """Read the chunks by a recorded forward; False if none is recorded that they fill well enough."""
        count = sum(chunk.end - chunk.start for chunk in chunks)
        size = size_for(self.sizes, count, len(chunks))
        if size is None:
            return False
        rows = 1 if len(chunks) == 1 and count == self.most else rows_of(size) + 1
        self._fill(size, rows, chunks)
        self.graphs.replay(("chunk", size, rows))
        return True

    def _fill(self, size: int, rows: int, chunks: Sequence[PromptChunk]) -> None:
        """Make the inputs of a recorded chunk."""
        inputs, used, is_cuda = self.inputs[size, rows], len(chunks), self.device.type == "cuda"
        packed = torch.zeros(len(inputs.packed), dtype=torch.int64, pin_memory=is_cuda)
        tokens, following, positions, slots, past_lens, q_starts = np.split(
            packed.numpy(),
            np.cumsum([*[size] * 4, rows]),  # as in `_views`
        )
        pages = np.zeros((0, 0), dtype=np.int64)
        count = 0
        if used:
            places = ChunkPlaces.of(chunks, self.page_size)
            count = len(places.positions)
            tokens[:count], following[:count] = chunk_tokens(chunks), chunk_tokens(chunks, 1)
            positions[:count], slots[:count], past_lens[:used] = places.positions, places.slots, places.starts
            q_starts[1 : used + 1] = places.lens.cumsum()
            pages = page_rows(chunks, self.page_size)
        q_starts[used + 1 : rows], q_starts[rows] = count, size  # empty rows, then the padding
        self.write(size, rows, packed, pages)

    @on_every_rank("prompts", at_once=False)
    def write(self, size: int, rows: int, packed: Tensor, pages: IntArray) -> None:
        """Copy the inputs of a recorded chunk to where it reads them: all but the table, and the rows of that."""
        table = self._table[:rows].zero_()
        if pages.size:
            table[: len(pages), : pages.shape[1]].copy_(upload(pages, self.device))
        self.inputs[size, rows].packed.copy_(packed, non_blocking=True)
