"""One linear per head: each head of a token meets a weight of its own, [N, h, K] -> [N, h, O].

Latent attention takes its queries into the latent space, and its answers out of it, this way. Rows follow the law of
`linear`: each output is one chain over the inputs, so a row has the same bits alone and in company.
"""

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from peregrine.kernels.gpu import gpu_ready
from peregrine.kernels.linear import PackedWeight, linear, pack_weight


@dataclass(frozen=True, slots=True)
class PackedHeads:
    """The weights of all heads laid out for `heads_linear`; exactly one of the two is there."""

    weight: Tensor | None  # [h, O, K] dense, for a GPU's kernel
    linears: tuple[PackedWeight, ...] | None  # one for each head, for the CPU and the twin

    @property
    def num_bytes(self) -> int:
        """What all heads' weights take in memory."""
        held = [self.weight]
        for one in self.linears or ():
            held += [one.weight, one.panels]
        return sum(weight.numel() * weight.element_size() for weight in held if weight is not None)


def pack_heads(weight: Tensor) -> PackedHeads:
    """Lay out the values of weight [h, O, K]; no gradient will reach them."""
    weight = weight.detach().contiguous()
    if gpu_ready(weight):
        return PackedHeads(weight, None)
    return PackedHeads(None, tuple(pack_weight(head) for head in weight))


def heads_linear(x: Tensor, packed: PackedHeads, out: Tensor | None = None) -> Tensor:
    """x[:, i] @ weight[i].T for every head i: [N, h, K] -> [N, h, O], written to `out` if that is given.

    Rows and heads of x and of out may lie apart; the entries of a head lie side by side.
    """
    if packed.weight is not None:
        y: Tensor = _compiled_gpu().heads_linear_gpu(x, packed.weight, out)
        return y
    return heads_linear_torch(x, packed, out)


def heads_linear_torch(x: Tensor, packed: PackedHeads, out: Tensor | None = None) -> Tensor:
    """The twin: the linears of the heads, one after the other."""
    linears = packed.linears
    if linears is None:
        assert packed.weight is not None
        linears = tuple(pack_weight(head) for head in packed.weight)
    y = torch.stack([linear(x[:, i].contiguous(), head) for i, head in enumerate(linears)], dim=1)
    return y if out is None else out.copy_(y)


@functools.cache
def _compiled_gpu() -> ModuleType:
    from peregrine.kernels import heads_gpu

    return heads_gpu
