"""Trained weights in Hugging Face format: fused matrices taken apart again, in bfloat16, sharded.

The plan that loads a module also says how to store it, so the two cannot disagree.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from peregrine.models.checkpoint.plan import Plan

SHARD_BYTES = 14 * 1024 * 1024


def stored_tensors(module: nn.Module, plan: Plan) -> dict[str, Tensor]:
    """The module's weights under the names and in the pieces of the plan."""
    parameters = dict(module.named_parameters())
    tensors: dict[str, Tensor] = {}
    for name, pieces in plan.items():
        rows = torch.split(parameters[name].detach(), [piece.shape[0] for piece in pieces])
        tensors |= {piece.name: part for piece, part in zip(pieces, rows, strict=True)}
    return tensors


def write_sharded(tensors: dict[str, Tensor], folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the tensors in bfloat16 as safetensors files of at most `shard_bytes`, with their index."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, tensor in tensors.items():
        kept = tensor.to("cpu", torch.bfloat16).contiguous()
        if shards[-1] and filled + kept.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = kept
        filled, total = filled + kept.nbytes, total + kept.nbytes
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
