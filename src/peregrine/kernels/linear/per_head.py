"""One linear layer per head: every head of a token is multiplied by a weight of its own, [N, h, K] -> [N, h, O].

MLA maps its queries into the space of the latents, and the results out of it, this way. A row's bits do not depend on
the batch, as in `linear/reference.py`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.linear.reference import WeightFormat, pack_weight
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_triton = DeviceFile("peregrine.kernels.linear.per_head_triton")


class PerHeadFormat(ABC):
    """The weights of all heads as one device stores them."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(heads, outputs, inputs)."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of all heads' weights in memory."""

    @abstractmethod
    def linear(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x[:, i] @ weight[i].T for every head i: [N, h, K] -> [N, h, O], written to `out` if that is given.

        Rows and heads of x and of `out` may lie apart; the entries of a head lie side by side.
        """


@dataclass(frozen=True, slots=True)
class PlainPerHead(PerHeadFormat):
    """One dense tensor, multiplied by the library, for training: a row's bits may depend on the batch."""

    weight: Tensor  # [h, O, K]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(heads, outputs, inputs)."""
        heads, outputs, inputs = self.weight.shape
        return heads, outputs, inputs

    @property
    def num_bytes(self) -> int:
        """Size of all heads' weights in memory."""
        return self.weight.nbytes

    def linear(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, h, K] -> [N, h, O]."""
        y = torch.einsum("nhk,hok->nho", x, self.weight)
        return y if out is None else out.copy_(y)


@dataclass(frozen=True, slots=True)
class LinearPerHead(PerHeadFormat):
    """For the CPU, and the twin: one weight for each head, one after the other."""

    heads: tuple[WeightFormat, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(heads, outputs, inputs)."""
        return len(self.heads), *self.heads[0].shape

    @property
    def num_bytes(self) -> int:
        """Size of all heads' weights in memory."""
        return sum(head.num_bytes for head in self.heads)

    def linear(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, h, K] -> [N, h, O]."""
        y = torch.stack([head.linear(x[:, i].contiguous()) for i, head in enumerate(self.heads)], dim=1)
        return y if out is None else out.copy_(y)


def pack_per_head(weight: Tensor) -> PerHeadFormat:
    """The values of weight [h, O, K] in the format of their device; no gradient will reach them."""
    weight = weight.detach().contiguous()
    if triton_ready(weight):
        packed: PerHeadFormat = _triton.TritonPerHead(weight)
        return packed
    return LinearPerHead(tuple(pack_weight(head) for head in weight))
