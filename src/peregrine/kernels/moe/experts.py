"""The chosen experts' MLPs of each row, weighted and added to the residual stream.

The law: every expert is a gated MLP of row-exact linears. A row's answers are weighted one by one and added up in
the order of its choice, best expert first and shared experts last; then the residual is added. So a row's bits depend
on its own choice alone, and not on who else chose the same experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.activation import silu_mul
from peregrine.kernels.linear import PackedWeight, linear, pack_weight
from peregrine.kernels.moe.routing_rule import ExpertChoice
from peregrine.kernels.residual import Residual, add_to_residual
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_triton = DeviceFile("peregrine.kernels.moe.experts_triton")


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """One linear of every expert, laid out for `join_experts`."""

    experts: tuple[PackedWeight, ...]
    weight: Tensor | None  # [E, O, I] of all of them, where they lie in one piece


def pack_experts(weight: Tensor, num_experts: int) -> PackedExperts:
    """Lay out the stacked weights [E * O, I] of one linear of every expert; no gradient will reach them."""
    stacked = weight.detach().view(num_experts, -1, weight.shape[1])
    experts = tuple(pack_weight(own) for own in stacked)
    return PackedExperts(experts, None if experts[0].panels is not None else stacked)


def plain_experts(weight: Tensor, num_experts: int) -> PackedExperts:
    """The same without any layout, to be trained."""
    parts = weight.view(num_experts, -1, weight.shape[1]).unbind(0)
    return PackedExperts(tuple(PackedWeight(len(own), None, own, None) for own in parts), None)


def join_experts(
    stream: Residual,
    choice: ExpertChoice,
    gate_up: PackedExperts,  # gates first, then ups: O = 2 * inner
    down: PackedExperts,
    norm: Tensor | None,
    eps: float,
) -> Residual:
    """The stream with the experts' answers to its norm added to it, ready for the norm that comes next."""
    if gate_up.weight is None or down.weight is None or not triton_ready(stream.ready):
        return add_to_residual(experts_mlp(stream.ready, choice, gate_up, down), stream, norm, eps)
    squares, stale = stream.spare, stream.squares
    if squares is None or stale is None:
        squares, stale = torch.zeros(2, len(stream.ready), dtype=torch.int64, device=stream.ready.device)
    values, scaled = _triton.join_experts(stream, choice, gate_up.weight, down.weight, norm, squares, stale)
    return Residual(values, values) if norm is None else Residual(values, scaled, squares, stale, eps)


def experts_mlp(x: Tensor, choice: ExpertChoice, gate_up: PackedExperts, down: PackedExperts) -> Tensor:
    """The twin, without the residual: [N, H] -> [N, H]. Differentiable; its cost follows the experts that are hit."""
    num_rows, choices = choice.experts.shape
    flat = choice.experts.flatten()
    order = flat.argsort(stable=True)  # pairs of row and place, by expert
    numbers, counts = torch.unique_consecutive(flat[order], return_counts=True)
    answers, start = x.new_empty(len(flat), down.experts[0].out_features), 0
    for number, count in zip(numbers, counts, strict=True):
        pairs = order[start : start + int(count)]
        inner = silu_mul(linear(x.index_select(0, pairs // choices), gate_up.experts[int(number)]))
        answers[pairs] = linear(inner, down.experts[int(number)])
        start += int(count)
    weighted = (answers.view(num_rows, choices, answers.shape[1]) * choice.weights[:, :, None]).to(x.dtype)
    total = weighted[:, 0].float()
    for place in range(1, choices):
        total = total + weighted[:, place]
    return total.to(x.dtype)
