"""The decoder against transformers: logits, hidden states, caches, live rows and gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.decoder import Decoder
from peregrine.models.families import FAMILIES, parse_config
from peregrine.models.layers import Linear, draw_weights
from peregrine.models.loading import load_decoder

README = Path(__file__).parents[2] / "README.md"
TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 24}

DEEPSEEK_FIELDS = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
}
GROUPS = {"n_group": 4, "topk_group": 2}
DENSE_V2 = {**DEEPSEEK_FIELDS, "first_k_dense_replace": 3, "q_lora_rank": None}
DENSE_V3 = {**DEEPSEEK_FIELDS, **GROUPS, "first_k_dense_replace": 3, "q_lora_rank": 20}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_local_experts": 8}
STRETCHED = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 4.0}
QWEN2_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
QWEN2_MOE |= {"shared_expert_intermediate_size": 48, "mlp_only_layers": [1]}
GEMMA = {"head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 20, "tie_word_embeddings": True}
GLM_MOE = {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GLM_MOE |= {"n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "head_dim": 12}
GPT_OSS |= {"sliding_window": 7, "swiglu_limit": 0.4, "rope_parameters": {**YARN, "truncate": False}}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 5.0],
    "original_max_position_embeddings": 24,
}
# name -> (family, changes to the config)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-untied": ("Llama", {}),
    "llama-tied-one-layer": ("Llama", {"tie_word_embeddings": True, "num_hidden_layers": 1}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "llama-heads-apart": ("Llama", {"head_dim": 20, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama-group-1": ("Llama", {"num_key_value_heads": 6, "rope_parameters": {"rope_theta": 777.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-no-truncate": ("Llama", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 20}}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    "llama-yarn-factor": ("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.25}}),
    "mistral-window": ("Mistral", {"sliding_window": 7, "head_dim": 10}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "num_hidden_layers": 2}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 1}),
    "qwen2-window-last": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen2-layer-types": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biased-yarn": ("Qwen3", {"head_dim": 16, "attention_bias": True, "rope_parameters": YARN}),
    "mla-v2": ("DeepseekV2", DENSE_V2),
    "mla-v2-ranked-yarn": ("DeepseekV2", {**DENSE_V2, "q_lora_rank": 20, "rope_parameters": STRETCHED}),
    "mla-v2-equal-mscales": (
        "DeepseekV2",
        {**DENSE_V2, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "mla-v3": ("DeepseekV3", {**DENSE_V3, "rms_norm_eps": 1e-2}),
    "mla-v3-biased": ("DeepseekV3", {**DENSE_V3, "attention_bias": True, "rope_parameters": STRETCHED}),
    "mla-v3-halves": ("DeepseekV3", {**DENSE_V3, "rope_interleave": False, "q_lora_rank": None}),
    "mla-v3-one-layer": ("DeepseekV3", {**DENSE_V3, "num_hidden_layers": 1}),
    "deepseek-v2": ("DeepseekV2", {**DEEPSEEK_FIELDS, "q_lora_rank": None, "routed_scaling_factor": 1.5}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {**DEEPSEEK_FIELDS, **GROUPS, "q_lora_rank": 20, "topk_method": "group_limited_greedy"},
    ),
    "deepseek-v3": ("DeepseekV3", {**DEEPSEEK_FIELDS, **GROUPS, "q_lora_rank": 20, "rope_parameters": STRETCHED}),
    "kimi-k2": (  # one group, many experts, one of them shared
        "DeepseekV3",
        {
            **DEEPSEEK_FIELDS,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 24,
            "n_shared_experts": 1,
            "q_lora_rank": 20,
            "rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 8, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3-moe-some-dense": (
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 8, "mlp_only_layers": [1], "attention_bias": True, "head_dim": 16},
    ),
    "mixtral": ("Mixtral", EXPERTS),
    "qwen2-moe": ("Qwen2Moe", {**QWEN2_MOE, "norm_topk_prob": True}),
    "granite": ("Granite", {**GRANITE, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi4-partly-rotated-long": ("Phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 24}),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4-moe": ("Glm4Moe", {**GLM_MOE, "use_qk_norm": True, "n_shared_experts": 1}),
    "glm4-moe-biases": ("Glm4Moe", {**GLM_MOE, **GROUPS, "attention_bias": True, "head_dim": 24}),
    "glm4-moe-lite": ("Glm4MoeLite", {**DEEPSEEK_FIELDS, "q_lora_rank": 20, "routed_scaling_factor": 1.8}),
    "glm4-moe-lite-dense-last": (
        "Glm4MoeLite",
        {**DEEPSEEK_FIELDS, "q_lora_rank": None, "mlp_layer_types": ["sparse", "sparse", "dense"]},
    ),
    "gemma2": ("Gemma2", {**GEMMA, **CAPS}),
    "gemma3": ("Gemma3", {**GEMMA, "sliding_window_pattern": 2}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "mixtral-window": ("Mixtral", {**EXPERTS, "sliding_window": 7, "num_experts_per_tok": 2}),
}

# What README.md calls a family, if not by its model_type.
CALLED = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "DeepSeek-V2/V3"),
    **dict.fromkeys(("gemma2", "gemma3_text"), "Gemma 2/3"),
    **dict.fromkeys(("glm", "glm4"), "GLM-4"),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite"), "GLM-4.5 to 4.7"),
    **{"gpt_oss": "gpt-oss", "olmo2": "OLMo 2", "phi3": "Phi-3/4", "smollm3": "SmolLM2/3"},
    **{"qwen2_moe": "Qwen2-MoE", "qwen3_moe": "Qwen3-MoE"},
}


def test_every_family_is_named_in_the_readme_and_held_against_transformers() -> None:
    (models,) = (part for part in README.read_text().split("\n- ") if part.startswith("**Models**"))
    held = {f"{family}ForCausalLM" for family, _ in CASES.values()}
    for family in FAMILIES:
        assert CALLED.get(family.model_type, family.model_type.capitalize()) in models, family.model_type
        assert held & set(family.architectures), family.model_type


def oracle(folder: Path, tokens: Tensor) -> Any:
    """transformers' own forward over the whole prompt, eager attention."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    with torch.no_grad():
        return model(tokens[None], output_hidden_states=True)


