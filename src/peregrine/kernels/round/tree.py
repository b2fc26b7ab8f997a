"""How a draft tree grows, level by level, and which of its nodes become the window.

level 0    w children of the newest token
level l    w children of each of the w best nodes of level l - 1, the frontier
window     the root and the T - 1 candidates of highest joint probability; a child is never more probable than
           its parent, so every kept node's ancestors are kept too

Candidates are numbered from 1 in the order they were seen; 0 is the root.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready
from peregrine.kernels.sampling import Features, SamplingTensors, pick_scores

_triton = DeviceFile("peregrine.kernels.round.tree_triton")

# Joint log-probabilities are made to fall strictly with depth, so that a certain child never ties its parent. A step's
# own is at least LEAST, NaN included: past MAX_DRAFTS steps of it float32 still tells STEP_COST from nothing.
STEP_COST, LEAST = 1e-3, -256.0


@dataclass(frozen=True, slots=True)
class Growth:
    """A tree that grows: how children are scored, and every candidate seen so far. C = w + (K - 1) w^2."""

    width: int  # w
    target_ids: Tensor | None  # [Vd] i64
    sampling: SamplingTensors
    features: Features
    scores: Tensor  # [R, C] f32 joint log-probabilities
    tokens: Tensor  # [R, C] i64 target ids
    parents: Tensor  # [R, C] i64 their numbers

    @staticmethod
    def begin(
        rows: int, depth: int, width: int, target_ids: Tensor | None, sampling: SamplingTensors, features: Features
    ) -> "Growth":
        """Room for all candidates of `rows` trees."""
        shape, device = (rows, width + (depth - 1) * width**2), sampling.seeds.device
        scores = torch.empty(shape, dtype=torch.float32, device=device)
        tokens, parents = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
        return Growth(width, target_ids, sampling, features, scores, tokens, parents)

    def level(self, level: int) -> slice:
        """The columns of a level's candidates."""
        first = self.width + (level - 1) * self.width**2
        return slice(first, first + self.width**2) if level else slice(0, self.width)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The w best nodes of a level, to be read next. Reading the j-th of level l sets bit l * w + j."""

    tokens: Tensor  # [R * w] i64
    origins: Tensor  # [R * w] i64 flat index of the node it came from, among the nodes read last
    scores: Tensor  # [R, w] f32
    numbers: Tensor  # [R, w] i64 as candidates
    words: Tensor  # [R, w] i64 its own bit and those of its ancestors


def grow(growth: Growth, logits: Tensor, positions: Tensor, before: Frontier | None, level: int) -> Frontier:
    """Record the w likeliest children of the nodes read last, and choose the next frontier.

    logits [R, n, Vd] are those of the frontier `before`, positions [R, n] those of the tokens to be drafted. At level
    0 `before` is None and n is 1.
    """
    if triton_ready(logits):
        return Frontier(*_triton.grow(growth, logits, positions, before, level, (STEP_COST, LEAST)))
    return grow_torch(growth, logits, positions, before, level)


def grow_torch(growth: Growth, logits: Tensor, positions: Tensor, before: Frontier | None, level: int) -> Frontier:
    """The torch twin of `grow`."""
    width, (rows, count, _) = growth.width, logits.shape
    scores = pick_scores(logits, positions, growth.target_ids, growth.sampling, growth.features)
    best, ids = scores.log_softmax(dim=2).topk(width, dim=2)  # [R, n, w]
    best = torch.where(best > LEAST, best, LEAST) - STEP_COST
    ids = ids if growth.target_ids is None else growth.target_ids[ids]
    columns = growth.level(level)
    tokens, joint, parents = (x[:, columns] for x in (growth.tokens, growth.scores, growth.parents))
    tokens.copy_(ids.flatten(1))
    if before is None:
        joint.copy_(best.flatten(1))
        parents.zero_()
    else:
        joint.copy_((before.scores[:, :, None] + best).flatten(1))
        parents.view(rows, count, width).copy_(before.numbers[:, :, None])

    best, chosen = joint.topk(width, dim=1)  # [R, w] of this level's n * w
    origins = chosen.div(width, rounding_mode="floor")
    order = torch.arange(level * width, (level + 1) * width, device=logits.device)
    words = (torch.ones_like(order) << order).expand(rows, -1)
    if before is not None:
        words = words | before.words.gather(1, origins)
    firsts = torch.arange(0, rows * count, count, device=logits.device)[:, None]
    return Frontier(
        tokens=tokens.gather(1, chosen).view(-1),
        origins=(firsts + origins).view(-1),
        scores=best,
        numbers=chosen + columns.start + 1,
        words=words,
    )


def select(growth: Growth, nodes: int, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The window: tokens [R, T - 1] of the best T - 1 candidates, then parents, depths and ancestor words [R, T]."""
    if triton_ready(growth.scores):
        tokens, parents, depths, words = _triton.select(growth, nodes, depth)
        return tokens, parents, depths, words
    return select_torch(growth, nodes, depth)


def select_torch(growth: Growth, nodes: int, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The torch twin of `select`."""
    rows, count = growth.scores.shape
    order = torch.arange(nodes, device=growth.scores.device)
    kept = growth.scores.topk(nodes - 1, dim=1).indices.sort(dim=1).values  # parents before children
    node_of = torch.zeros(rows, count + 1, dtype=torch.int64, device=order.device)
    node_of.scatter_(1, kept + 1, order[1:].expand(rows, -1))
    parents, depths = (torch.zeros(rows, nodes, dtype=torch.int64, device=order.device) for _ in range(2))
    parents[:, 1:] = node_of.gather(1, growth.parents.gather(1, kept))
    # The first w candidates have depth 1, then w * w a level.
    depths[:, 1:] = (kept - growth.width).div(growth.width**2, rounding_mode="floor") + 2
    own = torch.ones_like(order) << order
    words = own.expand(rows, -1)
    for _ in range(depth):
        words = own | words.gather(1, parents)
    return growth.tokens.gather(1, kept), parents, depths, words
