"""From the target's choices to a verdict: which drafts were right, which tokens are accepted, and who ends there.

A node is right if it is the token chosen at its parent; it is accepted if all its ancestors are right too. Siblings
differ, so accepted nodes form one path from the root; the choice at the path's end is the bonus. A chain is a tree
with one child, plain decoding a root alone.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

from peregrine.kernels.cpu import NUMBA_PRESENT
from peregrine.kernels.nodes import (
    FINISH_FAULT,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    HEADER,
    Ends,
    Nodes,
    Verdict,
)

__all__ = [
    "FINISH_FAULT",
    "FINISH_LENGTH",
    "FINISH_NONE",
    "FINISH_STOP",
    "HEADER",
    "Ends",
    "Nodes",
    "Verdict",
    "judge_nodes",
    "judge_nodes_torch",
    "settle",
]


def judge_nodes(choices: Tensor, nodes: Nodes, ends: Ends, depth: int) -> Verdict:
    """The verdict on windows whose nodes chose `choices` [R, T] i64 (-1: nothing to choose from)."""
    if NUMBA_PRESENT and choices.is_cpu:
        table: Tensor = _compiled().judge_nodes(choices, nodes, ends, depth)
        return Verdict(table)
    return judge_nodes_torch(choices, nodes, ends, depth)


def judge_nodes_torch(choices: Tensor, nodes: Nodes, ends: Ends, depth: int) -> Verdict:
    """The twin."""
    right = (nodes.tokens == choices.gather(1, nodes.parents)) & (nodes.depths <= nodes.offered[:, None])
    right[:, 0] = True
    order = torch.arange(right.shape[1], device=right.device)
    bits = (right.long() << order).sum(dim=1, keepdim=True)  # [R, 1] word
    accepted = (nodes.ancestors & bits) == nodes.ancestors  # [R, T]
    # Parents come before children, so the path in order of depth is the accepted nodes in order of index.
    ranked = torch.where(accepted, order, order + order.numel()).sort(dim=1).values
    path = ranked[:, : depth + 1] % order.numel()
    return settle(choices.gather(1, path), path, accepted.sum(dim=1), nodes, ends)


def settle(tokens: Tensor, path: Tensor, accept_lens: Tensor, nodes: Nodes, ends: Ends) -> Verdict:
    """End rows at a fault, a stop id or their limit; cut what was accepted past that point. tokens, path [R, W]."""
    order = torch.arange(tokens.shape[1], device=tokens.device)
    inside = order < accept_lens[:, None]  # [R, W]
    correct_lens = accept_lens - 1

    faulty = (tokens < 0) & inside
    stops = (tokens[:, :, None] == ends.stop_ids[:, None, :]).any(dim=2) & inside & ~faulty
    first = torch.where(faulty | stops, order, order.numel()).amin(dim=1)  # [R] the first ending token
    ended = first < order.numel()
    fault = ended & faulty.gather(1, first.clamp(max=order.numel() - 1)[:, None])[:, 0]
    accept_lens = torch.minimum(accept_lens, first + 1) - fault.long()  # a fault has no token

    room = ends.limits - ends.past_lens - 1  # tokens the row may still take
    finish = torch.where(ended, torch.where(fault, FINISH_FAULT, FINISH_STOP), FINISH_NONE)
    full = (accept_lens > room) | ((accept_lens == room) & (finish != FINISH_STOP))
    finish = torch.where(full, FINISH_LENGTH, finish).masked_fill(ends.done, FINISH_NONE)
    accept_lens = torch.minimum(accept_lens, room).masked_fill(ends.done, 0)
    drafted = ((nodes.depths > 0) & (nodes.depths <= nodes.offered[:, None])).sum(dim=1)
    drafted = drafted.masked_fill(ends.done, 0)
    header = torch.stack([accept_lens, torch.minimum(correct_lens, accept_lens), drafted, finish], dim=1)
    return Verdict(torch.cat([header, tokens.clamp(min=0), path], dim=1))


@functools.cache
def _compiled() -> ModuleType:
    from peregrine.kernels import verdict_cpu

    return verdict_cpu