def prompt(length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 257, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=list(CASES))
def folder(request: pytest.FixtureRequest, write_checkpoint: Callable[..., Path]) -> Path:
    family, changes = CASES[request.param]
    return write_checkpoint(family, **changes)


@torch.no_grad()
def test_a_prompt_at_once_and_in_windows_agrees_with_transformers(folder: Path, dense_cache: Any) -> None:
    """Logits, and at once every tap; some windows have one token."""
    tokens, positions = prompt(41), torch.arange(41)
    expected = oracle(folder, tokens)
    decoder = load_decoder(folder)
    taps = (decoder.config.num_layers, *range(decoder.config.num_layers))
    hidden, tapped = decoder(tokens, positions, dense_cache(decoder.layer_attention()).bind(positions), taps)
    torch.testing.assert_close(decoder.logits(hidden), expected.logits[0], atol=TOLERANCE, rtol=0)
    assert tapped is not None
    for tap, ours in zip(taps, tapped.split(decoder.config.hidden_size, dim=1), strict=True):
        torch.testing.assert_close(ours, expected.hidden_states[tap][0], atol=TOLERANCE, rtol=1e-4)
    cache = dense_cache(decoder.layer_attention())
    for window in positions.split([11, 1, 1, 5, 1, 14, 8]):
        hidden, tapped = decoder(tokens[window], window, cache.bind(window))
        assert tapped is None
        torch.testing.assert_close(decoder.logits(hidden), expected.logits[0, window], atol=TOLERANCE, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("taps", [(), (0, 2), (1, 3)])
def test_live_rows_equal_the_rows_of_a_full_forward(
    write_checkpoint: Callable[..., Path], dense_cache: Any, taps: tuple[int, ...]
) -> None:
    decoder = load_decoder(write_checkpoint("Qwen3", head_dim=16))
    tokens, positions, live = prompt(17), torch.arange(17), torch.tensor([16, 3, 8])
    whole, all_taps = decoder(tokens, positions, dense_cache(decoder.layer_attention()).bind(positions), taps)
    caches = [dense_cache(decoder.layer_attention()) for _ in range(2)]
    some, some_taps = decoder(tokens, positions, caches[0].bind(positions, live), taps, live)
    assert some.shape == (3, decoder.config.hidden_size)
    torch.testing.assert_close(some, whole[live], atol=1e-6, rtol=0)
    if taps:
        torch.testing.assert_close(some_taps, all_taps, atol=1e-6, rtol=0)
    # Keys and values are written for every token, live or not.
    decoder(tokens, positions, caches[1].bind(positions))
    for layer in range(decoder.config.num_layers):
        torch.testing.assert_close(caches[0].keys[layer], caches[1].keys[layer], atol=1e-6, rtol=0)


@torch.no_grad()
def test_packed_and_plain_agree(write_checkpoint: Callable[..., Path], dense_cache: Any) -> None:
    folder = write_checkpoint("Llama", attention_bias=True, mlp_bias=True)
    tokens, positions = prompt(9), torch.arange(9)
    outputs = []
    for decoder in (load_decoder(folder), load_decoder(folder, pack=False), load_decoder(folder, pack=False).pack()):
        hidden, _ = decoder(tokens, positions, dense_cache(decoder.layer_attention()).bind(positions))
        outputs.append(decoder.logits(hidden))
    torch.testing.assert_close(outputs[1], outputs[0], atol=1e-5, rtol=0)
    assert torch.equal(outputs[2], outputs[0])


def test_packing_drops_weights_but_not_the_shared_one(write_checkpoint: Callable[..., Path]) -> None:
    decoder = load_decoder(write_checkpoint("Llama", tie_word_embeddings=True))
    linears = [module for module in decoder.modules() if isinstance(module, Linear)]
    assert all(module.packed is not None for module in linears)
    assert [module for module in linears if module.weight is not None] == [decoder.head]
    assert decoder.head.weight is decoder.embedding
    assert not any(parameter.requires_grad for parameter in decoder.parameters())


def test_gradients_reach_every_parameter(write_checkpoint: Callable[..., Path], dense_cache: Any) -> None:
    folder = write_checkpoint("Qwen3", head_dim=16, attention_bias=True)
    decoder = load_decoder(folder, pack=False)
    tokens, positions = prompt(12), torch.arange(12)
    hidden, _ = decoder(tokens, positions, dense_cache(decoder.layer_attention()).bind(positions))
    decoder.logits(hidden).log_softmax(-1)[torch.arange(11), tokens[1:]].sum().backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0 or name.endswith("kv.bias"), name
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    model(tokens[None]).logits[0].log_softmax(-1)[torch.arange(11), tokens[1:]].sum().backward()
    expected = model.model.embed_tokens.weight.grad
    torch.testing.assert_close(decoder.embedding.grad, expected, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_half_precision_stays_close(write_checkpoint: Callable[..., Path], dense_cache: Any) -> None:
    folder = write_checkpoint("Qwen3", head_dim=16)
    tokens, positions = prompt(13), torch.arange(13)
    exact = oracle(folder, tokens).logits[0]
    decoder = load_decoder(folder, dtype=torch.float16)
    hidden, _ = decoder(tokens, positions, dense_cache(decoder.layer_attention()).bind(positions))
    logits = decoder.logits(hidden)
    assert logits.dtype == torch.float32  # a CPU rounds weights to the dtype and computes in float32
    assert torch.nn.functional.cosine_similarity(logits.float(), exact).min() > 0.999


def test_drawn_weights_follow_the_generator() -> None:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "tie_word_embeddings": True,
    }
    config = parse_config(Fields("config", fields))
    decoders = [Decoder(config, num_positions=16) for _ in range(2)]
    for decoder in decoders:
        draw_weights(decoder, torch.Generator().manual_seed(5))
    for ours, theirs in zip(*(decoder.parameters() for decoder in decoders), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(decoders[0].norm.weight, torch.ones(24))
    assert decoders[0].rope_table.shape[0] < 200
    assert 0.015 < decoders[0].embedding.std() < 0.025
