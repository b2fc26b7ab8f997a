"""Prefill: prompts are read in ragged chunks between rounds; the prompts that wait share a chunk.

A prompt is read up to, and not including, its last token. That token is the root of the request's first round, so
tokens are chosen in one place only, and a prompt that is cached up to its last token needs no prefill at all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from torch import Tensor

from peregrine.engine.request import Request
from peregrine.engine.rounds import ChunkInputs, IntArray, Rounds
from peregrine.kernels.sampling import logprobs


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens [start, end) of one request, to be read now."""

    request: Request
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


Replay = Callable[[list[PromptChunk], bool], bool]
STEP = 128  # chunks on a GPU have multiples of so many tokens: tiles of a linear have as many or more
# Tokens of a chunk on a GPU. The former are 33 tiles of 128: with tiles of most weights they make whole waves on the
# 132 multiprocessors of an H200, where 4,096 leave a thirtieth of it idle. But long prompts often have a power of two
# of tokens, so that one that is read alone would end with a short chunk.
SHARED, ALONE = 4224, 4096


def next_chunks(unread: Mapping[Request, int], chunk_size: int) -> list[PromptChunk]:
    """What to read in one step of the requests with so many unread tokens, oldest first: `chunk_size` tokens in all.

    Half of it is the oldest prompt's. The rest goes to the prompts with the least left to read, so that a short one
    does not wait for long ones; sizes are compared as powers of two, the older first among equals, so that long
    prompts are read one after the other. A prompt alone is cut evenly. How a prompt is cut changes no bit.
    """
    if len(unread) == 1:
        chunk_size = size_alone(chunk_size)
    oldest = next(iter(unread))
    shares = {oldest: min(unread[oldest], -(-chunk_size // 2), chunk_size)}
    room = chunk_size - shares[oldest]
    for request in sorted(unread, key=lambda request: unread[request].bit_length()):
        if not room:
            break
        given = shares.get(request, 0)
        shares[request] = min(unread[request], given + room)
        room -= shares[request] - given
    return [PromptChunk(r, r.read_len, r.read_len + shares[r]) for r in unread if r in shares]


def size_alone(chunk_size: int) -> int:
    """The most tokens of a chunk that only one prompt is read in."""
    return ALONE if chunk_size == SHARED else chunk_size


def read_chunks(rounds: Rounds, chunks: list[PromptChunk], page_size: int, replay: Replay, alone: bool) -> None:
    """Read the chunks; those whose prompts are scored get a forward of their own, which keeps all hidden states.

    The drafter absorbs them, too, unless it has missed what is before them. `replay` reads chunks by a recorded
    forward, if there is one for them; `alone`: no request runs.
    """
    for scored, absorbs in product((False, True), (True, False)):
        group = [c for c in chunks if c.request.wants_scores == scored and (c.request.missed is None) == absorbs]
        if group and (scored or not absorbs or not replay(group, alone)):
            rounds.read(chunk_inputs(group, page_size), scored, absorbs, take=partial(_take_scores, group))
    for chunk in chunks:
        chunk.request.read_len = chunk.end


def _take_scores(chunks: list[PromptChunk], number: int, logits: Tensor, following: Tensor) -> None:
    """Give a chunk's request the log-probabilities of the tokens [n] that follow some of the chunk's: logits [n, V]."""
    request = chunks[number].request
    assert request.params.prompt_logprobs is not None
    scores = logprobs(logits[:, None], following[:, None], None, None, request.params.prompt_logprobs)
    request.add_scores(*(values[:, 0] for values in scores))


@dataclass(frozen=True, slots=True)
class ChunkPlaces:
    """Where the tokens of several chunks lie, computed on the host: one entry per token, chunk after chunk."""

    lens: IntArray  # [R] tokens of each chunk
    starts: IntArray  # [R] the place of its first
    positions: IntArray  # [N]
    slots: IntArray  # [N]

    @staticmethod
    def of(chunks: Sequence[PromptChunk], page_size: int) -> "ChunkPlaces":
        starts, ends = np.array([(chunk.start, chunk.end) for chunk in chunks]).T
        places, first = [np.arange(chunk.start, chunk.end) for chunk in chunks], starts // page_size
        held = [np.array(c.request.pages[i : -(-c.end // page_size)]) for c, i in zip(chunks, first, strict=True)]
        pages = [line[at // page_size - i] for line, at, i in zip(held, places, first, strict=True)]
        positions = np.concatenate(places)
        return ChunkPlaces(ends - starts, starts, positions, np.concatenate(pages) * page_size + positions % page_size)


def chunk_inputs(chunks: list[PromptChunk], page_size: int) -> ChunkInputs:
    """What a forward over these chunks reads."""
    places = ChunkPlaces.of(chunks, page_size)
    return ChunkInputs(
        tokens=chunk_tokens(chunks),
        following=chunk_tokens(chunks, 1),
        positions=places.positions,
        slots=places.slots,
        lens=places.lens,
        starts=places.starts,
        table=page_rows(chunks, page_size),
        page_size=page_size,
    )


def page_rows(chunks: Sequence[PromptChunk], page_size: int) -> IntArray:
    """A page table for the chunks: the pages of each up to its end, then the scratch page. [R, P]"""
    ends = [-(-chunk.end // page_size) for chunk in chunks]
    table = np.zeros((len(chunks), max(ends)), dtype=np.int64)
    for line, chunk, end in zip(table, chunks, ends, strict=True):
        line[:end] = chunk.request.pages[:end]
    return table


def chunk_tokens(chunks: Sequence[PromptChunk], shift: int = 0) -> IntArray:
    """The tokens of all chunks, or those `shift` places after them."""
    return np.concatenate([c.request.ids(c.start + shift, c.end + shift) for c in chunks])
