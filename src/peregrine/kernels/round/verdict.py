"""From the target's choices to a verdict: which drafts are right, which tokens are accepted, which rows end.

A node is right if it is the token chosen at its parent; it is accepted if all its ancestors are right too. Siblings
differ, so accepted nodes form one path from the root; the choice at the path's end is the bonus. A chain is a tree
with one child, plain decoding a root alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_cpu = DeviceFile("peregrine.kernels.round.cpu")
_triton = DeviceFile("peregrine.kernels.round.verdict_triton")

FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_FAULT = range(4)
HEADER = 4  # accept, correct, drafted, finish stand before a row's tokens and path


@dataclass(frozen=True, slots=True)
class Nodes:
    """The windows to be judged: node 0 is the root, parents come before children."""

    tokens: Tensor  # [R, T] i64; a commit puts the newest token at the root
    parents: Tensor  # [R, T] i64, the root's is itself
    depths: Tensor  # [R, T] i64
    ancestors: Tensor  # [R, T] i64 words: own bit and every ancestor's
    offered: Tensor  # [R] i64: deeper nodes are void


@dataclass(frozen=True, slots=True)
class Ends:
    """Each row's length and where it must end; a commit writes `past_lens` and `done`."""

    past_lens: Tensor  # [R] i64
    limits: Tensor  # [R] i64 most tokens in all
    stop_ids: Tensor  # [R, S] i64; -1: empty
    done: Tensor  # [R] bool: the row has ended already and takes nothing


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which drafts the target accepted, in one table so that one copy takes it to the host.

    `accept` counts the bonus token, `correct` does not.
    """

    table: Tensor  # [R, HEADER + 2 W] i64, W = K + 1

    @property
    def width(self) -> int:
        return (self.table.shape[1] - HEADER) // 2

    @property
    def accept_lens(self) -> Tensor:
        """[R]; 0 only for a row that had ended before or whose root's logits are not finite."""
        return self.table[:, 0]

    @property
    def correct_lens(self) -> Tensor:
        """[R]: how many of the accepted tokens were drafted."""
        return self.table[:, 1]

    @property
    def finish(self) -> Tensor:
        """[R]: one of FINISH_*."""
        return self.table[:, 3]

    @property
    def tokens(self) -> Tensor:
        """[R, W]: the accepted tokens in order, then meaningless valid ids."""
        return self.table[:, HEADER : HEADER + self.width]

    @property
    def path(self) -> Tensor:
        """[R, W]: the window nodes that lead to them."""
        return self.table[:, HEADER + self.width :]


def commit(choices: Tensor, nodes: Nodes, ends: Ends, history: Tensor, depth: int) -> Verdict:
    """Judge windows whose nodes chose `choices` [R, T] i64 (-1: nothing to choose from), and commit what is accepted.

    Written in place: history [R, C], past lengths and done flags, the root of each window. Rejected tokens lie past
    a row's end.
    """
    if triton_ready(choices):
        return Verdict(_triton.commit(choices, nodes, ends, history, depth))
    if NUMBA_PRESENT and choices.is_cpu:
        return Verdict(_cpu.commit(choices, nodes, ends, history, depth))
    return commit_torch(choices, nodes, ends, history, depth)


def commit_torch(choices: Tensor, nodes: Nodes, ends: Ends, history: Tensor, depth: int) -> Verdict:
    """The torch twin of `commit`."""
    verdict = judge_nodes(choices, nodes, ends, depth)
    places = ends.past_lens[:, None] + torch.arange(1, depth + 2, device=history.device)  # [R, W]
    history.scatter_(1, places, verdict.tokens)
    ends.past_lens.add_(verdict.accept_lens)
    ends.done.logical_or_(verdict.finish != FINISH_NONE)
    nodes.tokens[:, :1].copy_(history.gather(1, ends.past_lens[:, None]))
    return verdict


def judge_nodes(choices: Tensor, nodes: Nodes, ends: Ends, depth: int) -> Verdict:
    """The verdict without a commit: which path is accepted, and which rows end there."""
    right = (nodes.tokens == choices.gather(1, nodes.parents)) & (nodes.depths <= nodes.offered[:, None])
    right[:, 0] = True
    order = torch.arange(right.shape[1], device=right.device)
    bits = (right.long() << order).sum(dim=1, keepdim=True)  # [R, 1] word
    accepted = (nodes.ancestors & bits) == nodes.ancestors  # [R, T]
    # Parents come before children, so the path in order of depth is the accepted nodes in order of index.
    ranked = torch.where(accepted, order, order + order.numel()).sort(dim=1).values
    path = ranked[:, : depth + 1] % order.numel()
    return _settle(choices.gather(1, path), path, accepted.sum(dim=1), nodes, ends)


def _settle(tokens: Tensor, path: Tensor, accept_lens: Tensor, nodes: Nodes, ends: Ends) -> Verdict:
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
