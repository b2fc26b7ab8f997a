"""From a folder to a draft head that runs on a target.

Every public naming is brought to one canonical set of names first (EAGLE's are SafeAILab's); plans, which say
what makes up each parameter, are written in those.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from peregrine.errors import CheckpointError
from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.weights import Piece, Plan, Weights, listed
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import Eagle3Config, Eagle3Head, EagleHead, MTPHead
from peregrine.models.head_config import (
    MIMO_PREFIX,
    SPECULATORS_MTP_PREFIX,
    HeadFields,
    Kind,
    canonical_names,
    head_kind,
    layer_config,
    mtp_prefixes,
    open_fields,
    plain_layer_config,
    prediction_layer,
    read_taps,
    read_variant,
)
from peregrine.models.loading import attention_plan, layer_plan, linear_plan, mlp_plan

_IGNORABLE = re.compile(r"(^|\.)(t2d|d2t|rotary_emb\.inv_freq)$")
_INTEGERS = ("I64", "I32")
_NEXTN_NAMES = {"fc": "eh_proj", "embedding_norm": "enorm", "hidden_norm": "hnorm", "norm": "shared_head.norm"}
# The target's own, of which a layer's may be copies; a tied head is the embedding.
_TARGET_NAMES = {
    "embedding": ("model.embed_tokens.weight",),
    "head.weight": ("lm_head.weight", "model.embed_tokens.weight"),
}
_MTP_NAMES = {
    "fc": "input_proj",
    "embedding_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "norm": "final_layernorm",
}


@dataclass(frozen=True, slots=True)
class Source:
    """An opened head folder: its fields, its tensors, and where each canonical name is stored."""

    fields: HeadFields
    weights: Weights
    stored: dict[str, str]

    def placed(self, plan: Plan) -> Plan:
        """The plan in stored names; a tensor that is not stored keeps its canonical name, to be missed."""
        return {
            parameter: tuple(replace(piece, name=self.stored.get(piece.name, piece.name)) for piece in pieces)
            for parameter, pieces in plan.items()
        }


AnyHead = Eagle3Head | EagleHead | MTPHead


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A head before it has memory: what to read into it, what to pass over, and how to make it."""

    plan: Plan
    ignorable: Callable[[str], bool]
    build: Callable[[torch.device | str, torch.dtype], AnyHead]


def is_head(source: str | Path | Weights) -> bool:
    """Whether the folder holds a draft head and nothing more."""
    weights = Weights.of(source)
    names = weights.names()
    kind = head_kind(Fields.read(weights.folder / "config.json"), names)
    return kind is not None and not (kind is Kind.MTP and "model.norm.weight" in names)


def has_prediction_layer(source: str | Path | Weights) -> bool:
    """Whether the checkpoint has a layer of its own to draft with (MTP)."""
    return bool(mtp_prefixes(Weights.of(source).names()))


def load_head(
    source: str | Path | Weights, target: Decoder, device: torch.device | str, dtype: torch.dtype, *, pack: bool = True
) -> AnyHead:
    """The folder's draft head, made for this target; packed for inference, or plain to be trained on."""
    weights = Weights.of(source)
    config = Fields.read(weights.folder / "config.json")
    kind = head_kind(config, weights.names())
    if kind is None:
        raise CheckpointError(
            f"{str(weights.folder)!r} holds no draft head: neither its architectures nor its tensors are those of "
            "EAGLE-3 (midlayer.*), EAGLE (fc, layers.*) or MTP (mtp_layers.*, layers.N.eh_proj); "
            "give a head's folder"
        )
    opened = Source(open_fields(config, kind), weights, canonical_names(kind, weights.names()))
    blueprint = _BLUEPRINTS[kind](opened, target)
    plan = opened.placed(blueprint.plan)
    weights.check(plan, blueprint.ignorable)
    head = blueprint.build(device, dtype)
    if pack:
        weights.fill_and_pack(head, plan)
    else:
        weights.fill(head, plan)
    return head


def _fit(fields: Fields, name: str, head: int, target: int, what: str) -> None:
    """Refuse a head whose size differs from the target's."""
    if head != target:
        raise fields.refusal(
            name, f"the head's {what} is {head}, the target's {target}", "use the head made for this target"
        )


