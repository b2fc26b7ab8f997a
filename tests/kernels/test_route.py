"""The routing twin against the gates of transformers and a sort in Python, and the kernel against the twin."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.compile_experts import LITE
from kernels.interpreted import needs_interpreter
from peregrine.kernels.moe import ExpertChoice, RoutingRule, pack_router, route, route_torch
from peregrine.kernels.moe.reference import LEAST_SUM
from peregrine.kernels.residual import Residual

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, of nan

SOFTMAX = replace(LITE, num_experts=12, top_k=3, num_shared=0)
RULES = {
    "mixtral": replace(SOFTMAX, num_experts=8, top_k=2, normalise=True),
    "qwen3": replace(SOFTMAX, num_experts=128, top_k=8, normalise=True),
    "v2 lite": replace(SOFTMAX, num_experts=64, top_k=6, num_shared=2),
    "v2": replace(SOFTMAX, num_experts=20, top_k=3, num_groups=4, top_groups=2, scale=16.0, num_shared=2),
    "v3": replace(
        SOFTMAX,
        num_experts=32,
        top_k=4,
        num_shared=1,
        sigmoid=True,
        num_groups=8,
        top_groups=3,
        best_two=True,
        normalise=True,
        scale=2.5,
    ),
    "kimi": replace(SOFTMAX, num_experts=48, top_k=8, num_shared=1, sigmoid=True, normalise=True, scale=2.827),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def draw(*size: int, seed: int = 0, spread: float = 1.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def bias_of(rule: RoutingRule) -> Tensor | None:
    return draw(rule.num_experts, seed=9, spread=0.2) if rule.sigmoid else None


def by_hand(logits: list[float], rule: RoutingRule, bias: list[float]) -> tuple[list[int], list[float]]:
    """One row's choice by sorting in Python, in float64."""
    row = torch.tensor(logits, dtype=torch.float64)
    scores = (row.sigmoid() if rule.sigmoid else row.softmax(0)).tolist()
    choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = rule.num_experts // rule.num_groups
    members = [range(g * size, (g + 1) * size) for g in range(rule.num_groups)]
    worth = [sum(sorted(choice[e] for e in group)[-(2 if rule.best_two else 1) :]) for group in members]
    kept = sorted(range(rule.num_groups), key=lambda g: (-worth[g], g))[: rule.top_groups]
    allowed = [e for g in kept for e in members[g]]
    chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: rule.top_k]
    weights = [scores[e] for e in chosen]
    if rule.normalise:
        weights = [weight / (sum(scores[e] for e in chosen) + LEAST_SUM) for weight in weights]
    shared = range(rule.num_experts, rule.num_experts + rule.num_shared)
    return [*chosen, *shared], [*(weight * rule.scale for weight in weights), *(1.0 for _ in shared)]


@each_rule
def test_the_twin_is_a_sort(rule: RoutingRule) -> None:
    logits, bias = draw(40, rule.num_experts, spread=2.0), bias_of(rule)
    found = route_torch(logits, rule, bias)
    assert found.experts.dtype == torch.int32
    for i, row in enumerate(logits.tolist()):
        experts, weights = by_hand(row, rule, [0.0] * rule.num_experts if bias is None else bias.tolist())
        assert found.experts[i].tolist() == experts
        torch.testing.assert_close(found.weights[i], torch.tensor(weights))


def test_among_equals_the_lowest_number_is_first() -> None:
    found = route_torch(torch.zeros(2, 12), SOFTMAX, None)
    assert found.experts.tolist() == [[0, 1, 2]] * 2
    logits = torch.tensor([[0.0, 1.0, 3.0, 1.0, 3.0, 1.0] * 2])
    assert route_torch(logits, SOFTMAX, None).experts.tolist() == [[2, 4, 8]]
    grouped = replace(SOFTMAX, num_groups=4, top_groups=2)
    assert route_torch(torch.zeros(1, 12), grouped, None).experts.tolist() == [[0, 1, 2]]


def test_a_bias_decides_the_choice_and_not_the_weights() -> None:
    rule = replace(RULES["kimi"], num_experts=4, top_k=2, num_shared=0, normalise=False, scale=1.0)
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0])
    found = route_torch(torch.tensor([[3.0, 2.0, -1.0, 0.0]]), rule, bias)
    assert found.experts.tolist() == [[2, 0]]
    torch.testing.assert_close(found.weights, torch.tensor([[-1.0, 3.0]]).sigmoid())


def test_nan_makes_the_weights_nan_and_keeps_the_experts_valid() -> None:
    for rule in RULES.values():
        logits = draw(3, rule.num_experts)
        logits[1, 5] = torch.nan
        found = route_torch(logits, rule, bias_of(rule))
        assert found.weights[1, : rule.top_k].isnan().all()
        assert not found.weights[[0, 2]].isnan().any()
        assert int(found.experts.max()) < rule.num_experts + rule.num_shared


