"""Recorded forwards of prompt chunks: a chunk costs the host one copy and one launch, whatever its length.

Launched kernel by kernel, a chunk takes the host 20 to 50 ms, which is longer than the device needs for a short one,
and seconds where a kernel is needed for the first time. So forwards are recorded for some numbers of tokens and rows,
and a chunk is padded to the next one. What is left over is a row on the scratch page whose tokens are all at place 0; a
row that is not needed is empty. Padding changes no bit.

A prompt is read up to its last token, the root of the first round. If nothing else runs, that round would read all
weights again for this one token; so the last chunk reads it as well, and the first round begins with its hidden state.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from peregrine.attention.window import Window
from peregrine.engine.chunk_inputs import read_inputs, words_of, write_inputs
from peregrine.engine.first_round import FirstRound
from peregrine.engine.graphs import Graphs
from peregrine.engine.host_copy import UploadRing
from peregrine.engine.prefill import STEP, PromptChunk, size_alone
from peregrine.engine.rounds import Rounds
from peregrine.models.parallel import on_every_rank

LEAST_TOKENS = 64  # of the smallest recorded chunk
MOST_ROWS, ROW_TOKENS = 32, 48  # of a recorded chunk: prompts, and tokens that each has on average at least
PART = 16  # recorded sizes from one power of two to the next, above 4,096 tokens


def chunk_sizes(most: int) -> list[int]:
    """Tokens of recorded chunks: multiples of STEP, and the largest."""
    sizes = [LEAST_TOKENS]
    while sizes[-1] < most:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(min(most, sizes[-1] // STEP * STEP + max(STEP, power // PART)))
    return sizes if sizes[0] < most else [most]


def rows_of(num_tokens: int) -> int:
    """Prompts that share a recorded chunk of so many tokens."""
    return max(1, min(MOST_ROWS, num_tokens // ROW_TOKENS))


def size_for(sizes: Sequence[int], num_tokens: int, num_rows: int) -> int | None:
    """The recorded size for a chunk of so many tokens of so many prompts; None: it is launched kernel by kernel."""
    return next((size for size in sizes if size >= num_tokens and rows_of(size) >= num_rows), None)


class PromptGraphs:
    """The recorded chunks of an engine; every rank has them."""

    def __init__(
        self, rounds: Rounds, graphs: Graphs[Any], most: int, num_pages: int, first: FirstRound | None = None
    ) -> None:
        """Chunks have up to `most` tokens, a request up to `num_pages` pages.

        `first` takes over a request whose newest token is read with the last chunk of its prompt.
        """
        self.target, self.drafter, self.graphs, self.ranks = rounds.target, rounds.drafter, graphs, rounds.ranks
        self.device, self.page_size = rounds.device, rounds.seats.page_size
        self.num_pages, self.alone, self.first = num_pages, size_alone(most), first
        self.sizes, rows = chunk_sizes(most), rows_of(most) + 1
        words = words_of(most, rows, rows * num_pages)
        self._packed = torch.zeros(words, dtype=torch.int64, device=self.device)
        self._host = UploadRing(words, self.device)
        # The chunks of a long prompt, all of one size, have a graph of one row: attention can plan it better.
        self.shapes = [(self.alone, 1), *((size, rows_of(size) + 1) for size in self.sizes)]

    def record(self) -> Iterator[int]:
        """Record every size; yields the bytes each one took. The chunks really run once, all padding."""
        for shape in sorted(self.shapes, reverse=True):  # smaller graphs reuse the memory of larger ones
            self._fill(*shape, [])
            yield self.graphs.record(("chunk", *shape), partial(self.forward, *shape))

    @on_every_rank("prompts")
    def forward(self, size: int, rows: int) -> None:
        """Read a chunk whose inputs were written."""
        window = Window(num_rows=rows, num_tokens=size, max_q_len=size, q_len=None)
        chunk = read_inputs(self._packed, window, self.num_pages, self.page_size)
        if self.first is None:
            taps = self.target.fill(chunk.tokens, chunk.metadata, self.drafter.taps)
        else:
            taps = self.first.read_newest(chunk.tokens, chunk.metadata)
        self.drafter.absorb(replace(chunk, taps=taps))

    def replay(self, chunks: Sequence[PromptChunk], alone: bool) -> bool:
        """Read the chunks by a recorded forward; False if none is recorded for as many prompts.

        `alone`: nothing runs, so that the newest token of a prompt that ends here is best read with it.
        """
        count, ends = sum(chunk.num_tokens for chunk in chunks), False
        size = size_for(self.sizes, count, len(chunks))
        if self.first is not None:
            request = chunks[0].request
            if alone and len(chunks) == 1 and chunks[0].end == request.num_tokens - 1:
                larger = size_for(self.sizes, count + 1, 1)
                if ends := larger is not None:
                    size, count = larger, count + 1
                    chunks = [PromptChunk(request, chunks[0].start, request.num_tokens)]
            self.first.request = request if ends else None
        if size is None:
            return False
        rows = 1 if len(chunks) == 1 and count == self.alone else rows_of(size) + 1
        self._fill(size, rows, chunks)
        self.graphs.replay(("chunk", size, rows))
        return True

    def _fill(self, size: int, rows: int, chunks: Sequence[PromptChunk]) -> None:
        """Write the inputs of a recorded chunk, by one copy."""
        with self._host.next() as words:
            count = write_inputs(words.numpy(), chunks, size, rows, self.page_size)
            self.write(words[:count])

    @on_every_rank("prompts", at_once=False)
    def write(self, words: Tensor) -> None:
        """Copy the inputs of a recorded chunk to where it reads them."""
        self._packed[: len(words)].copy_(words, non_blocking=True)
