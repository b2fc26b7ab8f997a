"""Random weights in public models' shapes, so that any machine can measure without a download.

The text is noise and never ends by itself; arithmetic and memory are those of the real model. The drafter is a
prediction layer where the shape has one, else an EAGLE-3 head.
"""

import torch
from torch import nn

from peregrine.errors import ConfigError
from peregrine.hardware import arithmetic_dtype
from peregrine.models.checkpoint.folder import Fields
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.families import parse_config
from peregrine.models.layers import Packable
from peregrine.models.parallel import ALONE, Ranks

PREFIX = "shape:"
_LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
_QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "head_dim": 128,
}
_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_DEEPSEEK = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 163840,
}
_DEEPSEEK_V3 = _DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, object]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _experts(name: str, count: int, chosen: int, inner: int) -> dict[str, object]:
    return {name: count, "num_experts_per_tok": chosen, "moe_intermediate_size": inner}


SHAPES: dict[str, dict[str, object]] = {
    "llama-3.1-8b": _LLAMA | {"rope_scaling": _LLAMA_ROPE} | _sizes(4096, 14336, 32, 32, 8),
    "llama-3.2-1b": _LLAMA
    | {"rope_scaling": _LLAMA_ROPE | {"factor": 32.0}, "head_dim": 64, "tie_word_embeddings": True}
    | _sizes(2048, 8192, 16, 32, 8),
    "qwen3-8b": _QWEN | _sizes(4096, 12288, 36, 32, 8),
    "qwen3-30b-a3b": _QWEN
    | _experts("num_experts", 128, 8, 768)
    | {"architectures": ["Qwen3MoeForCausalLM"], "norm_topk_prob": True}
    | _sizes(2048, 6144, 48, 32, 4),
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
    }
    | _experts("num_local_experts", 8, 2, 14336)
    | _sizes(4096, 14336, 32, 32, 8),
    # The public checkpoint has no prediction layer; the shape has one, so that MTP can be measured.
    "deepseek-v2-lite": _DEEPSEEK
    | {"architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 102400, "q_lora_rank": None}
    | {"rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "num_nextn_predict_layers": 1}
    | _experts("n_routed_experts", 64, 6, 1408)
    | {"n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
    | _sizes(2048, 10944, 27, 16, 16),
    "deepseek-v3": _DEEPSEEK_V3
    | {"vocab_size": 129280, "num_nextn_predict_layers": 1}
    | {"rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
    | _experts("n_routed_experts", 256, 8, 2048)
    | {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
    | _sizes(7168, 18432, 61, 128, 128),
    "kimi-k2": _DEEPSEEK_V3
    | {"vocab_size": 163840, "rope_theta": 50000.0, "max_position_embeddings": 131072}
    | {"rope_scaling": _YARN | {"factor": 32, "beta_fast": 1, "mscale": 1.0, "mscale_all_dim": 1.0}}
    | _experts("n_routed_experts", 384, 8, 2048)
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827}
    | _sizes(7168, 18432, 61, 64, 64),
    "glm-4.7-flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "vocab_size": 154880,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 202752,
        "num_nextn_predict_layers": 1,
    }
    | _experts("n_routed_experts", 64, 4, 1536)
    | {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {"norm_topk_prob": True, "routed_scaling_factor": 1.8}
    | _sizes(2048, 10240, 47, 20, 20),
    "qwen3-0.6b": _QWEN | {"tie_word_embeddings": True} | _sizes(1024, 3072, 28, 16, 8),
    "qwen2.5-1.5b": _QWEN
    | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    | _sizes(1536, 8960, 28, 12, 2),
}


def shape_config(name: str) -> ModelConfig:
    """The config of a shape, such as shape:llama-3.1-8b."""
    fields = SHAPES.get(name.removeprefix(PREFIX))
    if fields is None:
        raise ConfigError(f"model={name!r}: no such shape; known are {', '.join(PREFIX + n for n in SHAPES)}")
    return parse_config(Fields(name, fields))


def draw_decoder(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    num_positions: int | None = None,
    ranks: Ranks = ALONE,
) -> Decoder:
    """A decoder with random weights, drawn and packed on the device."""
    decoder = Decoder(config, device, arithmetic_dtype(dtype, device), num_positions, ranks)
    draw_here(decoder, seed)
    return decoder.pack(held=dtype)


@torch.no_grad()
def draw_here(module: nn.Module, seed: int, scale: float = 0.02) -> None:
    """Normal weights, norms of one and no bias, drawn on the module's own device."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            device = parameter.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            owner = module.get_submodule(name.rpartition(".")[0])
            shard = owner.shard if isinstance(owner, Packable) else None
            if shard is None:
                parameter.normal_(0.0, scale, generator=generators[device])
            else:  # every rank draws the whole weight and keeps its rows
                whole = parameter.new_empty(shard.total, *parameter.shape[1:])
                parameter.copy_(shard.take(whole.normal_(0.0, scale, generator=generators[device])))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
