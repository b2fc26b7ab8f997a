"""One linear per head: each head of a token meets a weight of its own, [N, h, K] -> [N, h, O].

Latent attention takes its queries into the latent space, and its answers out of it, this way. Rows follow the law of
`linear`: each output is one chain over the inputs, so a row has the same bits alone and in company.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.linear.reference import PackedWeight, linear, pack_weight
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_triton = DeviceFile("peregrine.kernels.linear.per_head_triton")


@dataclass(frozen=True, slots=True)
class PackedPerHead:
    """The weights of all heads laid out for `per_head_linear`; exactly one of the two is there."""

    weight: Tensor | None  # [h, O, K] dense, for a GPU's kernel
    linears: tuple[PackedWeight, ...] | None  # one for each head, for the CPU and the twin


def pack_per_head(weight: Tensor) -> PackedPerHead:
    """Lay out the values of weight [h, O, K]; no gradient will reach them."""
    weight = weight.detach().contiguous()
    if triton_ready(weight):
        return PackedPerHead(weight, None)
    return PackedPerHead(None, tuple(pack_weight(head) for head in weight))


def per_head_linear(x: Tensor, packed: PackedPerHead, out: Tensor | None = None) -> Tensor:
    """x[:, i] @ weight[i].T for every head i: [N, h, K] -> [N, h, O], written to `out` if that is given.

    Rows and heads of x and of out may lie apart; the entries of a head lie side by side.
    """
    if packed.weight is not None:
        y: Tensor = _triton.per_head_linear_gpu(x, packed.weight, out)
        return y
    return per_head_linear_torch(x, packed, out)


def per_head_linear_torch(x: Tensor, packed: PackedPerHead, out: Tensor | None = None) -> Tensor:
    """The twin: the linears of the heads, one after the other."""
    linears = packed.linears
    if linears is None:
        assert packed.weight is not None
        linears = tuple(pack_weight(head) for head in packed.weight)
    y = torch.stack([linear(x[:, i].contiguous(), head) for i, head in enumerate(linears)], dim=1)
    return y if out is None else out.copy_(y)