def _eagle3_blueprint(source: Source, target: Decoder) -> Blueprint:
    fields, names = source.fields, source.stored
    layer, variant = plain_layer_config(fields.layer), read_variant(fields)
    _fit(fields.layer, "vocab_size", layer.vocab_size, target.config.vocab_size, "vocabulary")
    seen_size = fields.outer.whole("target_hidden_size", layer.hidden_size)
    _fit(fields.outer, "target_hidden_size", seen_size, target.config.hidden_size, "idea of the hidden size")
    draft_vocab_size = fields.outer.whole("draft_vocab_size", layer.vocab_size)
    same_size = layer.hidden_size == target.config.hidden_size
    config = Eagle3Config(
        layer=layer,
        taps=read_taps(fields, target.config.num_layers),
        target_hidden_size=seen_size,
        draft_vocab_size=draft_vocab_size,
        own_embedding="embed_tokens.weight" in names or not same_size,
        own_head="lm_head.weight" in names or not same_size or draft_vocab_size != layer.vocab_size,
        fuse_bias="fc.bias" in names,
        norm_before_residual=variant.norm_before_residual,
        norm_each_tap=variant.norm_each_tap,
        norm_all_taps=variant.norm_all_taps,
        norm_output=variant.norm_output,
    )
    if config.own_embedding and not config.own_head and fields.layer.flag("tie_word_embeddings", False):
        raise fields.layer.refusal("tie_word_embeddings", "no lm_head.weight is stored", "store it untied")
    draft_to_target = _draft_to_target(source, config)
    return Blueprint(
        eagle3_plan(config),
        _is_ignorable,
        lambda device, dtype: Eagle3Head(config, target, device, dtype, draft_to_target),
    )


def _draft_to_target(source: Source, config: Eagle3Config) -> Tensor | None:
    """The target id of each draft id; None where the vocabularies are the same. [Vd] i64"""
    weights, size = source.weights, config.draft_vocab_size
    place = f"d2t in {str(weights.folder)!r}"
    if "d2t" not in source.stored:
        if size != config.layer.vocab_size:
            raise CheckpointError(
                f"no {place}: the head guesses {size} of the target's {config.layer.vocab_size} tokens and "
                "must say which; use the files the config belongs to"
            )
        return None
    name = source.stored["d2t"]
    if weights.shape(name) != (size,) or weights.stored_dtype(name) not in _INTEGERS:
        found = f"{weights.stored_dtype(name)} {list(weights.shape(name))}"
        raise CheckpointError(f"{place} is {found}, not whole numbers [{size}]; use the files the config belongs to")
    own = torch.arange(size)
    ids = weights.tensor(name).long() + own
    if not torch.equal(ids.clamp(0, config.layer.vocab_size - 1), ids):
        raise CheckpointError(
            f"{place} maps outside the target's {config.layer.vocab_size} tokens; it must hold offsets, "
            "target id minus draft id"
        )
    return None if size == config.layer.vocab_size and torch.equal(ids, own) else ids


def eagle3_plan(config: Eagle3Config) -> Plan:
    """Which canonical tensors (SafeAILab's names) make up an EAGLE-3 head."""
    layer, hidden = config.layer, config.layer.hidden_size
    tapped_size = len(config.taps) * config.target_hidden_size
    plan = linear_plan("fc", {"fc": (hidden, tapped_size)}, config.fuse_bias)
    norms = {"norm": ("norm", hidden), "first.input_norm": ("midlayer.input_layernorm", hidden)}
    norms["first.hidden_norm"] = ("midlayer.hidden_norm", hidden)
    norms["first.post_norm"] = ("midlayer.post_attention_layernorm", hidden)
    if config.norm_all_taps:
        norms["taps_norm"] = ("input_norm", tapped_size)
    for i in range(len(config.taps) if config.norm_each_tap else 0):
        norms[f"tap_norms.{i}"] = (f"fc_norm.{i}", config.target_hidden_size)
    plan |= {f"{ours}.weight": (Piece(f"{name}.weight", (size,)),) for ours, (name, size) in norms.items()}
    split = layer.num_layers == 1
    plan |= attention_plan(layer, "first.attention", "midlayer.self_attn", 2 * hidden, split)
    plan |= mlp_plan(layer, "first.mlp", "midlayer.mlp")
    for i in range(1, layer.num_layers):
        plan |= layer_plan(layer, f"layers.{i - 1}", f"layers.{i}", hidden, i == layer.num_layers - 1)
    if config.own_embedding:
        plan["embedding"] = (Piece("embed_tokens.weight", (layer.vocab_size, hidden)),)
    if config.own_head:
        plan["head.weight"] = (Piece("lm_head.weight", (config.draft_vocab_size, hidden)),)
    return plan


