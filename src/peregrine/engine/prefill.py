"""Prefill: prompts are read in ragged chunks between rounds; the prompts that wait share a chunk.

A prompt is read up to, and not including, its last token. That token is the root of the request's first round, so
tokens are chosen in one place only, and a prompt that is cached up to its last token needs no prefill at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.window import Window
from peregrine.engine.request import Request
from peregrine.hardware import upload
from peregrine.kernels.sampling import logprobs
from peregrine.spec.bound import BoundModel
from peregrine.spec.types import Chunk, Drafter

IntArray = npt.NDArray[np.int64]
SCORED_AT_ONCE = 64  # prompt tokens whose logits exist at a time


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens [start, end) of one request, to be read now."""

    request: Request
    start: int
    end: int


def next_chunks(requests: list[Request], chunk_size: int) -> list[PromptChunk]:
    """What to read in one step of the requests with unread tokens, oldest first: `chunk_size` tokens in all.

    Half of it is the oldest prompt's. The rest goes to the prompts with the least left to read, so that a short one
    does not wait for long ones; sizes are compared as powers of two, the older first among equals, so that long
    prompts are read one after the other. How a prompt is cut changes no bit.
    """
    shares = dict.fromkeys((request.id for request in requests), 0)
    oldest, room = requests[0], chunk_size
    by_size = sorted(requests, key=lambda request: request.num_unread.bit_length())
    for request, most in ((oldest, -(-chunk_size // 2)), *((request, chunk_size) for request in by_size)):
        share = min(request.num_unread - shares[request.id], most, room)
        shares[request.id] += share
        room -= share
    return [PromptChunk(r, r.read_len, r.read_len + shares[r.id]) for r in requests if shares[r.id]]


def read_chunks(
    target: BoundModel,
    drafter: Drafter,
    chunks: list[PromptChunk],
    page_size: int,
    replay: Callable[[list[PromptChunk]], bool] = lambda _: False,
) -> None:
    """Read the chunks; those whose prompts are scored get a forward of their own, which keeps all hidden states.

    `replay` reads chunks by a recorded forward, if there is one for them.
    """
    for scored in (False, True):
        group = [chunk for chunk in chunks if chunk.request.wants_scores == scored]
        if group and (scored or not replay(group)):
            _read_group(target, drafter, group, page_size, scored)
    for chunk in chunks:
        chunk.request.read_len = chunk.end


def _read_group(target: BoundModel, drafter: Drafter, chunks: list[PromptChunk], page_size: int, scored: bool) -> None:
    """One ragged forward of the target, then the drafter absorbs the same tokens."""
    device = target.store.keys.device
    metadata = chunk_metadata(chunks, page_size, device)
    tokens, following = upload(chunk_tokens(chunks), device), upload(chunk_tokens(chunks, 1), device)
    if scored:
        hidden, taps = target.read(tokens, metadata, drafter.taps)  # [N, H]
        _score(target, hidden, following, chunks)
    else:
        taps = target.fill(tokens, metadata, drafter.taps)
    drafter.absorb(Chunk(tokens=tokens, next_tokens=following, taps=taps, metadata=metadata))


def absorb_held(drafter: Drafter, requests: Sequence[Request], page_size: int, device: torch.device) -> None:
    """Let the drafter absorb what it missed while no row was drafted for, all in one chunk."""
    chunks = []
    for request in requests:
        start = request.held[0].start if request.held else 0
        end = min(start + request.num_held, request.num_tokens - 1)
        if end > start:
            chunks.append(PromptChunk(request, start, end))
    if chunks:
        taps = held_taps(chunks) if drafter.taps else None
        drafter.absorb(
            Chunk(
                tokens=upload(chunk_tokens(chunks), device),
                next_tokens=upload(chunk_tokens(chunks, 1), device),
                taps=taps,
                metadata=chunk_metadata(chunks, page_size, device),
            )
        )
    for request in requests:
        request.held = []


def held_taps(chunks: Sequence[PromptChunk]) -> Tensor:
    """The held taps of the chunks' tokens: [N, taps * H]."""
    rounds: dict[int, Tensor] = {}  # taps of several rows are held together
    found = []
    for chunk in chunks:
        for held in chunk.request.held:
            if id(held.taps) not in rounds:
                rounds[id(held.taps)] = torch.stack([taps for taps in held.taps if taps is not None])
        lines = [rounds[id(held.taps)][:, held.line] for held in chunk.request.held]
        found.append(torch.cat(lines)[: chunk.end - chunk.start])
    return torch.cat(found)


def _score(target: BoundModel, hidden: Tensor, following: Tensor, chunks: list[PromptChunk]) -> None:
    """Give each chunk's request the log-probabilities of the tokens that follow its chunk's tokens."""
    start = 0
    for chunk in chunks:
        end = start + chunk.end - chunk.start
        count = chunk.request.params.prompt_logprobs
        assert count is not None
        for low in range(start, end, SCORED_AT_ONCE):
            places = slice(low, min(low + SCORED_AT_ONCE, end))
            logits = target.decoder.logits(hidden[places])[:, None]  # [n, 1, V]
            scores = logprobs(logits, following[places][:, None], None, None, count)
            chunk.request.add_scores(*(values[:, 0] for values in scores))
        start = end


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


def chunk_metadata(chunks: list[PromptChunk], page_size: int, device: torch.device) -> AttentionMetadata:
    """Where the ragged window of these chunks reads and writes."""
    places = ChunkPlaces.of(chunks, page_size)
    return AttentionMetadata(
        window=Window.ragged(places.lens.tolist()),
        positions=upload(places.positions, device),
        q_starts=upload(np.concatenate([[0], places.lens.cumsum()]), device),
        past_lens=upload(places.starts, device),
        page_table=upload(page_rows(chunks, page_size), device),
        page_size=page_size,
        slots=upload(places.slots, device),
        ancestors=None,
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
