"""A mixture of experts in place of a layer's MLP.

Every token goes through the few experts that a router chooses for it. Shared experts, which all tokens go through, are
stored as one wide MLP; here they are cut into experts of the others' size, chosen by every token with weight one, so
that a layer's experts are one stack and one pass.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peregrine.kernels.linear import WeightFormat
from peregrine.kernels.moe import (
    ExpertChoice,
    ExpertFormat,
    pack_experts,
    pack_router,
    plain_experts,
    route,
    route_torch,
)
from peregrine.kernels.residual import Residual
from peregrine.models.config import ExpertsConfig, ModelConfig
from peregrine.models.layers import Linear, Packable, RMSNorm
from peregrine.models.parallel import ALONE, Ranks
from peregrine.models.sharded import ShardedExperts


class Router(Linear):
    """Chooses experts; its logits and the bias of the choice are float32 in every model."""

    def __init__(self, in_size: int, experts: ExpertsConfig) -> None:
        super().__init__(in_size, experts.num_experts + experts.gated_shared, experts.biased)
        self.rule = experts.rule
        bias = torch.empty(experts.num_experts, dtype=torch.float32)
        self.choice_bias = nn.Parameter(bias) if experts.has_bias else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Move or cast the parameters, as for any module; but the bias stays float32."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.choice_bias is not None:
            self.choice_bias.data = self.choice_bias.data.float()
        return self

    def _pack(self, train: bool) -> WeightFormat:
        assert self.weight is not None
        return super()._pack(train) if train else pack_router(self.weight, self.rule, self.bias)

    def choose(self, residual: Residual) -> ExpertChoice:
        """The experts of each row of the normed residual."""
        if self.packed is not None:
            return route(residual, self.packed, self.rule, self.choice_bias)
        assert self.weight is not None
        bias = None if self.bias is None else self.bias.float()
        logits = F.linear(residual.finish_norm().float(), self.weight.float(), bias)
        return route_torch(logits, self.rule, self.choice_bias)


class ExpertLinear(Packable[ExpertFormat]):
    """One linear layer of every expert, stacked: weight [E * out, in], bias [E * out].

    `limit`: of the activation of gate_up, where it is clamped. Of several ranks each has its own experts.
    """

    def __init__(
        self,
        num_experts: int,
        in_size: int,
        out_size: int,
        bias: bool = False,
        limit: float | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.first, end = ranks.span(num_experts)
        self.num_experts, self.total, self.limit, self.ranks = end - self.first, num_experts, limit, ranks
        stacked = self.num_experts * out_size
        super().__init__(torch.empty(stacked, in_size), torch.empty(stacked) if bias else None)
        self.shard = ranks.keep(num_experts * out_size, (self.first * out_size, end * out_size))

    def _pack(self, train: bool) -> ExpertFormat:
        assert self.weight is not None
        parts = self.weight, self.num_experts, self.bias, self.limit
        packed = plain_experts(*parts) if train else pack_experts(*parts, self.held)
        return packed if self.shard is None else ShardedExperts(packed, self.ranks, self.first, self.total)


class Experts(nn.Module):
    """The router, and the gated MLPs it chooses from, with gate and up fused."""

    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        assert config.experts is not None
        self.config = config.experts
        size, inner, count = config.hidden_size, config.experts.inner_size, stacked_experts(config.experts)
        self.router = Router(size, config.experts)
        self.gate_up = ExpertLinear(count, size, 2 * inner, self.config.biased, self.config.swiglu_limit, ranks)
        self.down = ExpertLinear(count, inner, size, self.config.biased, ranks=ranks)
        self.on_choice: Callable[[ExpertChoice], None] | None = None  # benchmarks count the experts that are read

    def forward(self, residual: Residual, next_norm: RMSNorm | None, out_norm: RMSNorm | None = None) -> Residual:
        """The residual plus the experts of its norm, prepared for the norm that comes next."""
        assert out_norm is None, "no family norms what its experts add"
        choice = self.router.choose(residual)
        if self.on_choice is not None:
            self.on_choice(choice)
        return self.gate_up.format.add(self.down.format, residual, choice, next_norm)


def stacked_experts(config: ExpertsConfig) -> int:
    """How many experts' weights a layer has, shared ones included."""
    return config.num_experts + config.num_shared
