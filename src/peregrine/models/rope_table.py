"""Rotary tables: cos and sin of the angle of each position and pair of a head, for every supported scaling.

Computed in float32 on the CPU in the order checkpoints were trained with, then moved: all devices see the same bits.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peregrine.errors import CheckpointError
from peregrine.models.checkpoint.folder import Fields

# Draft tokens may lie past the last position that can be committed; their table rows must exist.
SPARE_POSITIONS = 128


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every frequency divided by the factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths divided by the factor, short ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """NTK-by-parts: low frequencies are interpolated, high ones kept; the table is scaled by attention_factor."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool
    mscale_all_dim: float = 0.0  # MLA: scales q . k by a magnitude; 0: off


@dataclass(frozen=True, slots=True)
class LongScaling:
    """Each frequency divided by a factor of its own; the table is scaled by attention_factor.

    Models have two sets of factors, for contexts up to the original length and for longer ones. One of them is chosen
    once, by the length of the table (an engine's max_len, as in vLLM), so that keys in the cache fit queries of any
    length. transformers chooses anew in every forward, by the longest position in it: a text that grows past the
    original length is then read with keys of both kinds.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    attention_factor: float


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """Theta and scaling of a rotary embedding, and how much of a head it rotates.

    What is not rotated is a pair with frequency zero, so tables cover whole heads in any case. Where a part of a head
    is rotated, loading orders its rows so that pairs lie half a head apart (`families/family.py`).
    """

    theta: float
    scaling: Scaling | None
    share: float = 1.0  # of a head; 0: no positions (NoPE)

    def rotated(self, head_dim: int) -> int:
        """How many entries of a head are rotated."""
        return int(head_dim * self.share)


_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    },
    "longrope": {"short_factor", "long_factor", "factor", "original_max_position_embeddings", "attention_factor"},
}
_COMMON = {"rope_theta", "partial_rotary_factor"}  # to all kinds
_RENAMED = {"su": "longrope"}  # kinds that older configs call otherwise


def read_rope(config: Fields, max_positions: int, may_be_partial: bool = False, theta: float = 10000.0) -> Rope:
    """The rope of a config, from `rope_parameters` or from `rope_scaling` and `rope_theta`; `theta` if it has none.

    What `rope_scaling` does not say, such as one that was added by hand, is taken from `rope_parameters`.
    """
    fields = config.inner("rope_parameters")
    if config.values.get("rope_scaling"):
        common = {name: value for name, value in fields.values.items() if name in _COMMON}
        fields = config.inner("rope_scaling")
        fields = Fields(fields.source, common | fields.values)
    kind = fields.text("rope_type", fields.text("type", "default"))
    kind = _RENAMED.get(kind, kind)
    if kind not in _KEYS:
        raise fields.refusal(
            "rope_type" if "rope_type" in fields else "type",
            f"this rope scaling is not supported; supported are {', '.join(sorted(_KEYS))}",
            "choose a checkpoint with one of those",
        )
    theta = fields.number("rope_theta", config.number("rope_theta", theta))
    if theta <= 1:
        place = fields if "rope_theta" in fields else config
        raise place.refusal("rope_theta", "not above 1: frequencies must fall", "correct the config")
    stated = fields if "partial_rotary_factor" in fields else config
    share = stated.number("partial_rotary_factor", 1.0)
    if share > 1 or (share != 1 and not may_be_partial):
        raise stated.refusal("partial_rotary_factor", "this family rotates whole heads", "choose one with factor 1")
    known = _KEYS[kind] | _COMMON | {"rope_type", "type"}
    for key in fields.values:
        if key not in known:
            raise fields.refusal(
                key, f"not a field of rope type {kind!r}", "remove it if the model was trained without it"
            )
    return Rope(theta, _read_scaling(kind, fields, config, max_positions), share)


def _read_scaling(kind: str, fields: Fields, config: Fields, max_positions: int) -> Scaling | None:
    if kind == "default":
        return None
    if kind == "longrope":
        return _read_long(fields, config, max_positions)
    factor = fields.number("factor")
    if kind == "linear":
        return LinearScaling(factor)
    original = fields.whole("original_max_position_embeddings", max_positions)
    original = config.whole("original_max_position_embeddings", original)
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if high <= low:
            raise fields.refusal("high_freq_factor", f"not above low_freq_factor={low:g}", "correct the config")
        return Llama3Scaling(factor, low, high, original)
    return YarnScaling(
        factor=factor,
        original_positions=original,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(fields, factor),
        truncate=fields.flag("truncate", True),
        mscale_all_dim=fields.number("mscale_all_dim") if fields.values.get("mscale_all_dim") else 0.0,
    )


def _read_long(fields: Fields, config: Fields, max_positions: int) -> LongScaling:
    original = fields.whole("original_max_position_embeddings", max_positions)
    original = config.whole("original_max_position_embeddings", original)
    factor = fields.number("factor", max_positions / original)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    short, long = (fields.numbers(f"{name}_factor") for name in ("short", "long"))
    if not short or len(short) != len(long):
        raise fields.refusal("long_factor", f"not as many as short_factor's {len(short)}", "correct the config")
    return LongScaling(short, long, original, fields.number("attention_factor", grown))


def yarn_magnitude(factor: float, weight: float) -> float:
    """Yarn's magnitude: how much queries and keys grow when the context is stretched by the factor."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    if "attention_factor" in fields:
        return fields.number("attention_factor")
    if fields.values.get("mscale") and fields.values.get("mscale_all_dim"):
        whole = yarn_magnitude(factor, fields.number("mscale_all_dim"))
        return yarn_magnitude(factor, fields.number("mscale")) / whole
    return yarn_magnitude(factor, 1.0)


