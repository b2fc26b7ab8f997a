"""The experts module and its config: public config fields, public tensor names, and the outputs of transformers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.interpreted import needs_interpreter, send_models_to_triton
from peregrine.errors import CheckpointError
from peregrine.kernels.residual import Residual, start_residual
from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.weights import Weights
from peregrine.models.config import ExpertsConfig, ModelConfig
from peregrine.models.experts import Experts, Router
from peregrine.models.families import FAMILIES, family_of, parse_config, read_config
from peregrine.models.families.llama import Llama
from peregrine.models.layers import RMSNorm, draw_weights, pack_linears

V2_LITE: dict[str, Any] = {
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
V2 = V2_LITE | {
    "n_routed_experts": 160,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "routed_scaling_factor": 16.0,
}
V3: dict[str, Any] = {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
KIMI = V3 | {
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
}
QWEN3: dict[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MIXTRAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336}


def read(family: str, values: dict[str, Any], num_layers: int = 5) -> ExpertsConfig:
    reader = next(one for one in FAMILIES if one.model_type == family)
    experts = reader.experts(Fields("config.json", values), num_layers)
    assert experts is not None
    return experts


def test_deepseek_v2_lite() -> None:
    experts = read("deepseek_v2", V2_LITE)
    assert (experts.num_experts, experts.top_k, experts.inner_size) == (64, 6, 1408)
    assert (experts.shared_size, experts.num_shared) == (2816, 2)
    assert (experts.scoring, experts.has_bias, experts.normalise, experts.scale) == ("softmax", False, False, 1.0)
    assert experts.layers == (False, True, True, True, True)


def test_deepseek_v2_chooses_within_groups_only_if_told_to() -> None:
    experts = read("deepseek_v2", V2)
    assert (experts.num_groups, experts.top_groups, experts.group_score, experts.scale) == (8, 3, "max", 16.0)
    greedy = read("deepseek_v2", V2 | {"topk_method": "greedy"})
    assert (greedy.num_groups, greedy.top_groups) == (1, 1)


def test_deepseek_v3_and_kimi() -> None:
    experts = read("deepseek_v3", V3)
    assert (experts.scoring, experts.has_bias, experts.normalise, experts.scale) == ("sigmoid", True, True, 2.5)
    assert (experts.num_groups, experts.top_groups, experts.group_score) == (8, 4, "top2")
    assert experts.layers == (False, False, False, True, True)
    kimi = read("deepseek_v3", KIMI)
    assert (kimi.num_experts, kimi.num_groups, kimi.layers[0], kimi.layers[1]) == (384, 1, False, True)
    assert kimi.rule.num_choices == 9


def test_qwen3_has_experts_where_its_config_says_so() -> None:
    experts = read("qwen3_moe", QWEN3)
    assert (experts.num_experts, experts.normalise, experts.num_shared) == (128, True, 0)
    assert experts.layers == (True,) * 5
    some = read("qwen3_moe", QWEN3 | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert some.layers == (False, True, False, False, False)
    renamed = {name: value for name, value in QWEN3.items() if name != "num_experts"} | {"num_local_experts": 16}
    assert read("qwen3_moe", renamed).num_experts == 16


def test_mixtral() -> None:
    experts = read("mixtral", MIXTRAL)
    assert (experts.num_experts, experts.top_k, experts.inner_size) == (8, 2, 14336)
    assert (experts.normalise, experts.layers) == (True, (True,) * 5)


def test_dense_families_have_none() -> None:
    assert Llama().experts(Fields("config.json", V3), 4) is None


@pytest.mark.parametrize(
    ("family", "values", "field", "problem"),
    [
        ("deepseek_v3", V3 | {"n_group": 7}, "n_group", "does not divide"),
        ("deepseek_v3", V3 | {"n_group": 256}, "n_group", "two"),
        ("deepseek_v3", V3 | {"topk_group": 9}, "topk_group", "more than there are groups"),
        ("deepseek_v3", V3 | {"num_experts_per_tok": 257}, "num_experts_per_tok", "more than there are experts"),
        ("deepseek_v3", V3 | {"num_experts_per_tok": 129}, "num_experts_per_tok", "128 experts of 4 groups"),
        ("deepseek_v3", V3 | {"scoring_func": "softmax"}, "scoring_func", "sigmoid"),
        ("deepseek_v3", V3 | {"topk_method": "greedy"}, "topk_method", "noaux_tc"),
        ("deepseek_v3", V3 | {"moe_layer_freq": 2}, "moe_layer_freq", "every layer"),
        ("deepseek_v2", V2 | {"scoring_func": "tanh"}, "scoring_func", "softmax"),
        ("deepseek_v2", V2 | {"topk_method": "random"}, "topk_method", "group_limited_greedy"),
        ("deepseek_v2", V2 | {"norm_topk_prob": True}, "norm_topk_prob", "disagree"),
        ("deepseek_v2", V2 | {"n_group": None}, "n_group", "missing"),
        ("deepseek_v2", V2 | {"n_shared_experts": None}, "n_shared_experts", "missing"),
        ("deepseek_v3", V3 | {"routed_scaling_factor": None}, "routed_scaling_factor", "missing"),
        ("deepseek_v2", V2 | {"moe_layer_freq": 3}, "moe_layer_freq", "every layer"),
        ("qwen3_moe", QWEN3 | {"num_experts_per_tok": 200}, "num_experts_per_tok", "more than there are experts"),
        ("mixtral", MIXTRAL | {"num_local_experts": 0}, "num_local_experts", "whole number"),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    family: str, values: dict[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{field}=.*{problem}"):
        read(family, values)


BASE: dict[str, Any] = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY: dict[str, dict[str, Any]] = {
    "DeepseekV2": {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "DeepseekV3": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16},
    "GptOss": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 16, "swiglu_limit": 0.5},
}
DEEPSEEK_FIELDS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}


def fields_of(family: str) -> dict[str, Any]:
    attention = DEEPSEEK_FIELDS if family.startswith("Deepseek") else {"num_key_value_heads": 2}
    return BASE | {"intermediate_size": 48} | attention | TINY[family]


@pytest.fixture(params=TINY)
def checkpoint(request: pytest.FixtureRequest, write_checkpoint: Callable[..., Path]) -> tuple[Path, ModelConfig, Any]:
    """A folder that transformers wrote, its config, and transformers' own mixture of the last layer."""
    transformers = pytest.importorskip("transformers")
    folder = write_checkpoint(request.param, **fields_of(request.param))
    model = getattr(transformers, f"{request.param}ForCausalLM").from_pretrained(folder)
    return folder, read_config(folder), model.model.layers[1].mlp


