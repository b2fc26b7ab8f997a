"""Which experts a token goes to, and with what weights.

The law, all in float32: scores are the softmax or the sigmoid of the router's logits. A token's choice goes by its
scores, plus a stored bias where the model has one: first the best groups of experts, then the best experts of those
groups, best first, the lowest number first among equals. Weights are the scores of the chosen without the bias, divided
by their sum where the model normalises, times a scale. Experts that every token passes through come last, with weight
one. A row with a logit that is not a number gets valid experts, and weights that are not numbers.
"""

import torch
from torch import Tensor

from peregrine.kernels.activation import sigmoid
from peregrine.kernels.linear import PackedWeight, linear, pack_weight
from peregrine.kernels.moe.routing_rule import LEAST_SUM, ExpertChoice, RoutingRule
from peregrine.kernels.residual import Residual
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_triton = DeviceFile("peregrine.kernels.moe.route_triton")


def pack_router(weight: Tensor) -> PackedWeight:
    """Lay out a router's weight [E, H] for `route`: logits are float32, whatever the weight is."""
    return pack_weight(weight if triton_ready(weight) else weight.float())


def route(stream: Residual, packed: PackedWeight, law: RoutingRule, bias: Tensor | None) -> ExpertChoice:
    """The experts of each row of the normed stream; bias is [E] f32."""
    if packed.weight is not None and triton_ready(packed.weight):
        return ExpertChoice(*_triton.route(stream.ready, stream.squares, stream.eps, packed.weight, law, bias))
    return route_torch(linear(stream.ready.float(), packed), law, bias)


def route_torch(logits: Tensor, law: RoutingRule, bias: Tensor | None) -> ExpertChoice:
    """The twin, from the router's logits on: [N, E] f32. Differentiable in them."""
    scores = sigmoid(logits) if law.sigmoid else logits.softmax(dim=-1)
    choice = (scores if bias is None else scores + bias).detach()
    if law.top_groups < law.num_groups:
        choice = _within_groups(choice, law)
    chosen = _best(choice, law.top_k)  # [N, k]
    weights = scores.gather(1, chosen)
    if law.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    weights = weights * law.scale
    weights = weights.masked_fill(scores.isnan().any(dim=-1, keepdim=True), torch.nan)
    shared = torch.arange(law.num_experts, law.num_experts + law.num_shared, device=logits.device)
    experts = torch.cat([chosen, shared.expand(len(logits), -1)], dim=1)
    ones = weights.new_ones(len(logits), law.num_shared)
    return ExpertChoice(experts.int(), torch.cat([weights, ones], dim=1))


def _within_groups(choice: Tensor, law: RoutingRule) -> Tensor:
    """The scores with those outside a row's best groups made -inf: [N, E] -> [N, E]."""
    grouped = choice.view(len(choice), law.num_groups, law.num_experts // law.num_groups)  # [N, G, E / G]
    best = grouped.sort(dim=-1, descending=True).values
    of_groups = best[:, :, 0] + best[:, :, 1] if law.best_two else best[:, :, 0]
    kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, _best(of_groups, law.top_groups), True)
    return grouped.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)


def _best(scores: Tensor, count: int) -> Tensor:
    """The places of the largest in each row, largest first, the lowest place among equals. [N, count] i64"""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
