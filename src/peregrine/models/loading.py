"""From a checkpoint folder to a decoder that runs: which stored tensors make up which parameter."""

import re
from pathlib import Path

import torch

from peregrine.errors import CheckpointError
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.weights import Piece, Plan, Weights

# Some checkpoints store the rotary frequencies; they follow from the config.
_ROTARY = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


def load_decoder(
    folder: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    pack: bool = True,
    num_positions: int | None = None,
) -> Decoder:
    """The folder's decoder on the device, cast to dtype; packed for inference, or plain to be trained on."""
    config = ModelConfig.read(folder)
    weights = Weights(folder)
    plan = decoder_plan(config)
    weights.check(plan, ignorable=lambda name: _ignorable(name, config))
    decoder = Decoder(config, device, dtype, num_positions)
    if pack:
        weights.fill_and_pack(decoder, plan, shared=[decoder.head] if config.tied else [])
    else:
        weights.fill(decoder, plan)
    return decoder


def stored_dtype(folder: str | Path) -> torch.dtype:
    """The number format of a checkpoint's embedding, which stands for its weights."""
    weights, name = Weights(folder), "model.embed_tokens.weight"
    if name not in weights.names():
        raise CheckpointError(f"no tensor {name} in {str(folder)!r}; give a folder in Hugging Face format")
    return weights.tensor(name).dtype


def decoder_plan(config: ModelConfig) -> Plan:
    """Which stored tensors, in Hugging Face names, make up each parameter of a decoder."""
    vocabulary = (config.vocab_size, config.hidden_size)
    plan: Plan = {
        "embedding": (Piece("model.embed_tokens.weight", vocabulary),),
        "norm.weight": (Piece("model.norm.weight", (config.hidden_size,)),),
    }
    if not config.tied:
        plan["head.weight"] = (Piece("lm_head.weight", vocabulary),)
    for i in range(config.num_layers):
        split = i == config.num_layers - 1
        plan |= layer_plan(config, f"layers.{i}", f"model.layers.{i}", config.hidden_size, split)
    return plan


def layer_plan(config: ModelConfig, parameter: str, stored: str, in_size: int, split: bool) -> Plan:
    """The same for one layer whose parameters begin with `parameter` and whose tensors with `stored`."""
    plan: Plan = {
        f"{parameter}.input_norm.weight": (Piece(f"{stored}.input_layernorm.weight", (config.hidden_size,)),),
        f"{parameter}.post_norm.weight": (
            Piece(f"{stored}.post_attention_layernorm.weight", (config.hidden_size,)),
        ),
    }
    plan |= attention_plan(config, f"{parameter}.attention", f"{stored}.self_attn", in_size, split)
    return plan | mlp_plan(config, f"{parameter}.mlp", f"{stored}.mlp")


def mlp_plan(config: ModelConfig, parameter: str, stored: str) -> Plan:
    """The same for one MLP."""
    wide = (config.intermediate_size, config.hidden_size)
    gate_up = {f"{stored}.gate_proj": wide, f"{stored}.up_proj": wide}
    plan = linear_plan(f"{parameter}.gate_up", gate_up, config.mlp_bias)
    return plan | linear_plan(f"{parameter}.down", {f"{stored}.down_proj": wide[::-1]}, config.mlp_bias)


def attention_plan(config: ModelConfig, parameter: str, stored: str, in_size: int, split: bool) -> Plan:
    """The same for one attention part; `split` if queries are projected apart."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    q = {f"{stored}.q_proj": (q_size, in_size)}
    kv = {f"{stored}.k_proj": (kv_size, in_size), f"{stored}.v_proj": (kv_size, in_size)}
    plan: Plan = {}
    for name, shapes in (("q", q), ("kv", kv)) if split else (("qkv", q | kv),):
        plan |= linear_plan(f"{parameter}.{name}", shapes, config.qkv_bias)
    plan |= linear_plan(
        f"{parameter}.out", {f"{stored}.o_proj": (config.hidden_size, q_size)}, config.out_bias
    )
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            plan[f"{parameter}.{name}.weight"] = (Piece(f"{stored}.{name}.weight", (config.head_dim,)),)
    return plan


def linear_plan(parameter: str, shapes: dict[str, tuple[int, int]], bias: bool) -> Plan:
    """The same for one linear, stacked from stored linears of the given shapes."""
    plan: Plan = {
        f"{parameter}.weight": tuple(Piece(f"{name}.weight", shape) for name, shape in shapes.items())
    }
    if bias:
        plan[f"{parameter}.bias"] = tuple(Piece(f"{name}.bias", shape[:1]) for name, shape in shapes.items())
    return plan


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Tensors that say nothing new, and prediction layers, which `load_head` reads."""
    if _ROTARY.search(name) or (config.tied and name == "lm_head.weight"):
        return True
    extra = [f"model.layers.{config.num_layers + i}." for i in range(config.num_extra_layers)]
    return config.num_extra_layers > 0 and name.startswith(("model.mtp_layers.", *extra))
