"""From a checkpoint folder to a decoder that runs: which stored tensors make up which parameter."""

import math
import re
from pathlib import Path

import torch

from peregrine.errors import CheckpointError
from peregrine.hardware import arithmetic_dtype
from peregrine.log import logger
from peregrine.models.checkpoint.plan import Piece, Plan
from peregrine.models.checkpoint.weights import Weights
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.families import family_of, read_config
from peregrine.models.parallel import ALONE, Ranks

# Some checkpoints store the rotary frequencies; they follow from the config.
_ROTARY = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


def load_decoder(
    source: str | Path | Weights,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    pack: bool = True,
    num_positions: int | None = None,
    ranks: Ranks = ALONE,
) -> Decoder:
    """The decoder of a checkpoint, opened or not, cast to dtype; packed for inference, or plain to be trained on.

    On a CPU a packed decoder computes in float32; dtype is what its weights are rounded to and held in. Of several
    ranks each holds its shards.
    """
    weights = Weights.of(source)
    config, plan = check_decoder(weights)
    _tell_float8(weights.float8_size(plan), dtype)
    computed = arithmetic_dtype(dtype, torch.device(device)) if pack else dtype
    decoder = Decoder(config, device, computed, num_positions, ranks)
    if pack:
        held = dtype if computed != dtype else None
        weights.fill_and_pack(decoder, plan, shared=[decoder.head] if config.shares_embedding else [], held=held)
    else:
        weights.fill(decoder, plan)
    if (factor := config.embedding_factor) != 1:
        if config.scales.rounds_embedding:
            factor = float(torch.tensor(factor).to(decoder.embedding.dtype))
        with torch.no_grad():
            decoder.embedding.mul_(factor)
    return decoder


def check_decoder(weights: Weights) -> tuple[ModelConfig, Plan]:
    """The config and the plan of a checkpoint's decoder, if its tensors are those of its config; none is read."""
    config = read_config(weights.folder)
    plan = decoder_plan(config)
    weights.check(plan, ignorable=lambda name: _ignorable(name, config))
    return config, plan


def _tell_float8(size: int, dtype: torch.dtype) -> None:
    """Warn that float8 weights are held dequantised."""
    if size:
        held = size * dtype.itemsize / 1e9
        name = str(dtype).removeprefix("torch.")
        logger.warning("fp8 weights %.1f GB, held in %s as %.1f GB", size / 1e9, name, held)


def stored_dtype(source: str | Path | Weights) -> torch.dtype:
    """The dtype of a checkpoint's embedding, taken as the dtype of its weights; no tensor is read."""
    weights, name = Weights.of(source), "model.embed_tokens.weight"
    if name not in weights.names():
        raise CheckpointError(f"no tensor {name} in {str(weights.folder)!r}; give a folder in Hugging Face format")
    return weights.dtype(name)


def num_weights(config: ModelConfig) -> int:
    """Number of weights of a decoder, all experts included."""
    pieces = {piece.name: piece for made_of in decoder_plan(config).values() for piece in made_of}
    return sum(math.prod(piece.shape) for piece in pieces.values())


def decoder_plan(config: ModelConfig) -> Plan:
    """Which stored tensors, in Hugging Face names, make up each parameter of a decoder."""
    family, vocabulary = family_of(config), (config.vocab_size, config.hidden_size)
    plan: Plan = {
        "embedding": (Piece("model.embed_tokens.weight", vocabulary),),
        "norm.weight": (family.norm_piece("model.norm", config.hidden_size),),
    }
    if not config.shares_embedding:
        plan["head.weight"] = (Piece("model.embed_tokens.weight" if config.tied else "lm_head.weight", vocabulary),)
    for i in range(config.num_layers):
        split = i == config.num_layers - 1
        names = f"layers.{i}", f"model.layers.{i}"
        plan |= family.layer_plan(config, *names, config.hidden_size, split, config.has_experts(i))
    return plan


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Tensors that repeat the config or another tensor, and prediction layers, which `load_head` reads."""
    if _ROTARY.search(name) or (config.tied and name == "lm_head.weight"):
        return True
    extra = [f"model.layers.{config.num_layers + i}." for i in range(config.num_extra_layers)]
    return config.num_extra_layers > 0 and name.startswith(("model.mtp_layers.", *extra))