def _eagle_blueprint(source: Source, target: Decoder) -> Blueprint:
    fields, names = source.fields, source.stored
    layer = plain_layer_config(fields.layer)
    _fit(fields.layer, "vocab_size", layer.vocab_size, target.config.vocab_size, "vocabulary")
    _fit(fields.layer, "hidden_size", layer.hidden_size, target.config.hidden_size, "hidden size")
    hidden, bias = layer.hidden_size, "fc.bias" in names
    own_embedding, own_head = "embed_tokens.weight" in names, "lm_head.weight" in names
    plan = linear_plan("fc", {"fc": (hidden, 2 * hidden)}, bias)
    for i in range(layer.num_layers):
        plan |= layer_plan(layer, f"layers.{i}", f"layers.{i}", hidden, i == layer.num_layers - 1)
    del plan["layers.0.input_norm.weight"]
    if own_embedding:
        plan["embedding"] = (Piece("embed_tokens.weight", (layer.vocab_size, hidden)),)
    if own_head:
        plan["head.weight"] = (Piece("lm_head.weight", (layer.vocab_size, hidden)),)
    return Blueprint(
        plan,
        _is_ignorable,
        lambda device, dtype: EagleHead(layer, target, device, dtype, own_embedding, own_head, bias),
    )


def _mtp_blueprint(source: Source, target: Decoder) -> Blueprint:
    fields, weights = source.fields, source.weights
    config, prefixes = layer_config(fields.layer), mtp_prefixes(weights.names())
    _fit(fields.layer, "vocab_size", config.vocab_size, target.config.vocab_size, "vocabulary")
    _fit(fields.layer, "hidden_size", config.hidden_size, target.config.hidden_size, "hidden size")
    if len(prefixes) != 1 or fields.outer.whole("num_nextn_predict_layers", 1, minimum=0) > 1:
        raise CheckpointError(
            f"{str(weights.folder)!r} holds {len(prefixes)} prediction layers "
            f"({listed(prefixes) or 'none'}); exactly one is supported"
        )
    prefix, hidden = prefixes[0], config.hidden_size
    layer = prediction_layer(config, has_experts=f"{prefix}mlp.gate.weight" in weights.names())
    plain = prefix in (MIMO_PREFIX, SPECULATORS_MTP_PREFIX)
    names = _MTP_NAMES if plain else _NEXTN_NAMES
    plan = linear_plan("fc", {prefix + names["fc"]: (hidden, 2 * hidden)}, bias=False)
    for ours in ("embedding_norm", "hidden_norm", "norm"):
        plan[f"{ours}.weight"] = (Piece(f"{prefix}{names[ours]}.weight", (hidden,)),)
    stored = prefix.removesuffix(".")
    plan |= layer_plan(layer, "layers.0", stored, hidden, split=True, has_experts=layer.has_experts(0))
    # DeepSeek's files repeat the target's embedding and head beside the layer.
    copies = {"embedding": f"{prefix}embed_tokens.weight", "head.weight": f"{prefix}shared_head.head.weight"}
    own = {
        ours: (Piece(name, (config.vocab_size, hidden)),)
        for ours, name in copies.items()
        if _differs(weights, name, _TARGET_NAMES[ours])
    }
    return Blueprint(
        plan | own,
        lambda name: not name.startswith(prefix) or name in copies.values() or _is_ignorable(name),
        lambda device, dtype: MTPHead(
            layer, target, device, dtype, prefix == MIMO_PREFIX, "embedding" in own, "head.weight" in own
        ),
    )


def _differs(weights: Weights, name: str, of_target: tuple[str, ...]) -> bool:
    """Whether a tensor is stored that is no copy of the target's, which lies in the same folder if anywhere."""
    if name not in weights.names():
        return False
    targets = [other for other in of_target if other in weights.names()]
    return not targets or not torch.equal(weights.tensor(name), weights.tensor(targets[0]))


def _is_ignorable(name: str) -> bool:
    return _IGNORABLE.search(name) is not None


_BLUEPRINTS = {Kind.EAGLE3: _eagle3_blueprint, Kind.EAGLE: _eagle_blueprint, Kind.MTP: _mtp_blueprint}
