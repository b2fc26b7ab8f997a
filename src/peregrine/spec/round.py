"""One speculative round, start to finish.

verify    the target scores the window [newest token, drafts] in one forward over paged KV
judge     the path of drafts the target agrees with is accepted, and its own next choice is the bonus
commit    lengths, history and endings move on the device; rejected KV lies past the end and is overwritten
propose   the drafter reads the accepted path, then guesses past its newest token

Plain decoding is a round with no drafts. A CPU calls this function; a GPU captures this very call as one CUDA
graph: it never waits for the device, never branches on device data, and its shapes depend on `rows` alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.attention.metadata import AttentionMetadata
from peregrine.kernels.choose import Features, logprobs
from peregrine.kernels.verdict import Verdict
from peregrine.spec.bound import BoundModel
from peregrine.spec.judge import Judge
from peregrine.spec.state import Rows, RowState, SeatState
from peregrine.spec.types import Drafter, Seen


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the model's own distribution at every accepted token."""

    chosen: Tensor  # [R, K + 1]
    top_ids: Tensor  # [R, K + 1, n]
    top: Tensor  # [R, K + 1, n]


def run_round(
    target: BoundModel, drafter: Drafter, judge: Judge, seats: SeatState, rows: Rows, features: Features
) -> tuple[Verdict, Logprobs | None]:
    """Advance every row by 1 to K + 1 tokens; `seats` is read and written in place."""
    state = seats.view(rows)
    past_lens = state.past_lens.clone()  # commit moves the original
    shape = state.window_tokens.shape  # [R, T]

    # Verify.
    metadata = window_metadata(state, past_lens, seats.max_len)
    hidden, taps = target.read(state.window_tokens.flatten(), metadata, drafter.taps)  # [R * T, H]
    logits = target.decoder.logits(hidden).view(*shape, -1)  # [R, T, V]

    # Judge.
    verdict = judge(logits, past_lens, state, features)
    path_tokens = state.window_tokens.gather(1, verdict.path)  # [R, K + 1]

    # Commit.
    state.commit(verdict)
    if not seats.shape.is_chain:
        move_path(target, state, past_lens, verdict)

    # Propose.
    seen = Seen(
        tokens=path_tokens,
        next_tokens=verdict.tokens,
        taps=None if taps is None else at_nodes(taps.view(*shape, -1), verdict.path),
        past_lens=past_lens,
        new_past_lens=state.past_lens,
        live=(verdict.accept_lens - 1).clamp(min=0),
        history=state.history,
        pages=state.pages,
        law=state.law,
        features=features,
        max_len=seats.max_len,
    )
    state.keep(drafter.propose(seen))
    return verdict, path_logprobs(logits, verdict, features)


def window_metadata(state: RowState, past_lens: Tensor, max_len: int) -> AttentionMetadata:
    """Where the window reads and writes: node i lies at place past + i, its position is past + depth."""
    nodes = torch.arange(state.window_tokens.shape[1], device=past_lens.device)
    slots = state.pages.slots(past_lens[:, None] + nodes)
    # Guesses past the context's end are void; they only need some valid position.
    positions = (past_lens[:, None] + state.links.depths).clamp(max=max_len - 1)
    return state.pages.uniform(
        positions, past_lens, slots, None if state.shape.is_chain else state.links.ancestors
    )


def move_path(target: BoundModel, state: RowState, past_lens: Tensor, verdict: Verdict) -> None:
    """Bring the accepted path's KV to the front of the window, where the next round expects it."""
    order = torch.arange(verdict.path.shape[1], device=past_lens.device)
    kept = torch.where(order < verdict.accept_lens[:, None], verdict.path, order)
    target.store.move(
        state.pages.slots(past_lens[:, None] + kept), state.pages.slots(past_lens[:, None] + order)
    )


def path_logprobs(logits: Tensor, verdict: Verdict, features: Features) -> Logprobs | None:
    """Log-probabilities along the path, if any row asked for them."""
    if features.logprobs is None:
        return None
    shape = verdict.path.shape
    on_path = at_nodes(logits, verdict.path).flatten(0, 1)  # [R * (K + 1), V]
    chosen, top_ids, top = logprobs(on_path, verdict.tokens.flatten(), features.logprobs)
    return Logprobs(chosen.view(shape), top_ids.view(*shape, -1), top.view(*shape, -1))


def at_nodes(values: Tensor, nodes: Tensor) -> Tensor:
    """Each row's values at its own nodes: [R, T, X], [R, n] -> [R, n, X]."""
    return values.gather(1, nodes[:, :, None].expand(-1, -1, values.shape[2]))
