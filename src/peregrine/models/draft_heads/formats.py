"""Which kind of draft head a folder holds and what its config.json asks for, in every public spelling.

Spellings read: SafeAILab's and SpecForge's flat config with `eagle_config`, vLLM's wrapper with `model_type`
"eagle", and the speculators layout with `speculators_model_type` and `transformer_layer_config`.

Taps are counted in two ways. `eagle_aux_hidden_state_layer_ids` inside `eagle_config` (SGLang, SpecForge,
ModelOpt) names the layers whose *output* is read; the same field at the top level (vLLM, speculators) names
the layers the state *enters*. Our tap i enters layer i: the first kind is shifted by one, the second is not.
"""

import re
from collections.abc import Set
from dataclasses import dataclass, replace
from enum import Enum

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.config import ModelConfig
from peregrine.models.families import ARCHITECTURES, FAMILIES, parse_config

TAP_IDS = "eagle_aux_hidden_state_layer_ids"
MIMO_PREFIX, SPECULATORS_MTP_PREFIX = "model.mtp_layers.0.", "mtp_layers.0."
_NEXTN = re.compile(r"^(model\.layers\.\d+\.)eh_proj\.weight$")
# model_type of a head's layers -> architecture whose family reads them
_LAYERS = {family.model_type: family.architectures[0] for family in FAMILIES}
_LAYERS |= {"mimo": "MiMoForCausalLM", "kimi_k2": "KimiK2ForCausalLM"}
_RENAMED = (
    ("layers.0.", "midlayer."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)
# Fields of `eagle_config` that change the arithmetic, with the only value that is served.
_FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


_PARALLEL = ("parallel_drafting", "mask_token_id", "ptd_token_id", "pard_token")  # fields of P-EAGLE heads


class Kind(Enum):
    """Kinds of draft heads."""

    EAGLE3 = "EAGLE-3"
    EAGLE = "EAGLE"
    MTP = "MTP"
    BLOCK = "DFlash or DSpark"


_SPECULATORS = {"eagle3": Kind.EAGLE3, "mtp": Kind.MTP, "dflash": Kind.BLOCK, "dspark": Kind.BLOCK}


@dataclass(frozen=True, slots=True)
class HeadFields:
    """A head's config.json: the whole, and the part that describes its layers."""

    kind: Kind
    outer: Fields
    layer: Fields
    speculators: bool


def head_kind(config: Fields, names: Set[str]) -> Kind | None:
    """The kind of head a config and its tensors make up; None if they are no head."""
    said = config.text("speculators_model_type", "")
    if said:
        if said not in _SPECULATORS:
            supported = ", ".join(_SPECULATORS)
            raise config.refusal("speculators_model_type", f"supported are {supported}", "choose another head")
        return _SPECULATORS[said]
    words = " ".join([*config.texts("architectures"), config.text("method", "")]).lower()
    if "dflash2" in words:
        raise config.refusal("architectures", "DFlash 2 heads are not supported", "choose a DFlash or DSpark head")
    if "dflash" in words or "dspark" in words:
        return Kind.BLOCK
    stripped = {name.removeprefix("model.") for name in names}
    if "eagle3" in words or any(name.startswith(("midlayer.", "layers.0.hidden_norm.")) for name in stripped):
        refuse_parallel(config, words)
        return Kind.EAGLE3
    if "eagle" in words or {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= stripped:
        refuse_parallel(config, words)
        return Kind.EAGLE
    if mtp_prefixes(names):
        return Kind.MTP
    return None


def refuse_parallel(config: Fields, words: str) -> None:
    """Refuse P-EAGLE: layers as EAGLE-3's, but masked places are filled in one forward."""
    said = [name for name in _PARALLEL if config.values.get(name) not in (None, False)]
    if said or "peagle" in words:
        problem = "P-EAGLE heads (parallel drafting) are not supported"
        raise config.refusal((said or ["architectures"])[0], problem, "choose an EAGLE-3, DFlash or DSpark head")


def mtp_prefixes(names: Set[str]) -> list[str]:
    """Where prediction layers are stored, in order."""
    nextn = sorted(found.group(1) for name in names if (found := _NEXTN.match(name)))
    plain = [p for p in (MIMO_PREFIX, SPECULATORS_MTP_PREFIX) if f"{p}input_proj.weight" in names]
    return plain + nextn


def canonical_names(kind: Kind, names: Set[str]) -> dict[str, str]:
    """Canonical name -> stored name."""
    if kind is Kind.MTP:
        return {name: name for name in names}
    stored = {name.removeprefix("model."): name for name in names}
    if kind is Kind.BLOCK:
        return {
            n.replace("midlayer.", "layers.0.", 1) if n.startswith("midlayer.") else n: s for n, s in stored.items()
        }
    if kind is Kind.EAGLE3:
        for old, new in _RENAMED:
            stored = {new + n.removeprefix(old) if n.startswith(old) else n: s for n, s in stored.items()}
        # SGLang's further layers keep their input norm under another name.
        for name in [n for n in stored if re.match(r"layers\.\d+\.hidden_norm\.weight$", n)]:
            plain = name.replace("hidden_norm", "input_layernorm")
            if plain not in stored:
                stored[plain] = stored.pop(name)
    return stored


def open_fields(config: Fields, kind: Kind) -> HeadFields:
    """The part of a config that describes the head's layers, wherever it is spelled."""
    if "speculators_model_type" in config:
        return HeadFields(kind, config, config.inner("transformer_layer_config"), speculators=True)
    if config.text("model_type", "") == "eagle" and "model" in config:
        return HeadFields(kind, config, config.inner("model"), speculators=False)
    return HeadFields(kind, config, config, speculators=False)


def layer_config(fields: Fields) -> ModelConfig:
    """Shapes of the head's layers; the family follows from model_type or the architecture's name."""
    family = _LAYERS.get(fields.text("model_type", ""))
    named = fields.texts("architectures")
    if family is None:
        family = next((name for name in named if name in ARCHITECTURES), None)
    for word, architecture in _LAYERS.items():
        if family is None and any(word in name.lower() for name in named):
            family = architecture
    if family is None:
        raise fields.refusal(
            "model_type", f"no supported layer family; supported are {', '.join(_LAYERS)}", "choose another head"
        )
    return parse_config(Fields(fields.source, fields.values | {"architectures": [family]}))


def plain_layer_config(fields: Fields) -> ModelConfig:
    """Shapes of an EAGLE head's layers, which are dense; layers with MLA or experts are refused."""
    config = layer_config(fields)
    if config.mla is not None or config.experts is not None or config.unfused:
        raise fields.refusal(
            "model_type",
            f"EAGLE heads of {config.family} layers are not supported",
            "choose a head of llama or qwen3 layers",
        )
    return config


def prediction_layer(config: ModelConfig, has_experts: bool) -> ModelConfig:
    """The config of one prediction layer stored beside a decoder, with experts or an MLP."""
    experts = replace(config.experts, layers=(True,)) if config.experts is not None and has_experts else None
    return replace(config, num_layers=1, windows=config.windows[:1], layer_ropes=(), experts=experts)


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The taps of an EAGLE-3 head whose config names none: early, middle, late."""
    return 2, num_layers // 2, num_layers - 3


def read_taps(fields: HeadFields, num_target_layers: int) -> tuple[int, ...]:
    """Which target states an EAGLE-3 head reads, as taps."""
    eagle = fields.outer.inner("eagle_config")
    entered = fields.outer.wholes(TAP_IDS) or eagle.wholes("layer_ids")
    left = eagle.wholes(TAP_IDS, minimum=-1)
    taps = entered or tuple(layer + 1 for layer in left)
    if entered and left and entered != tuple(layer + 1 for layer in left):
        raise fields.outer.refusal(
            TAP_IDS, f"names other states than eagle_config's {list(left)}, which counts outputs", "correct the config"
        )
    if not taps:
        taps = default_taps(num_target_layers)
        if len(set(taps)) < 3 or min(taps) < 0:
            raise fields.outer.refusal(
                TAP_IDS, f"a target of {num_target_layers} layers is too small for the default taps", "name them"
            )
    if max(taps) >= num_target_layers:
        raise fields.outer.refusal(
            TAP_IDS,
            f"tap {max(taps)} does not enter one of the target's {num_target_layers} layers",
            "use the head made for this target",
        )
    return taps


@dataclass(frozen=True, slots=True)
class Variant:
    """The switches of an EAGLE-3 head."""

    norm_before_residual: bool
    norm_each_tap: bool
    norm_all_taps: bool
    norm_output: bool


def read_variant(fields: HeadFields) -> Variant:
    """An EAGLE-3 head's switches; what is not served is refused."""
    outer, eagle = fields.outer, fields.outer.inner("eagle_config")
    for name, served in _FIXED.items():
        if eagle.flag(name, served) != served:
            raise eagle.refusal(name, f"only {str(served).lower()} is supported", "choose another head")
    for place in (outer, eagle):
        if place.whole("parallel_draft_step", 1) != 1:
            problem = "parallel drafting is not supported"
            raise place.refusal("parallel_draft_step", problem, "choose a head that drafts in steps")
    if outer.number("logit_scale", 1.0) != 1.0:
        raise outer.refusal("logit_scale", "scaled logits are not supported", "choose another head")
    # Readers of the speculators layout disagree about the default.
    if fields.speculators and "norm_before_residual" not in outer:
        raise outer.refusal("norm_before_residual", "the field is missing", "add true or false, as it was trained")
    variant = Variant(
        norm_before_residual=outer.flag("norm_before_residual", False),
        norm_each_tap=outer.flag("fc_norm", outer.flag("use_aux_norm", False)),
        norm_all_taps=eagle.flag("norm_before_fc", outer.flag("norm_before_fc", False)),
        norm_output=outer.flag("norm_output", False),
    )
    if variant.norm_each_tap and variant.norm_all_taps:
        raise outer.refusal("fc_norm", "does not go together with norm_before_fc", "correct the config")
    return variant
