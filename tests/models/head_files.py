"""Small random draft heads as files, under the names they are published with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

V, H, VD, LAYERS = 61, 24, 37, 8
SHAPE: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 16,
}
Tensors = dict[str, Tensor]


def draw(seed: int = 11) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, about: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.25 + about

    return tensor


def layer_tensors(name: str, config: dict[str, Any], in_size: int, new: Callable[..., Tensor]) -> Tensors:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    tensors = {
        f"{name}.self_attn.q_proj.weight": new(q, in_size),
        f"{name}.self_attn.k_proj.weight": new(kv, in_size),
        f"{name}.self_attn.v_proj.weight": new(kv, in_size),
        f"{name}.self_attn.o_proj.weight": new(hidden, q),
        f"{name}.mlp.gate_proj.weight": new(inner, hidden),
        f"{name}.mlp.up_proj.weight": new(inner, hidden),
        f"{name}.mlp.down_proj.weight": new(hidden, inner),
        f"{name}.input_layernorm.weight": new(hidden, about=1.0),
        f"{name}.post_attention_layernorm.weight": new(hidden, about=1.0),
    }
    if config.get("attention_bias") or config["model_type"] == "qwen2":
        tensors |= {f"{name}.self_attn.{p}_proj.bias": new(n) for p, n in (("q", q), ("k", kv), ("v", kv))}
    if config.get("attention_bias"):
        tensors[f"{name}.self_attn.o_proj.bias"] = new(hidden)
    if config["model_type"] == "qwen3":
        norms = {f"{name}.self_attn.{p}_norm.weight": new(config["head_dim"], about=1.0) for p in "qk"}
        tensors |= norms
    return tensors


def eagle3_tensors(config: dict[str, Any], first: str = "midlayer", own_embedding: bool = False) -> Tensors:
    new, hidden, num_taps = draw(), config["hidden_size"], len(config["taps"])
    seen = config.get("target_hidden_size", H)
    vocab = config.get("draft_vocab_size", V)
    tensors = layer_tensors(first, config, 2 * hidden, new)
    tensors[f"{first}.hidden_norm.weight"] = new(hidden, about=1.0)
    for i in range(1, config["num_hidden_layers"]):
        tensors |= layer_tensors(f"layers.{i}", config, hidden, new)
    tensors |= {"fc.weight": new(hidden, num_taps * seen), "norm.weight": new(hidden, about=1.0)}
    tensors["lm_head.weight"] = new(vocab, hidden)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": new(seen, about=1.0) for i in range(num_taps)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = new(num_taps * seen, about=1.0)
    if own_embedding:
        tensors["embed_tokens.weight"] = new(V, hidden)
    if vocab != V:
        ids = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:vocab].sort().values
        tensors["d2t"] = ids - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
