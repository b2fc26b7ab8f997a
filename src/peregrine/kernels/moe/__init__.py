"""Mixtures of experts: routing, and the experts' MLPs."""

from peregrine.kernels.moe.reference import (
    ExpertChoice,
    ExpertFormat,
    LinearExperts,
    RoutingRule,
    expert_outputs,
    pack_experts,
    pack_router,
    plain_experts,
    route,
    route_torch,
    weighted_outputs,
)

__all__ = [
    "ExpertChoice",
    "ExpertFormat",
    "LinearExperts",
    "RoutingRule",
    "expert_outputs",
    "pack_experts",
    "pack_router",
    "plain_experts",
    "route",
    "route_torch",
    "weighted_outputs",
]
