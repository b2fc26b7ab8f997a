"""Mixtures of experts: routing and the experts' MLPs."""

from peregrine.kernels.moe.experts import PackedExperts, join_experts, pack_experts, plain_experts
from peregrine.kernels.moe.route import pack_router, route, route_torch
from peregrine.kernels.moe.routing_rule import ExpertChoice, RoutingRule

__all__ = [
    "ExpertChoice",
    "PackedExperts",
    "RoutingRule",
    "join_experts",
    "pack_experts",
    "pack_router",
    "plain_experts",
    "route",
    "route_torch",
]
