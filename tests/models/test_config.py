"""Reading config.json: the meaning of each family's fields, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from peregrine.errors import CheckpointError
from peregrine.models.checkpoint.folder import Fields
from peregrine.models.config import ModelConfig
from peregrine.models.families import FAMILIES, parse_config, read_config
from peregrine.models.families.family import Family
from peregrine.models.rope_table import LinearScaling, Llama3Scaling, YarnScaling

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


MIXTRAL: dict[str, Any] = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def read(**changes: Any) -> ModelConfig:
    return parse_config(Fields("config.json", MINIMAL | changes))


def refusal(**changes: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(**changes)
    return str(caught.value)


def test_defaults_of_a_minimal_config() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.max_positions) == (4, 6, 64)
    assert (config.rope.theta, config.rope.scaling, config.norm_eps) == (10000.0, None, 1e-6)
    assert config.windows == (None,) * 4
    assert not any((config.tied, config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm))
    assert (config.bos_id, config.eos_ids) == (None, ())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_absent_fields_mean_what_they_mean_in_transformers(family: Family) -> None:
    config = AutoConfig.for_model(family.model_type)
    rope = config.rope_parameters
    assert family.norm_eps == config.rms_norm_eps
    assert family.rope_theta == rope.get("sliding_attention", rope)["rope_theta"]


GLM = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
GLM |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5}


def test_absent_fields_of_glm_mean_what_they_mean_in_transformers() -> None:
    flash, oracle = read(**GLM, architectures=["Glm4MoeLiteForCausalLM"]), AutoConfig.for_model("glm4_moe_lite")
    assert flash.mla is not None
    sizes = flash.mla.q_rank, flash.mla.kv_rank, flash.mla.nope_dim, flash.mla.rope_dim, flash.mla.value_dim
    names = "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    assert sizes == tuple(getattr(oracle, name) for name in names)
    assert flash.experts is not None
    assert flash.experts.layers == (False, True, True, True)
    for given in ({}, {"partial_rotary_factor": None}):
        large = read(**GLM, **given, architectures=["Glm4MoeForCausalLM"], first_k_dense_replace=1, head_dim=16)
        assert (large.rope.rotated(16), large.qk_norm, large.qkv_bias, large.out_bias) == (8, False, False, False)
    problem = refusal(**GLM, architectures=["Glm4MoeLiteForCausalLM"], mlp_layer_types=["dense", "sparse"])
    assert "mlp_layer_types" in problem
    assert "not dense or sparse for 4 layers" in problem


@pytest.mark.parametrize(
    ("architecture", "qkv_bias", "out_bias", "qk_norm"),
    [
        ("LlamaForCausalLM", True, True, False),
        ("MistralForCausalLM", False, False, False),
        ("Qwen2ForCausalLM", True, False, False),
        ("Qwen3ForCausalLM", True, True, True),
        ("MiMoForCausalLM", True, False, False),
    ],
)
def test_what_attention_bias_means(architecture: str, qkv_bias: bool, out_bias: bool, qk_norm: bool) -> None:
    config = read(architectures=[architecture], attention_bias=True)
    assert (config.qkv_bias, config.out_bias, config.qk_norm) == (qkv_bias, out_bias, qk_norm)


def test_families_with_experts_have_the_attention_of_the_dense_family() -> None:
    mixtral, qwen = read(**MIXTRAL, attention_bias=True), read(**QWEN3_MOE, attention_bias=True)
    assert (mixtral.qkv_bias, mixtral.out_bias, mixtral.qk_norm) == (False, False, False)
    assert (qwen.qkv_bias, qwen.out_bias, qwen.qk_norm) == (True, True, True)
    assert qwen.head_dim == 6  # unlike Qwen3's, as wide as the hidden size leaves them
    assert not qwen.kv_shape.shared
    assert [mixtral.has_experts(i) for i in range(4)] == [True] * 4
    assert not read().has_experts(0)


def test_qwen2_always_has_biases() -> None:
    assert read(architectures=["Qwen2ForCausalLM"], attention_bias=False).qkv_bias


def test_qwen3_heads_are_128_wide_unless_said() -> None:
    assert read(architectures=["Qwen3ForCausalLM"]).head_dim == 128


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8,) * 4),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, (None,) * 4),
        (MIXTRAL, (None,) * 4),
        ({**MIXTRAL, "sliding_window": 8}, (8,) * 4),
        ({**QWEN3_MOE, "sliding_window": 8, "max_window_layers": 1}, (None,) * 4),
        ({**QWEN3_MOE, "sliding_window": 8, "use_sliding_window": True}, (8,) * 4),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 1}, (None,) * 4),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 3,
            },
            (None, None, None, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": None}, (None,) * 4),
    ],
)
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = read(**changes)
    assert config.windows == windows
    layers = config.layer_attention()
    assert tuple(layer.window for layer in layers) == windows
    assert all(layer.scale == config.head_dim**-0.5 and layer.sinks is None for layer in layers)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5, None),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 2}},  # added by hand
            5e5,
            LinearScaling(2.0),
        ),
        ({"rope_theta": 9.0, "rope_parameters": {"rope_theta": 5e5}}, 5e5, None),
        ({"rope_theta": 9, "rope_scaling": {"type": "linear", "factor": 2}}, 9.0, LinearScaling(2.0)),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 1e4, Llama3Scaling(8.0, 1.0, 4.0, 32)),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 1.0, "beta_slow": 2}},
            1e4,
            YarnScaling(1.0, 64, 32.0, 2.0, 1.0, True),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4}, "original_max_position_embeddings": 16},
            1e4,
            YarnScaling(4.0, 16, 32.0, 1.0, 1.1386294361119891, True),
        ),
    ],
)
def test_rope_is_read_from_either_spelling(changes: dict[str, Any], theta: float, scaling: Any) -> None:
    config = read(**changes)
    assert (config.rope.theta, config.rope.scaling) == (theta, scaling)


def test_yarn_stretches_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read(rope_scaling=scaling).max_positions == 256


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "LlamaForCausalLM, MistralForCausalLM"]),
        ({"architectures": []}, ["names no architecture", "Qwen3ForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "silu"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq", "bfloat16"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5", "whole heads"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor=0.5"]),
        (
            {"architectures": ["Phi3ForCausalLM"], "head_dim": 100, "partial_rotary_factor": 0.33},
            ["partial_rotary_factor=0.33", "33 of 100 entries"],
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["type='dynamic'", "linear, llama3, longrope, yarn"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["long_factor=None", "not as many"]),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, ["type='mrope'"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["full_attention", "rope type 'default'"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor=None", "missing"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["factor=0", "above 0"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling='yarn'", "not a JSON object"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4"]),
        ({"num_attention_heads": 5}, ["num_attention_heads=5", "hidden_size=24"]),
        ({"head_dim": 7}, ["head_dim=7", "pairs"]),
        ({"vocab_size": None}, ["vocab_size=None", "missing"]),
        ({"hidden_size": "24"}, ["hidden_size='24'", "whole number"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers=True"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings=1", "true nor false"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "each of 4 layers"]),
        ({"layer_types": ["linear_attention"] * 4}, ["'linear_attention'", "not supported"]),
        ({"layer_types": ["sliding_attention"] * 4}, ["layer_types", "llama layers have no window"]),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 4},
            ["layer_types", "all have one window"],
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4},
            ["layer_types", "use_sliding_window"],
        ),
        ({"eos_token_id": "2"}, ["eos_token_id='2'"]),
    ],
)
def test_refusals_name_field_and_value(changes: dict[str, Any], parts: list[str]) -> None:
    message = refusal(**changes)
    for part in parts:
        assert part in message


def test_special_ids_come_from_the_generation_config_first(
    write_checkpoint: Callable[..., Path], edit_json: Callable[..., None]
) -> None:
    folder = write_checkpoint("Llama")
    edit_json(folder / "config.json", eos_token_id=7, bos_token_id=5)
    edit_json(folder / "generation_config.json", eos_token_id=[9, 11], bos_token_id=...)
    config = read_config(folder)
    assert (config.bos_id, config.eos_ids) == (5, (9, 11))
    edit_json(folder / "generation_config.json", eos_token_id=..., bos_token_id=6)
    config = read_config(folder)
    assert (config.bos_id, config.eos_ids) == (6, (7,))
    (folder / "generation_config.json").unlink()
    config = read_config(folder)
    assert (config.bos_id, config.eos_ids) == (5, (7,))


def test_model_type_serves_where_no_architecture_is_named() -> None:
    assert read(architectures=None, model_type="qwen3").qk_norm
