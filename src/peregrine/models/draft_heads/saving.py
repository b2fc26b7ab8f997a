"""Heads written under their public names, so that other engines read them.

EAGLE-3 in SafeAILab's names, with taps in both public spellings; DFlash in z-lab's layout, DSpark in DeepSpec's.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from peregrine.models.config import ModelConfig
from peregrine.models.draft_heads.block import BlockHead, block_plan
from peregrine.models.draft_heads.block_config import BlockConfig
from peregrine.models.draft_heads.eagle3 import Eagle3Config, Eagle3Head, eagle3_plan
from peregrine.models.draft_heads.formats import TAP_IDS
from peregrine.models.rope_table import rope_fields

_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}


def save_head(head: Eagle3Head | BlockHead, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write config.json and model.safetensors for an unpacked head, cast to dtype if one is given."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    fields = block_fields(head.config) if isinstance(head, BlockHead) else head_fields(head.config)
    tensors = {
        name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in head_tensors(head).items()
    }
    new = path / "model.safetensors.new"  # the file is there whole or not at all
    save_file(tensors, new, metadata={"format": "pt"})
    os.replace(new, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def head_tensors(head: Eagle3Head | BlockHead) -> dict[str, Tensor]:
    """The head's weights under their public names, fused ones taken apart; only of an unpacked head."""
    if head.fc.packed is not None:
        raise ValueError("a packed head has no plain weights left to save; load it with pack=False")
    tensors: dict[str, Tensor] = {}
    plan = block_plan(head.config) if isinstance(head, BlockHead) else eagle3_plan(head.config)
    for name, pieces in plan.items():
        parts = torch.split(head.get_parameter(name).detach(), [piece.shape[0] for piece in pieces])
        tensors |= {piece.name: part.contiguous() for piece, part in zip(pieces, parts, strict=True)}
    ids, vocab_size = head.draft_to_target, head.config.layer.vocab_size
    if ids is not None:
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device).index_fill(0, ids, True)
    return tensors


def head_fields(config: Eagle3Config) -> dict[str, Any]:
    """The config.json that `load_head` reads as this config."""
    layer = config.layer
    if layer.family not in _ARCHITECTURES:
        raise ValueError(f"an EAGLE-3 head of {layer.family} layers has no public name; use llama or qwen3")
    fields = {
        "architectures": [_ARCHITECTURES[layer.family]],
        **_layer_fields(layer),
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_all_taps,
        "fc_norm": config.norm_each_tap,
        "norm_output": config.norm_output,
        TAP_IDS: list(config.taps),
        "eagle_config": {"use_aux_hidden_state": True, TAP_IDS: [tap - 1 for tap in config.taps]},
    }
    # Where the sizes agree the field is left out: with it, some loaders do not take the target's embedding.
    if config.target_hidden_size != layer.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    return fields


def block_fields(config: BlockConfig) -> dict[str, Any]:
    """The config.json that `load_head` reads as this config."""
    said = {"mask_token_id": config.mask_token, "target_layer_ids": [tap - 1 for tap in config.taps]}
    fields = _layer_fields(config.layer) | {
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "layer_types": ["full_attention"] * config.layer.num_layers,
    }
    if config.markov is None:
        return fields | {"architectures": ["DFlashDraftModel"], "dflash_config": said}
    return (
        fields
        | said
        | {
            "architectures": ["Qwen3DSparkModel"],
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov,
            "enable_confidence_head": config.confidence,
            "confidence_head_with_markov": config.confidence_reads_token,
        }
    )


def _layer_fields(layer: ModelConfig) -> dict[str, Any]:
    """What config.json says of a head's layers."""
    return {
        "model_type": layer.family,
        "vocab_size": layer.vocab_size,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": layer.num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layer.norm_eps,
        "max_position_embeddings": layer.max_positions,
        "attention_bias": layer.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        "tie_word_embeddings": False,
        **rope_fields(layer.rope),
    }
