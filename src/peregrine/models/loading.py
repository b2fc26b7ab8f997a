"""From a checkpoint folder to a decoder that runs: which stored tensors make up which parameter."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from peregrine.errors import CheckpointError
from peregrine.log import logger
from peregrine.models.checkpoint.weights import Piece, Plan, Weights
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.experts import experts_plan
from peregrine.models.mla_config import MLAConfig

# Some checkpoints store the rotary frequencies; they follow from the config.
_ROTARY = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


def load_decoder(
    source: str | Path | Weights,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    pack: bool = True,
    num_positions: int | None = None,
) -> Decoder:
    """The decoder of a folder (or an opened one), cast to dtype; packed for inference, or plain to be trained on."""
    config = ModelConfig.read(source.folder if isinstance(source, Weights) else source)
    weights = Weights.of(source)
    plan = decoder_plan(config)
    weights.check(plan, ignorable=lambda name: _ignorable(name, config))
    _tell_float8(weights.float8_size(plan), dtype)
    decoder = Decoder(config, device, dtype, num_positions)
    if pack:
        weights.fill_and_pack(decoder, plan, shared=[decoder.head] if config.tied else [])
    else:
        weights.fill(decoder, plan)
    return decoder


def _tell_float8(size: int, dtype: torch.dtype) -> None:
    """Say what float8 weights come to: they are held multiplied out."""
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
    """How many numbers a decoder's tensors hold, experts that few tokens meet included."""
    pieces = {piece.name: piece for made_of in decoder_plan(config).values() for piece in made_of}
    return sum(math.prod(piece.shape) for piece in pieces.values())


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
        names = f"layers.{i}", f"model.layers.{i}"
        plan |= layer_plan(config, *names, config.hidden_size, split, config.has_experts(i))
    return plan


def layer_plan(
    config: ModelConfig, parameter: str, stored: str, in_size: int, split: bool, has_experts: bool = False
) -> Plan:
    """The same for one layer whose parameters begin with `parameter` and whose tensors with `stored`."""
    plan: Plan = {
        f"{parameter}.input_norm.weight": (Piece(f"{stored}.input_layernorm.weight", (config.hidden_size,)),),
        f"{parameter}.post_norm.weight": (Piece(f"{stored}.post_attention_layernorm.weight", (config.hidden_size,)),),
    }
    attention = f"{parameter}.attention", f"{stored}.self_attn"
    if config.latent is None:
        plan |= attention_plan(config, *attention, in_size, split)
    else:
        plan |= latent_plan(config, config.latent, *attention, split)
    if has_experts:
        return plan | experts_plan(config, f"{parameter}.mlp", f"{stored}.mlp")
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
    plan |= linear_plan(f"{parameter}.out", {f"{stored}.o_proj": (config.hidden_size, q_size)}, config.out_bias)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            plan[f"{parameter}.{name}.weight"] = (Piece(f"{stored}.{name}.weight", (config.head_dim,)),)
    return plan


def latent_plan(config: ModelConfig, latent: MLAConfig, parameter: str, stored: str, split: bool) -> Plan:
    """The same for one latent attention part.

    Rows that make what is rotated are brought into the order of halves, and kv_b_proj, which makes keys and values of
    every head out of a latent, is taken apart into what queries and what answers pass through.
    """
    hidden, heads, rank = config.hidden_size, config.num_heads, latent.kv_rank
    queries = _in_halves(heads, latent.nope_dim, latent.rope_dim) if latent.interleaved else None
    keys = _in_halves(1, rank, latent.rope_dim) if latent.interleaved else None
    kv = {f"{stored}.kv_a_proj_with_mqa": ((latent.key_dim, hidden), keys)}
    plan: Plan = {f"{parameter}.kv_norm.weight": (Piece(f"{stored}.kv_a_layernorm.weight", (rank,)),)}
    if latent.q_rank is None:
        q = {f"{stored}.q_proj": ((heads * latent.q_dim, hidden), queries)}
    else:
        q = {f"{stored}.q_a_proj": ((latent.q_rank, hidden), None)}
        made = (heads * latent.q_dim, latent.q_rank)
        plan[f"{parameter}.q_norm.weight"] = (Piece(f"{stored}.q_a_layernorm.weight", (latent.q_rank,)),)
        plan[f"{parameter}.q_up.weight"] = (Piece(f"{stored}.q_b_proj.weight", made, queries),)
    for name, parts in (("q", q), ("kv", kv)) if split else (("qkv", q | kv),):
        pieces = [(ours, shape, take) for ours, (shape, take) in parts.items()]
        plan[f"{parameter}.{name}.weight"] = tuple(Piece(f"{n}.weight", s, take) for n, s, take in pieces)
        if config.qkv_bias:
            plan[f"{parameter}.{name}.bias"] = tuple(Piece(f"{n}.bias", s[:1], take) for n, s, take in pieces)
    both = (heads * (latent.nope_dim + latent.value_dim), rank)

    def by_head(weight: Tensor) -> Tensor:
        return weight.view(heads, -1, rank)  # [h, nope + value, rank]

    for name, take in (
        ("w_uk", lambda weight: by_head(weight)[:, : latent.nope_dim].transpose(1, 2)),
        ("w_uv", lambda weight: by_head(weight)[:, latent.nope_dim :]),
    ):
        plan[f"{parameter}.{name}.weight"] = (Piece(f"{stored}.kv_b_proj.weight", both, take),)
    out = {f"{stored}.o_proj": (hidden, heads * latent.value_dim)}
    return plan | linear_plan(f"{parameter}.out", out, config.out_bias)


def _in_halves(heads: int, kept: int, turned: int) -> Callable[[Tensor], Tensor]:
    """Of every head's rows, the last ones from pairs side by side to pairs half a part away from each other."""
    pairs = torch.arange(turned).view(-1, 2).t().flatten()
    order = torch.cat((torch.arange(kept), kept + pairs))  # of one head
    rows = (torch.arange(heads)[:, None] * (kept + turned) + order).flatten()
    return lambda stored: stored.index_select(0, rows)


def linear_plan(parameter: str, shapes: dict[str, tuple[int, int]], bias: bool) -> Plan:
    """The same for one linear, stacked from stored linears of the given shapes."""
    plan: Plan = {f"{parameter}.weight": tuple(Piece(f"{name}.weight", shape) for name, shape in shapes.items())}
    if bias:
        plan[f"{parameter}.bias"] = tuple(Piece(f"{name}.bias", shape[:1]) for name, shape in shapes.items())
    return plan


def _ignorable(name: str, config: ModelConfig) -> bool:
    """Tensors that say nothing new, and prediction layers, which `load_head` reads."""
    if _ROTARY.search(name) or (config.tied and name == "lm_head.weight"):
        return True
    extra = [f"model.layers.{config.num_layers + i}." for i in range(config.num_extra_layers)]
    return config.num_extra_layers > 0 and name.startswith(("model.mtp_layers.", *extra))
