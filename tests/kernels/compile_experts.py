"""What compile_kernels.py compiles for mixtures of experts: published shapes, few rows and many."""

from dataclasses import replace

import torch

from peregrine.kernels.moe.routing_rule import ExpertChoice, RoutingRule

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
# law, hidden size, inner size
MODELS = {"DeepSeek-V2-Lite": (LITE, 2048, 1408), "Qwen3-30B-A3B": (QWEN3, 2048, 768), "DeepSeek-V3": (V3, 7168, 2048)}


def compile_experts() -> None:
    """Routing and experts of every model; tensors have shapes alone, no memory."""
    from peregrine.kernels.moe import experts_triton as experts_gpu
    from peregrine.kernels.moe import route_triton as route_gpu
    from peregrine.kernels.residual.reference import Residual

    def shape(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    for law, hidden, inner in MODELS.values():
        count = law.num_experts + law.num_shared
        weights = shape(count, 2 * inner, hidden), shape(count, hidden, inner)
        for rows in (4, 4096):
            x, squares = shape(rows, hidden), shape(rows, dtype=torch.int64)
            bias = shape(law.num_experts, dtype=torch.float32) if law.sigmoid else None
            choice = ExpertChoice(*route_gpu.route(x, squares, 1e-6, shape(law.num_experts, hidden), law, bias))
            stream = Residual(x, x, squares, squares, 1e-6)
            experts_gpu.join_experts(stream, choice, *weights, shape(hidden), squares, squares)
