"""A mixture of experts in place of a layer's MLP.

Every token goes through the few experts that a router chooses for it. Experts that all tokens go through are stored as
one wide MLP; here they are cut into experts of the others' size, chosen by everyone with weight one, so that a layer's
experts are one stack and one pass.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peregrine.kernels.moe import (
    ExpertChoice,
    PackedExperts,
    join_experts,
    pack_experts,
    pack_router,
    plain_experts,
    route,
    route_torch,
)
from peregrine.kernels.residual import Residual
from peregrine.models.config import ExpertsConfig, ModelConfig
from peregrine.models.layers import Linear, Packable, RMSNorm


class Router(Linear):
    """Chooses experts; its logits and the bias that goes into the choice are float32 in every model."""

    def __init__(self, in_size: int, experts: ExpertsConfig) -> None:
        super().__init__(in_size, experts.num_experts)
        self.rule = experts.rule
        bias = torch.empty(experts.num_experts, dtype=torch.float32)
        self.choice_bias = nn.Parameter(bias) if experts.has_bias else None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """As for any module, but the bias stays float32."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.choice_bias is not None:
            self.choice_bias.data = self.choice_bias.data.float()
        return self

    def pack(self, keep_weight: bool = False) -> None:
        """Switch to the router's own layout."""
        if self.weight is None:
            raise RuntimeError("this router is packed already")
        self.packed = pack_router(self.weight.detach())
        if not keep_weight:
            self.weight = None

    def choose(self, stream: Residual) -> ExpertChoice:
        """The experts of each row of the normed stream."""
        if self.packed is not None:
            return route(stream, self.packed, self.rule, self.choice_bias)
        assert self.weight is not None
        return route_torch(F.linear(stream.ready.float(), self.weight.float()), self.rule, self.choice_bias)


class ExpertLinear(Packable):
    """One linear of every expert, stacked: weight [E * out, in]."""

    weight: nn.Parameter | None
    packed: PackedExperts | None

    def __init__(self, num_experts: int, in_size: int, out_size: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.weight = nn.Parameter(torch.empty(num_experts * out_size, in_size))
        self.packed = None

    def pack(self, keep_weight: bool = False) -> None:
        """Switch to the kernel's own layout; the plain weight goes."""
        if self.weight is None:
            raise RuntimeError("these experts are packed already")
        self.packed = pack_experts(self.weight, self.num_experts)
        if not keep_weight:
            self.weight = None

    def experts(self) -> PackedExperts:
        """Each expert's linear."""
        if self.packed is not None:
            return self.packed
        assert self.weight is not None
        return plain_experts(self.weight, self.num_experts)


class Experts(nn.Module):
    """The router, and the gated MLPs it chooses from, gate and up fused."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.config = config.experts
        size, inner, count = config.hidden_size, config.experts.inner_size, stacked_experts(config.experts)
        self.router = Router(size, config.experts)
        self.gate_up = ExpertLinear(count, size, 2 * inner)
        self.down = ExpertLinear(count, inner, size)
        self.on_choice: Callable[[ExpertChoice], None] | None = None  # benchmarks count the experts that are read

    def forward(self, stream: Residual, next_norm: RMSNorm | None) -> Residual:
        """The stream with the experts' answers to its norm added to it, ready for the norm that comes next."""
        weight, eps = (None, 0.0) if next_norm is None else (next_norm.weight, next_norm.eps)
        choice = self.router.choose(stream)
        if self.on_choice is not None:
            self.on_choice(choice)
        return join_experts(stream, choice, self.gate_up.experts(), self.down.experts(), weight, eps)


def stacked_experts(config: ExpertsConfig) -> int:
    """How many experts' weights a layer has, shared ones included."""
    return config.num_experts + config.num_shared
