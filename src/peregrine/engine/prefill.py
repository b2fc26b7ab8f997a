"""Read prompts: ragged chunks between rounds, cut at fixed absolute borders.

A prompt is read up to, and not including, its last token. That token is the root of the request's first round, so
tokens are chosen in one place only, and a prompt whose prefix is wholly cached needs no reading at all.
"""

from dataclasses import dataclass

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
class Stretch:
    """The tokens [start, end) of one request, to be read now."""

    request: Request
    start: int
    end: int


def next_stretches(requests: list[Request], chunk_size: int) -> list[Stretch]:
    """What to read in one step: first come first served, up to one chunk of tokens in all."""
    stretches: list[Stretch] = []
    room = chunk_size
    for request in requests:
        start = request.read_len
        border = (start // chunk_size + 1) * chunk_size
        end = min(border, request.num_tokens - 1)
        if stretches and end - start > room:
            break
        stretches.append(Stretch(request, start, end))
        room -= end - start
    return stretches


def read_stretches(target: BoundModel, drafter: Drafter, stretches: list[Stretch], page_size: int) -> None:
    """Read the stretches; those whose tokens are to be scored go apart, so that the others pay nothing for it."""
    for scored in (False, True):
        alike = [stretch for stretch in stretches if stretch.request.wants_scores == scored]
        if alike:
            _read_alike(target, drafter, alike, page_size, scored)


def _read_alike(target: BoundModel, drafter: Drafter, stretches: list[Stretch], page_size: int, scored: bool) -> None:
    """One ragged forward of the target, then the drafter absorbs the same tokens."""
    device = target.store.keys.device
    metadata = stretch_metadata(stretches, page_size, device)
    tokens = _flat([s.request.tokens[s.start : s.end] for s in stretches], device)
    following = _flat([s.request.tokens[s.start + 1 : s.end + 1] for s in stretches], device)
    if scored:
        hidden, taps = target.read(tokens, metadata, drafter.taps)  # [N, H]
        _score(target, hidden, following, stretches)
    else:
        taps = target.fill(tokens, metadata, drafter.taps)
    drafter.absorb(Chunk(tokens=tokens, next_tokens=following, taps=taps, metadata=metadata))
    for stretch in stretches:
        stretch.request.read_len = stretch.end


def _score(target: BoundModel, hidden: Tensor, following: Tensor, stretches: list[Stretch]) -> None:
    """Log-probabilities of the tokens that follow, for each stretch's request."""
    start = 0
    for stretch in stretches:
        end = start + stretch.end - stretch.start
        count = stretch.request.params.prompt_logprobs
        assert count is not None
        for low in range(start, end, SCORED_AT_ONCE):
            places = slice(low, min(low + SCORED_AT_ONCE, end))
            logits = target.decoder.logits(hidden[places])  # [n, V]
            stretch.request.add_scores(*logprobs(logits, following[places], count))
        start = end


def stretch_metadata(stretches: list[Stretch], page_size: int, device: torch.device) -> AttentionMetadata:
    """Where a ragged window of stretches reads and writes."""
    lens = [s.end - s.start for s in stretches]
    width = max(-(-s.end // page_size) for s in stretches)
    table = [s.request.pages[:width] + [0] * (width - len(s.request.pages)) for s in stretches]
    slots = [
        s.request.pages[place // page_size] * page_size + place % page_size
        for s in stretches
        for place in range(s.start, s.end)
    ]
    starts = [0]
    for length in lens:
        starts.append(starts[-1] + length)
    return AttentionMetadata(
        window=Window.ragged(lens),
        positions=_flat([list(range(s.start, s.end)) for s in stretches], device),
        q_starts=upload(starts, device),
        past_lens=upload([s.start for s in stretches], device),
        page_table=_flat(table, device).view(len(table), width),
        page_size=page_size,
        slots=upload(slots, device),
        ancestors=None,
    )


def _flat(parts: list[list[int]], device: torch.device) -> Tensor:
    return upload([token for part in parts for token in part], device)