GATES: list[tuple[str, str, dict[str, Any], str]] = [
    ("Mixtral", "mixtral.modeling_mixtral.MixtralTopKRouter", {}, "mixtral"),
    (
        "Qwen3Moe",
        "qwen3_moe.modeling_qwen3_moe.Qwen3MoeTopKRouter",
        {"num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": True},
        "qwen3",
    ),
    (
        "DeepseekV2",
        "deepseek_v2.modeling_deepseek_v2.DeepseekV2TopkRouter",
        {
            "n_routed_experts": 20,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
        "v2",
    ),
    (
        "DeepseekV3",
        "deepseek_v3.modeling_deepseek_v3.DeepseekV3TopkRouter",
        {"n_routed_experts": 32, "num_experts_per_tok": 4, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 2.5},
        "v3",
    ),
]


@pytest.mark.parametrize(("family", "gate", "fields", "rule"), GATES, ids=[case[0] for case in GATES])
def test_choices_and_weights_agree_with_transformers(family: str, gate: str, fields: dict[str, Any], rule: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(hidden_size=32, num_attention_heads=4, **fields)
    module = transformers.models
    for name in gate.split("."):
        module = getattr(module, name)
    router = module(config)
    chosen_rule = replace(RULES[rule], num_shared=0)
    weight, x = draw(chosen_rule.num_experts, 32, seed=1), draw(50, 32, seed=2)
    with torch.no_grad():
        router.weight.copy_(weight)
        if chosen_rule.sigmoid:
            router.e_score_correction_bias.copy_(bias_of(chosen_rule))
        _, weights, experts = router(x)
    found = route(Residual(x, x), pack_router(weight), chosen_rule, bias_of(chosen_rule))
    order = experts.argsort(dim=1)  # theirs are unsorted
    ours = found.experts.argsort(dim=1)
    assert torch.equal(found.experts.gather(1, ours).long(), experts.gather(1, order))
    torch.testing.assert_close(found.weights.gather(1, ours), weights.gather(1, order))


@each_rule
def test_a_row_gets_the_same_experts_in_any_batch(rule: RoutingRule) -> None:
    weight, x = pack_router(draw(rule.num_experts, 48, seed=1)), draw(37, 48, seed=2)
    whole = route(Residual(x, x), weight, rule, bias_of(rule))
    for first, last in ((0, 1), (5, 6), (3, 20), (36, 37)):
        alone = route(Residual(x[first:last], x[first:last]), weight, rule, bias_of(rule))
        assert torch.equal(alone.experts, whole.experts[first:last])
        assert torch.equal(alone.weights, whole.weights[first:last])


def on_gpu(x: Tensor, weight: Tensor, rule: RoutingRule, squares: Tensor | None = None) -> ExpertChoice:
    from peregrine.kernels.linear.triton import TritonWeight
    from peregrine.kernels.moe import route_triton

    residual = Residual(x, x, squares, squares, 1e-6)
    choice: ExpertChoice = route_triton.route(residual, TritonWeight(weight, None), rule, bias_of(rule))
    return choice


@needs_interpreter
@each_rule
def test_the_kernel_is_the_twin(rule: RoutingRule) -> None:
    weight, x = draw(rule.num_experts, 512, seed=1, spread=0.05), draw(5, 512, seed=2)
    twin = route(Residual(x, x), pack_router(weight), rule, bias_of(rule))
    found = on_gpu(x, weight, rule)
    assert torch.equal(found.experts, twin.experts)
    torch.testing.assert_close(found.weights, twin.weights)


@needs_interpreter
def test_the_kernel_divides_by_the_norm_of_the_residual() -> None:
    rule, values = RULES["v3"], draw(3, 64, seed=2, spread=3.0)
    weight, norm = draw(rule.num_experts, 64, seed=1), draw(64, seed=3)
    coarse = (values.double().square().sum(dim=1) * 2**24).long()
    squares = torch.stack([coarse, torch.zeros_like(coarse)], dim=1)
    normed = values / (values.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * norm
    twin = route(Residual(normed, normed), pack_router(weight), rule, bias_of(rule))
    found = on_gpu(values * norm, weight, rule, squares)
    assert torch.equal(found.experts, twin.experts)
    torch.testing.assert_close(found.weights, twin.weights)


@needs_interpreter
def test_the_kernel_treats_ties_and_nan_as_the_twin_does() -> None:
    for rule in RULES.values():
        x = torch.zeros(2, 16)
        x[1] = torch.nan
        found = on_gpu(x, torch.ones(rule.num_experts, 16), rule)
        twin = route_torch(torch.zeros(1, rule.num_experts), rule, bias_of(rule))
        assert torch.equal(found.experts[:1], twin.experts)
        assert found.weights[1, : rule.top_k].isnan().all()
        assert int(found.experts.max()) < rule.num_experts + rule.num_shared
        assert int(found.experts.min()) >= 0


@needs_interpreter
def test_the_kernels_rows_do_not_depend_on_the_tile() -> None:
    """More rows than the small tile holds: the tall tile gives the same bits."""
    rule = RULES["v2"]
    weight, x = draw(rule.num_experts, 48, seed=1), draw(70, 48, seed=2)
    whole = on_gpu(x, weight, rule)
    for first, last in ((0, 1), (60, 64), (69, 70)):
        alone = on_gpu(x[first:last], weight, rule)
        assert torch.equal(alone.experts, whole.experts[first:last])
        assert torch.equal(alone.weights, whole.weights[first:last])
