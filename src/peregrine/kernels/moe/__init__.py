"""Mixtures of experts: routing, and the experts' MLPs."""

from peregrine.kernels.moe.reference import (
    ExpertChoice,
    ExpertFormat,
    ExpertShare,
    LinearExperts,
    RoutingRule,
    pack_experts,
    pack_router,
    plain_experts,
    route,
    route_torch,
)

__all__ = [
    "ExpertChoice",
    "ExpertFormat",
    "ExpertShare",
    "LinearExperts",
    "RoutingRule",
    "pack_experts",
    "pack_router",
    "plain_experts",
    "route",
    "route_torch",
]
