"""Mixtures of experts: which experts a token goes to, and their MLPs weighted and added to the residual stream.

Routing, all in float32: scores are the softmax or the sigmoid of the router's logits. A token's choice goes by its
scores, plus a stored bias if the model has one: first the best groups of experts, then the best experts of those
groups, best first, the lowest number first among equals. Weights are the scores of the chosen experts without the bias,
divided by their sum if the model normalises, times a scale. Shared experts, which every token goes through, come last,
with weight one or that of a gate. A row with a NaN logit gets valid experts, and NaN weights.

Experts: each is a gated MLP of linear layers with batch-independent rows, with biases in some models. A row's expert
outputs are weighted one by one and added up in the order of its choice; then the residual is added. A row's bits depend
on its own choice alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.activation import clamped_mul, sigmoid, silu_mul
from peregrine.kernels.linear import DenseWeight, WeightFormat, pack_weight
from peregrine.kernels.residual import Norm, Residual, add_to_residual
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_triton = DeviceFile("peregrine.kernels.moe.triton")
_route_triton = DeviceFile("peregrine.kernels.moe.route_triton")

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
    best_two: bool  # a group's score is the sum of its two best experts'; otherwise its best one's
    normalise: bool
    scale: float
    gated_shared: bool = False  # the router's last output is a gate: its sigmoid is the shared experts' weight

    @property
    def num_choices(self) -> int:
        """Experts that a token goes through: those it chose, then the shared ones."""
        return self.top_k + self.num_shared


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The experts of each row, best first and shared ones last, and the weights of their outputs."""

    experts: Tensor  # [N, choices] i32
    weights: Tensor  # [N, choices] f32
    num_shared: int = 0  # the last ones of every row are the last experts of all


def pack_router(weight: Tensor, rule: RoutingRule | None = None, bias: Tensor | None = None) -> WeightFormat:
    """A router's weight [E, H] and bias [E] for `route`; logits are float32, whatever the weight's dtype."""
    bias = None if bias is None else bias.detach().float()
    if triton_ready(weight):
        gated = rule is not None and rule.gated_shared  # no kernel has a gate yet: the twin routes
        return DenseWeight(weight.detach().float(), bias) if gated else pack_weight(weight, bias)
    return pack_weight(weight.float(), bias)


def route(residual: Residual, router: WeightFormat, rule: RoutingRule, bias: Tensor | None) -> ExpertChoice:
    """The experts of each row of the normed residual; bias is [E] f32."""
    if triton_ready(residual.normed) and not rule.gated_shared:
        choice: ExpertChoice = _route_triton.route(residual, router, rule, bias)
        return choice
    return route_torch(router.linear(residual.finish_norm().float()), rule, bias)


def route_torch(logits: Tensor, rule: RoutingRule, bias: Tensor | None) -> ExpertChoice:
    """The twin, from the router's logits [N, E] f32 on, or [N, E + 1] with a gate; differentiable in them."""
    share = logits.new_ones(len(logits), 1)
    if rule.gated_shared:
        logits, share = logits[:, :-1].contiguous(), sigmoid(logits[:, -1:])
    scores = sigmoid(logits) if rule.sigmoid else logits.softmax(dim=-1)
    ranked = (scores if bias is None else scores + bias).detach()
    if rule.top_groups < rule.num_groups:
        ranked = _within_groups(ranked, rule)
    chosen = _best(ranked, rule.top_k)  # [N, k]
    weights = scores.gather(1, chosen)
    if rule.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    weights = weights * rule.scale
    weights = weights.masked_fill(scores.isnan().any(dim=-1, keepdim=True), torch.nan)
    shared = torch.arange(rule.num_experts, rule.num_experts + rule.num_shared, device=logits.device)
    experts = torch.cat([chosen, shared.expand(len(logits), -1)], dim=1)
    weights = torch.cat([weights, share.expand(-1, rule.num_shared)], dim=1)
    return ExpertChoice(experts.int(), weights, rule.num_shared)


def _within_groups(ranked: Tensor, rule: RoutingRule) -> Tensor:
    """The scores, with those outside a row's best groups set to -inf: [N, E] -> [N, E]."""
    grouped = ranked.view(len(ranked), rule.num_groups, rule.num_experts // rule.num_groups)  # [N, G, E / G]
    best = grouped.sort(dim=-1, descending=True).values
    of_groups = best[:, :, 0] + best[:, :, 1] if rule.best_two else best[:, :, 0]
    kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(1, _best(of_groups, rule.top_groups), True)
    return grouped.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)


def _best(scores: Tensor, count: int) -> Tensor:
    """Places of the largest in each row, largest first, the lowest place among equals. [N, count] i64"""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """Which experts of a layer a format holds, if others have the rest."""

    first: int  # the number of its first expert
    total: int  # experts of the layer
    merge: Callable[[Tensor], Tensor]  # puts outputs [N * choices, H] together, of which each has those of its experts


