"""Prefill: prompts are read in ragged chunks between rounds; the prompts that wait share a chunk.

A prompt is read up to, and not including, its last token. That token is the root of the request's first round, so
tokens are chosen in one place only, and a prompt that is cached up to its last token needs no prefill at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.window import Window
from peregrine.engine.request import Request
from peregrine.hardware import upload
from peregrine.kernels.sampling import logprobs
from peregrine.spec.bound import BoundModel
from peregrine.spec.types import Chunk, Drafter

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


def read_chunks(target: BoundModel, drafter: Drafter, chunks: list[PromptChunk], page_size: int) -> None:
    """Read the chunks; those whose prompts are scored get a forward of their own, which keeps all hidden states."""
    for scored in (False, True):
        group = [chunk for chunk in chunks if chunk.request.wants_scores == scored]
        if group:
            _read_group(target, drafter, group, page_size, scored)


def _read_group(target: BoundModel, drafter: Drafter, chunks: list[PromptChunk], page_size: int, scored: bool) -> None:
    """One ragged forward of the target, then the drafter absorbs the same tokens."""
    device = target.store.keys.device
    metadata = chunk_metadata(chunks, page_size, device)
    tokens = _flat([c.request.tokens[c.start : c.end] for c in chunks], device)
    following = _flat([c.request.tokens[c.start + 1 : c.end + 1] for c in chunks], device)
    if scored:
        hidden, taps = target.read(tokens, metadata, drafter.taps)  # [N, H]
        _score(target, hidden, following, chunks)
    else:
        taps = target.fill(tokens, metadata, drafter.taps)
    drafter.absorb(Chunk(tokens=tokens, next_tokens=following, taps=taps, metadata=metadata))
    for chunk in chunks:
        chunk.request.read_len = chunk.end


def absorb_held(drafter: Drafter, requests: Sequence[Request], page_size: int, device: torch.device) -> None:
    """Let the drafter absorb what it missed while no row was drafted for, all in one chunk."""
    chunks = []
    for request in requests:
        count = min(len(request.held), request.num_tokens - 1 - request.held_from)
        if count > 0:
            chunks.append(PromptChunk(request, request.held_from, request.held_from + count))
    if chunks:
        taps = [row for chunk in chunks for row in chunk.request.held[: chunk.end - chunk.start] if row is not None]
        drafter.absorb(
            Chunk(
                tokens=_flat([c.request.tokens[c.start : c.end] for c in chunks], device),
                next_tokens=_flat([c.request.tokens[c.start + 1 : c.end + 1] for c in chunks], device),
                taps=torch.stack(taps) if taps else None,
                metadata=chunk_metadata(chunks, page_size, device),
            )
        )
    for request in requests:
        request.held = []


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


def chunk_metadata(chunks: list[PromptChunk], page_size: int, device: torch.device) -> AttentionMetadata:
    """Where the ragged window of these chunks reads and writes."""
    lens = [c.end - c.start for c in chunks]
    width = max(-(-c.end // page_size) for c in chunks)
    table = [c.request.pages[:width] + [0] * (width - len(c.request.pages)) for c in chunks]
    slots = [
        c.request.pages[place // page_size] * page_size + place % page_size
        for c in chunks
        for place in range(c.start, c.end)
    ]
    return AttentionMetadata(
        window=Window.ragged(lens),
        positions=_flat([list(range(c.start, c.end)) for c in chunks], device),
        q_starts=upload(list(accumulate(lens, initial=0)), device),
        past_lens=upload([c.start for c in chunks], device),
        page_table=_flat(table, device).view(len(table), width),
        page_size=page_size,
        slots=upload(slots, device),
        ancestors=None,
    )


def _flat(parts: list[list[int]], device: torch.device) -> Tensor:
    return upload([token for part in parts for token in part], device)
