"""What routing is asked and what it answers; the law itself is told in route.py."""

from dataclasses import dataclass

from torch import Tensor

LEAST_SUM = 1e-20  # keeps a sum of weights from being zero


@dataclass(frozen=True, slots=True)
class RoutingRule:
    """How logits become experts and weights; shared experts have the numbers after the others'."""

    num_experts: int
    top_k: int
    num_shared: int
    sigmoid: bool  # softmax otherwise
    num_groups: int
    top_groups: int
    best_two: bool  # a group is as good as its two best experts together; otherwise as its best
    normalise: bool
    scale: float

    @property
    def num_choices(self) -> int:
        """Experts that a token passes through: those it chose, then the shared ones."""
        return self.top_k + self.num_shared


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """Which experts each row goes through, best first and shared ones last, and what their answers count."""

    experts: Tensor  # [N, choices] i32
    weights: Tensor  # [N, choices] f32