class ExpertFormat(ABC):
    """One linear layer of every expert [E, O, I], as one device stores them."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(experts, outputs, inputs)."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of all experts' weights in memory."""

    @abstractmethod
    def add(
        self,
        down: "ExpertFormat",
        residual: Residual,
        choice: ExpertChoice,
        norm: Norm | None,
        share: ExpertShare | None = None,
    ) -> Residual:
        """The residual plus its experts' outputs, prepared for the norm that comes next.

        `self` is gate_up, gates first: an expert computes down(silu(gate) * up), or with `clamped_mul` where the format
        has a limit. `down` has the same format. `share`: None if all experts are here.
        """


@dataclass(frozen=True, slots=True)
class LinearExperts(ExpertFormat):
    """For the CPU, and the twin: one weight for each expert. Differentiable if the weights are."""

    experts: tuple[WeightFormat, ...]
    limit: float | None = None  # of gate_up: its activation is `clamped_mul`

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, outputs, inputs)."""
        return len(self.experts), *self.experts[0].shape

    @property
    def num_bytes(self) -> int:
        """Size of all experts' weights in memory."""
        return sum(expert.num_bytes for expert in self.experts)

    def add(
        self,
        down: ExpertFormat,
        residual: Residual,
        choice: ExpertChoice,
        norm: Norm | None,
        share: ExpertShare | None = None,
    ) -> Residual:
        """The residual plus its experts' outputs, prepared for the norm that comes next."""
        assert isinstance(down, LinearExperts)
        return add_to_residual(experts_mlp(residual.finish_norm(), choice, self, down, share), residual, norm)


def pack_experts(
    weight: Tensor,
    num_experts: int,
    bias: Tensor | None = None,
    limit: float | None = None,
    held: torch.dtype | None = None,
) -> ExpertFormat:
    """The values of stacked weights [E * O, I] and biases [E * O] in the format of their device; without gradients.

    `limit`: of `clamped_mul`, for gate_up. `held` is what a CPU's float32 weights may be rounded to and held in.
    """
    if not num_experts:
        return LinearExperts((), limit)
    stacked = weight.detach().view(num_experts, -1, weight.shape[1])
    biases = None if bias is None else bias.detach().view(num_experts, -1)
    if triton_ready(stacked):
        packed: ExpertFormat = _triton.TritonExperts(stacked, biases, limit)
        return packed
    each = zip(stacked, [None] * num_experts if biases is None else biases, strict=True)
    return LinearExperts(tuple(pack_weight(own, own_bias, held) for own, own_bias in each), limit)


def plain_experts(
    weight: Tensor, num_experts: int, bias: Tensor | None = None, limit: float | None = None
) -> ExpertFormat:
    """Stacked weights [E * O, I] and biases [E * O] as they are, to be trained."""
    parts = weight.view(num_experts, -1, weight.shape[1]).unbind(0)
    biases = [None] * num_experts if bias is None else bias.view(num_experts, -1).unbind(0)
    return LinearExperts(tuple(DenseWeight(*own) for own in zip(parts, biases, strict=True)), limit)


def experts_mlp(
    x: Tensor, choice: ExpertChoice, gate_up: LinearExperts, down: LinearExperts, share: ExpertShare | None = None
) -> Tensor:
    """The twin, without the residual: [N, H] -> [N, H]. Only the experts that are chosen are read."""
    outputs = expert_outputs(x, choice, gate_up, down, 0 if share is None else share.first)
    return weighted_outputs(outputs if share is None else share.merge(outputs), choice, x.dtype)


def expert_outputs(
    x: Tensor, choice: ExpertChoice, gate_up: LinearExperts, down: LinearExperts, first: int = 0
) -> Tensor:
    """What each row's experts say, in its order: [N, H] -> [N * choices, H]; of the experts from `first` on.

    Rows of experts that are not there are zero.
    """
    choices, last = choice.experts.shape[1], first + len(gate_up.experts)
    flat = choice.experts.flatten()
    order = flat.argsort(stable=True)  # pairs of row and place, by expert
    numbers, counts = torch.unique_consecutive(flat[order], return_counts=True)
    outputs, start = x.new_zeros(len(flat), x.shape[1]), 0
    for number, count in zip(numbers, counts, strict=True):
        pairs, start = order[start : start + int(count)], start + int(count)
        if first <= int(number) < last:
            both = gate_up.experts[int(number) - first].linear(x.index_select(0, pairs // choices))
            inner = silu_mul(both) if gate_up.limit is None else clamped_mul(both, gate_up.limit)
            outputs[pairs] = down.experts[int(number) - first].linear(inner)
    return outputs


def weighted_outputs(outputs: Tensor, choice: ExpertChoice, dtype: torch.dtype) -> Tensor:
    """A row's expert outputs [N * choices, O], weighted one by one and added up in the order of its choice: [N, O]."""
    num_rows, choices = choice.experts.shape
    weighted = (outputs.view(num_rows, choices, outputs.shape[1]) * choice.weights[:, :, None]).to(dtype)
    total = weighted[:, 0].float()
    for place in range(1, choices):
        total = total + weighted[:, place]
    return total.to(dtype)
