"""Loading as data: which stored tensors make up each parameter of a module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Take = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored tensor and the shape it must have; pieces of one parameter are stacked row-wise."""

    name: str
    shape: tuple[int, ...]
    take: Take | None = None  # what of the tensor goes in, or what is made of it; None: the whole tensor


Plan = dict[str, tuple[Piece, ...]]  # parameter of a module -> the stored tensors that make it up


def linear_plan(parameter: str, shapes: dict[str, tuple[int, int]], bias: bool) -> Plan:
    """The tensors of one linear, stacked from stored linears of the given shapes."""
    plan: Plan = {f"{parameter}.weight": tuple(Piece(f"{name}.weight", shape) for name, shape in shapes.items())}
    if bias:
        plan[f"{parameter}.bias"] = tuple(Piece(f"{name}.bias", shape[:1]) for name, shape in shapes.items())
    return plan


def take(part: Any) -> Take:
    """Takes a slice (or a tuple of slices) of a stored tensor."""
    return lambda tensor: tensor[part]
