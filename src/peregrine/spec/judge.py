"""Which drafts were right: the target chooses at every node, and the path that agrees with it is accepted."""

from collections.abc import Callable

import torch
from torch import Tensor

from peregrine.kernels.choose import Features, choose
from peregrine.spec.state import RowState
from peregrine.spec.types import FINISH_FAULT, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, Verdict

Judge = Callable[[Tensor, Tensor, RowState, Features], Verdict]


def judge(logits: Tensor, past_lens: Tensor, state: RowState, features: Features) -> Verdict:
    """The verdict on every row's window. logits [R, T, V]; past_lens [R] as they were before the round.

    A node is right if it is the token the target chose at its parent; it is accepted if all its ancestors are
    right too. Siblings differ, so accepted nodes form one path from the root. The choice at the path's end is the
    bonus. A chain is a tree with one child.
    """
    links = state.links
    positions = past_lens[:, None] + links.depths + 1  # [R, T] of the token to be chosen at each node
    choices = choose(
        logits, positions, state.law, features, state.context(past_lens)
    )  # [R, T], -1 is a fault

    offered = links.depths <= torch.minimum(state.draft_depths, state.draft_caps)[:, None]  # [R, T], root too
    right = (state.window_tokens == choices.gather(1, links.parents)) & offered
    right[:, 0] = True
    nodes = torch.arange(right.shape[1], device=right.device)
    bits = (right.long() << nodes).sum(dim=1, keepdim=True)  # [R, 1] word
    accepted = (links.ancestors & bits) == links.ancestors  # [R, T]

    # Parents come before children, so the path in order of depth is the accepted nodes in order of index.
    path = (
        torch.where(accepted, nodes, nodes + nodes.numel()).sort(dim=1).values[:, : state.shape.depth + 1]
        % nodes.numel()
    )
    tokens = choices.gather(1, path)  # [R, K + 1]
    return settle(tokens, path, accepted.sum(dim=1), past_lens, state)


def settle(tokens: Tensor, path: Tensor, accept_lens: Tensor, past_lens: Tensor, state: RowState) -> Verdict:
    """End rows at a fault, a stop id or their limit; cut what was accepted past that point."""
    order = torch.arange(tokens.shape[1], device=tokens.device)
    inside = order < accept_lens[:, None]  # [R, K + 1]
    correct_lens = accept_lens - 1

    faulty = (tokens < 0) & inside
    stops = (tokens[:, :, None] == state.law.stop_ids[:, None, :]).any(dim=2) & inside & ~faulty
    ends = faulty | stops
    first = torch.where(ends, order, tokens.shape[1]).amin(dim=1)  # [R] index of the first ending token
    stopped = first < tokens.shape[1]
    fault = stopped & faulty.gather(1, first.clamp(max=tokens.shape[1] - 1)[:, None])[:, 0]
    accept_lens = torch.minimum(accept_lens, first + 1) - fault.long()  # a fault has no token

    room = state.limits - past_lens - 1  # tokens the row may still take
    finish = torch.where(stopped, torch.where(fault, FINISH_FAULT, FINISH_STOP), FINISH_NONE)
    full = accept_lens >= room
    finish = torch.where(full & ((finish == FINISH_NONE) | (accept_lens > room)), FINISH_LENGTH, finish)
    accept_lens = torch.minimum(accept_lens, room).masked_fill(state.done, 0)
    depth = torch.minimum(state.draft_depths, state.draft_caps)
    drafted = ((state.links.depths > 0) & (state.links.depths <= depth[:, None])).sum(dim=1)
    return Verdict(
        tokens=tokens.clamp(min=0),
        path=path,
        accept_lens=accept_lens,
        correct_lens=torch.minimum(correct_lens, accept_lens),
        drafted_lens=drafted.masked_fill(state.done, 0),
        finish=finish.masked_fill(state.done, FINISH_NONE),
    )
