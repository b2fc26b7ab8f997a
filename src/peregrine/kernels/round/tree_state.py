"""A draft tree that grows: its candidates, and the nodes to be read next. Values only; `grow.py` holds the law."""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.sampling import Features, SamplingTensors


@dataclass(frozen=True, slots=True)
class Growth:
    """A tree that grows: what children are scored by, and every candidate seen so far. C = w + (K - 1) w^2."""

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