def rope_fields(rope: Rope) -> dict[str, Any]:
    """The config.json fields that `read_rope` reads as this value."""
    fields: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    match rope.scaling:
        case LinearScaling(factor):
            fields["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
            fields["rope_scaling"] = scaling | {"original_max_position_embeddings": original}
        case YarnScaling(factor, original, fast, slow, attention_factor, truncate, mscale_all_dim):
            scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            scaling |= {"beta_fast": fast, "beta_slow": slow, "attention_factor": attention_factor}
            scaling |= {"mscale_all_dim": mscale_all_dim} if mscale_all_dim else {}
            fields["rope_scaling"] = scaling | {"truncate": truncate}
        case LongScaling(short, long, original, attention_factor):
            scaling = {"rope_type": "longrope", "short_factor": list(short), "long_factor": list(long)}
            scaling |= {"original_max_position_embeddings": original, "attention_factor": attention_factor}
            fields["rope_scaling"] = scaling
    return fields | ({"partial_rotary_factor": rope.share} if rope.share != 1 else {})


def usable_positions(rope: Rope, max_positions: int) -> int:
    """How many positions the model can read: yarn stretches its original context, the others declare it."""
    if isinstance(rope.scaling, YarnScaling):
        return max(max_positions, int(rope.scaling.factor * rope.scaling.original_positions))
    return max_positions


def inverse_frequencies(rope: Rope, rotated: int, num_positions: int) -> Tensor:
    """Radians per position of each rotated pair of a head. [rotated / 2] float32, on the CPU."""
    powers = rope.theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    plain = 1.0 / powers
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling():
            return _llama3(plain, rope.scaling)
        case YarnScaling():
            return _yarn(plain, rope.scaling, rope.theta)
        case LongScaling(short, long, original, _):
            factors = torch.tensor(long if num_positions > original else short, dtype=torch.float32)
            if len(factors) != len(powers):
                raise CheckpointError(
                    f"rope: {len(factors)} factors for {len(powers)} rotated pairs; correct the config"
                )
            return 1.0 / (factors * powers)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    wavelengths = 2 * math.pi / plain
    longest = scaling.original_positions / scaling.low_freq_factor
    shortest = scaling.original_positions / scaling.high_freq_factor
    kept = (scaling.original_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - kept) * plain / scaling.factor + kept * plain
    stretched = torch.where(wavelengths > longest, plain / scaling.factor, between)
    return torch.where(wavelengths < shortest, plain, stretched)


def _yarn(plain: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    head_dim = 2 * len(plain)

    def pair_with_rotations(times: float) -> float:
        return head_dim * math.log(scaling.original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with_rotations(scaling.beta_fast), pair_with_rotations(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(len(plain), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def rope_table(rope: Rope, head_dim: int, num_positions: int, device: torch.device | str) -> Tensor:
    """cos | sin of every position, attention factor folded in. [num_positions + spare, head_dim] float32."""
    positions = torch.arange(num_positions + SPARE_POSITIONS, dtype=torch.float32)
    rotated = rope.rotated(head_dim)
    angles = positions[:, None] * inverse_frequencies(rope, rotated, num_positions)[None, :]  # [C, rotated / 2]
    scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling | LongScaling) else 1.0
    table = torch.zeros(len(positions), 2, head_dim // 2)
    table[:, 0, :] = 1.0  # of what is not rotated
    table[:, 0, : rotated // 2] = angles.cos() * scale
    table[:, 1, : rotated // 2] = angles.sin() * scale
    return table.flatten(1).to(device)