def load(folder: Path, config: ModelConfig, pack: bool) -> Experts:
    plan = family_of(config).experts_plan(config, "mlp", "model.layers.1.mlp")
    holder = torch.nn.ModuleDict({"mlp": Experts(config)})
    weights = Weights(folder)
    weights.check(plan, ignorable=lambda name: "layers.1.mlp" not in name)
    if pack:
        weights.fill_and_pack(holder, plan)
    else:
        weights.fill(holder, plan)
    experts = holder["mlp"]
    assert isinstance(experts, Experts)
    return experts


def streams(config: ModelConfig, num_rows: int = 20) -> tuple[Residual, Tensor]:
    """A normed residual, and its normed values."""
    values = torch.randn(num_rows, config.hidden_size, generator=torch.Generator().manual_seed(1)) * 2
    stream = start_residual(values, RMSNorm(config.hidden_size, 1e-6).requires_grad_(False))
    return stream, stream.normed


@pytest.mark.parametrize("pack", [False, True])
@torch.no_grad()
def test_outputs_agree_with_transformers(checkpoint: tuple[Path, ModelConfig, Any], pack: bool) -> None:
    folder, config, theirs = checkpoint
    stream, x = streams(config)
    found = load(folder, config, pack).forward(stream, None)
    expected = theirs(x[None])
    expected = expected[0] if isinstance(expected, tuple) else expected  # some return their scores as well
    torch.testing.assert_close(found.values - stream.values, expected[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_row_has_the_same_bits_in_any_batch(checkpoint: tuple[Path, ModelConfig, Any]) -> None:
    folder, config, _ = checkpoint
    experts, norm = load(folder, config, pack=True), RMSNorm(config.hidden_size, 1e-6)
    stream, _ = streams(config)
    whole = experts.forward(stream, norm)
    for first, last in ((0, 1), (7, 11), (19, 20)):
        alone = experts.forward(stream.rows(torch.arange(first, last)), norm)
        assert torch.equal(alone.values, whole.values[first:last])
        assert torch.equal(alone.normed, whole.normed[first:last])


@needs_interpreter
@torch.no_grad()
def test_gpu_kernels_agree_with_cpu_kernels(
    checkpoint: tuple[Path, ModelConfig, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config, _ = checkpoint
    norm, (stream, _) = RMSNorm(config.hidden_size, 1e-6), streams(config)
    expected = load(folder, config, pack=True).forward(stream, norm)
    send_models_to_triton(monkeypatch)
    squares = ((stream.values * stream.values).double() * 2**24).long().sum(dim=1, keepdim=True).repeat(1, 2)
    found = load(folder, config, pack=True).forward(
        Residual(stream.values, stream.values, squares, torch.zeros_like(squares), 1e-6), norm
    )
    assert found.squares is not None
    torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.finish_norm(), expected.normed, rtol=1e-4, atol=1e-5)


def test_a_missing_expert_is_named(checkpoint: tuple[Path, ModelConfig, Any]) -> None:
    folder, config, _ = checkpoint
    assert config.experts is not None
    more = replace(config, experts=replace(config.experts, num_experts=config.experts.num_experts + 1))
    with pytest.raises(CheckpointError, match=r"missing: .*experts\.\d|wrong shape: .*experts\.down_proj"):
        load(folder, more, pack=True)


def tiny_config(family: str, architecture: str) -> ModelConfig:
    fields = fields_of(family) | {"architectures": [architecture], "max_position_embeddings": 64}
    return parse_config(Fields("tiny", fields))


def test_the_bias_of_the_choice_stays_float32() -> None:
    """Rounded to bfloat16 it would choose other experts."""
    config = tiny_config("DeepseekV3", "DeepseekV3ForCausalLM")
    experts = Experts(config).to(torch.bfloat16)
    assert experts.router.choice_bias is not None
    assert experts.router.choice_bias.dtype == torch.float32
    assert experts.gate_up.weight is not None
    assert experts.gate_up.weight.dtype == torch.bfloat16
    assert not Router(32, replace(config.experts, has_bias=False)).choice_bias  # type: ignore[type-var]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where the CPU has no bfloat16
@torch.no_grad()
def test_bfloat16_models_route_in_float32() -> None:
    config = tiny_config("DeepseekV3", "DeepseekV3ForCausalLM")
    experts = Experts(config).to(torch.bfloat16)
    draw_weights(experts, torch.Generator().manual_seed(2), scale=0.3)
    assert experts.router.weight is not None
    weight, stream = experts.router.weight.float(), streams(config)[0]
    stream = Residual(stream.values.bfloat16(), stream.normed.bfloat16())
    plain = experts.router.choose(stream)
    pack_linears(experts)
    packed = experts.router.choose(stream)
    assert torch.equal(plain.experts, packed.experts)
    torch.testing.assert_close(plain.weights, packed.weights, rtol=1e-6, atol=1e-7)
    scores = (stream.normed.double() @ weight.double().T).sigmoid()
    best = scores.gather(1, packed.experts[:, :2].long())
    expected = best / best.sum(1, keepdim=True) * 2.5
    torch.testing.assert_close(packed.weights[:, :2].double(), expected, rtol=1e-6, atol=0.0)
    assert experts.forward(stream, None).values.dtype == torch.bfloat16
