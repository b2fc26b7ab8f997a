"""GGUF files written for tests: a transformers model in llama.cpp's names and layout, and a small tokenizer."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

# Hugging Face's name of a part -> llama.cpp's, written down apart from the table that is tested.
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
TOP |= {"lm_head.weight": "output.weight"}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
STACK = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
# A byte-level vocabulary: the 256 bytes, merges, and two control tokens.
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ 1", "Ġ1 2"]


def byte_tokens() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
    return [*tokens, "<|begin|>", "<|im_end|>"]


def paired(rows: Tensor, heads: int) -> Tensor:
    """Llama's queries and keys as llama.cpp stores them: rotation pairs are neighbours."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


# What some architectures call otherwise.
OTHER_PARTS: dict[str, dict[str, str]] = {
    "qwen2moe": {f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
    | {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"},
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "olmo2": {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
}
OTHER_PARTS["deepseek2"] = {
    f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")
} | {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}
OTHER_PARTS["gpt-oss"] = {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
GEMMA = OTHER_PARTS["olmo2"] | {"pre_feedforward_layernorm": "ffn_norm"}
OTHER_PARTS |= {"gemma2": GEMMA, "gemma3": GEMMA}


def oss_experts(layer: str, name: str, stack: Tensor) -> dict[str, Tensor]:
    """A stack of gpt-oss's experts, or its biases: gates and ups apart, outputs before inputs."""
    kind = "bias" if name.endswith("bias") else "weight"
    stack = stack if kind == "bias" else stack.transpose(1, 2)
    if "down_proj" in name:
        return {f"{layer}.ffn_down_exps.{kind}": stack}
    return {f"{layer}.ffn_gate_exps.{kind}": stack[:, ::2], f"{layer}.ffn_up_exps.{kind}": stack[:, 1::2]}


def tensors_of(model: Any, permute: bool, architecture: str = "llama", split: bool = True) -> dict[str, Tensor]:
    """The model's tensors in llama.cpp's names; `split`: DeepSeek's kv_b in two, as newer files have it."""
    names, found = PARTS | OTHER_PARTS.get(architecture, {}), {}
    offset = 1.0 if architecture.startswith("gemma") else 0.0
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("norm.weight"):
            tensor = tensor + offset
        layer_name = ".".join(["blk", *name.split(".")[2:3]])
        if name in TOP:
            found[TOP[name]] = tensor
        elif architecture == "gpt-oss" and "mlp.experts" in name:
            found |= oss_experts(layer_name, name, tensor)
        elif name.endswith(".sinks"):
            found[f"{layer_name}.attn_sinks.weight"] = tensor
        elif name.endswith("e_score_correction_bias"):
            found[f"{layer_name}.exp_probs_b.bias"] = tensor
        elif architecture == "deepseek2" and name.endswith("kv_b_proj.weight") and split:
            heads_of = tensor.view(model.config.num_attention_heads, -1, model.config.kv_lora_rank)
            keys, values = heads_of.split((model.config.qk_nope_head_dim, model.config.v_head_dim), dim=1)
            found |= {f"{layer_name}.attn_k_b.weight": keys.transpose(1, 2), f"{layer_name}.attn_v_b.weight": values}
        elif stack := STACK.fullmatch(name):
            cut = tensor.chunk(2, dim=1) if stack[2] == "gate_up_proj" else (tensor,)
            kinds = ("gate", "up") if stack[2] == "gate_up_proj" else ("down",)
            found |= {f"blk.{stack[1]}.ffn_{kind}_exps.weight": part for kind, part in zip(kinds, cut, strict=True)}
        else:
            layer, part, kind = LAYER.fullmatch(name).groups()  # type: ignore[union-attr]
            rows = paired(tensor, heads[names[part]]) if permute and names[part] in heads else tensor
            found[f"blk.{layer}.{names[part]}.{kind}"] = rows[0] if names[part] == "ffn_gate_inp_shexp" else rows
    return found


def rope_of(config: Any) -> dict[str, Any]:
    """The rope of layers that see all keys."""
    parameters: dict[str, Any] = config.rope_parameters
    return parameters.get("full_attention", parameters)


def metadata_of(model: Any) -> dict[str, Any]:
    """The fields every architecture has."""
    config = model.config
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope.freq_base": float(rope_of(config)["rope_theta"]),
    }


def write_gguf(
    path: Path, architecture: str, metadata: dict[str, Any], tensors: dict[str, Tensor], **general: Any
) -> Path:
    """Write a file; metadata's names are those of the architecture, `general` whole names with dots as __."""
    writer = gguf.GGUFWriter(path, architecture)
    whole = {name.replace("__", "."): value for name, value in general.items()}
    for name, value in ({f"{architecture}.{name}": value for name, value in metadata.items()} | whole).items():
        kind = gguf.GGUFValueType.get_type(value)
        inner = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        writer.add_key_value(name, value, kind, inner)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.detach().to(torch.float32).numpy()))
    return close(writer, path)


def close(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_fields(**changes: Any) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer."""
    tokens = byte_tokens()
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 2) + [3, 3],
        "merges": MERGES,
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 2,
    }
    kept = {name: value for name, value in (fields | changes).items() if value is not None}
    return {f"tokenizer__ggml__{name}": value for name, value in kept.items()}
