"""Merlin's shape, and the two config files that say so in Hugging Face's words."""

import json
from dataclasses import dataclass
from pathlib import Path

from peregrine.train.tokenizer import STOP_IDS


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama with tied embeddings; the defaults are merlin, deep so that drafting pays."""

    vocab_size: int = 8192
    hidden_size: int = 320
    num_layers: int = 10
    num_heads: int = 5
    num_kv_heads: int = 1
    head_dim: int = 64
    intermediate_size: int = 768
    max_positions: int = 2048


def write_configs(shape: Shape, folder: Path) -> None:
    """Writes config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": list(STOP_IDS),
        "pad_token_id": STOP_IDS[0],
        "torch_dtype": "bfloat16",
    }
    generation = {"eos_token_id": list(STOP_IDS), "pad_token_id": STOP_IDS[0]}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
