"""The part of compile_kernels.py for mixtures of experts: published shapes, few rows and many."""

from dataclasses import replace
from typing import NamedTuple

import torch

from peregrine.kernels.moe import ExpertShare, RoutingRule


class RMSNorm(NamedTuple):
    """A norm, as models hand it to kernels."""

    weight: torch.Tensor
    eps: float


LITE = RoutingRule(
    num_experts=64,
    top_k=6,
    num_shared=2,
    sigmoid=False,
    num_groups=1,
    top_groups=1,
    best_two=False,
    normalise=False,
    scale=1.0,
)
QWEN3 = replace(LITE, num_experts=128, top_k=8, num_shared=0, normalise=True)
V3 = RoutingRule(
    num_experts=256,
    top_k=8,
    num_shared=1,
    sigmoid=True,
    num_groups=8,
    top_groups=4,
    best_two=True,
    normalise=True,
    scale=2.5,
)
OSS = replace(LITE, num_experts=32, top_k=4, num_shared=0, normalise=True)
# rule, hidden size, inner size, numbers of rows: few and many take other kernels. The last model has biases and clamps.
MODELS = {
    "DeepSeek-V2-Lite": (LITE, 2048, 1408, (4,)),
    "Qwen3-30B-A3B": (QWEN3, 2048, 768, (4096,)),
    "DeepSeek-V3": (V3, 7168, 2048, (4,)),
    "gpt-oss-20b": (OSS, 2880, 2880, (4, 4096)),
}


def compile_experts() -> None:
    """Routing and experts of every model; tensors have shapes but no memory."""
    from peregrine.kernels.linear.triton import TritonWeight
    from peregrine.kernels.moe.combine_triton import combine
    from peregrine.kernels.moe.gather_triton import gather
    from peregrine.kernels.moe.route_triton import route
    from peregrine.kernels.moe.triton import TritonExperts
    from peregrine.kernels.residual import Residual

    def shape(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    for rule, hidden, inner, sizes in MODELS.values():
        count = rule.num_experts + rule.num_shared
        biases = (shape(count, 2 * inner), shape(count, hidden), shape(count, dtype=torch.float32))
        gate_bias, down_bias, router_bias = biases if rule is OSS else (None, None, None)
        gate_up = TritonExperts(shape(count, 2 * inner, hidden), gate_bias, 7.0 if rule is OSS else None)
        down = TritonExperts(shape(count, hidden, inner), down_bias)
        router = TritonWeight(shape(rule.num_experts, hidden), router_bias)
        norm = RMSNorm(shape(hidden), 1e-6)
        for rows in sizes:
            x, squares = shape(rows, hidden), shape(rows, 2, dtype=torch.int64)
            bias = shape(rule.num_experts, dtype=torch.float32) if rule.sigmoid else None
            residual = Residual(x, x, squares, squares, 1e-6)
            choice = route(residual, router, rule, bias)
            gate_up.add(down, residual, choice, norm)
        if rule is LITE:
            counters = shape(128, dtype=torch.int32)
            combine(shape(rows * rule.num_choices, hidden), x, norm.weight, (x, x, squares, squares), None, counters)
        if rule is QWEN3:
            gather(x, (squares, 1e-6), choice, count, 128)
        if rule is OSS:
            half = ExpertShare(0, 2 * count, merge=lambda outputs: outputs)
            gate_up.add(down, Residual(x, x, squares, squares, 1e-6), choice, norm, half)
