"""From a folder to a draft head that runs on a target.

Every public naming is brought to one canonical set of names first (EAGLE's are SafeAILab's); plans use those.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from peregrine.errors import CheckpointError
from peregrine.models.checkpoint.config_file import read_config_file
from peregrine.models.checkpoint.plan import Plan
from peregrine.models.checkpoint.weights import Weights
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads.block import block_blueprint
from peregrine.models.draft_heads.eagle import eagle_blueprint
from peregrine.models.draft_heads.eagle3 import eagle3_blueprint
from peregrine.models.draft_heads.formats import Kind, canonical_names, head_kind, mtp_prefixes, open_fields
from peregrine.models.draft_heads.mtp import mtp_blueprint
from peregrine.models.draft_heads.opened import Blueprint, OpenedHead
from peregrine.models.draft_heads.parts import DraftHead

_BLUEPRINTS = {
    Kind.EAGLE3: eagle3_blueprint,
    Kind.EAGLE: eagle_blueprint,
    Kind.MTP: mtp_blueprint,
    Kind.BLOCK: block_blueprint,
}


def is_head(source: str | Path | Weights) -> bool:
    """Whether the folder holds a draft head and nothing more."""
    weights = Weights.of(source)
    names = weights.names()
    kind = head_kind(read_config_file(weights.folder), names)
    return kind is not None and not (kind is Kind.MTP and "model.norm.weight" in names)


def has_prediction_layer(source: str | Path | Weights) -> bool:
    """Whether the checkpoint has a layer of its own to draft with (MTP)."""
    return bool(mtp_prefixes(Weights.of(source).names()))


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A folder's draft head that fits a target, by its config and its tensors' names and shapes; nothing is loaded."""

    weights: Weights
    blueprint: Blueprint
    plan: Plan

    def load(self, target: Decoder, device: torch.device | str, dtype: torch.dtype, *, pack: bool = True) -> DraftHead:
        """The head, packed for inference, or plain to be trained on.

        On a CPU weights stored in bfloat16 stay in it, which changes no bit: a step reads all of them for a few rows.
        """
        head = self.blueprint.build(target, device, dtype)
        if pack:
            held = torch.bfloat16 if torch.device(device).type == "cpu" and self._is_bfloat16 else None
            self.weights.fill_and_pack(head, self.plan, held=held)
        else:
            self.weights.fill(head, self.plan)
        return head

    @property
    def _is_bfloat16(self) -> bool:
        names = {piece.name for pieces in self.plan.values() for piece in pieces}
        return all(self.weights.stored_dtype(name) == "BF16" for name in names)


def find_head(source: str | Path | Weights, target: ModelConfig) -> FoundHead:
    """The folder's draft head, checked against its target; CheckpointError or ConfigError if it does not fit."""
    weights = Weights.of(source)
    config = read_config_file(weights.folder)
    kind = head_kind(config, weights.names())
    if kind is None:
        raise CheckpointError(
            f"{str(weights.folder)!r} holds no draft head: neither its architectures nor its tensors are those of "
            "EAGLE-3 (midlayer.*), EAGLE (fc, layers.*), MTP (mtp_layers.*, layers.N.eh_proj), DFlash or DSpark; "
            "give a head's folder"
        )
    opened = OpenedHead(open_fields(config, kind), weights, canonical_names(kind, weights.names()))
    blueprint = _BLUEPRINTS[kind](opened, target)
    plan = opened.placed(blueprint.plan)
    weights.check(plan, blueprint.ignorable)
    return FoundHead(weights, blueprint, plan)


def load_head(
    source: str | Path | Weights, target: Decoder, device: torch.device | str, dtype: torch.dtype, *, pack: bool = True
) -> DraftHead:
    """The folder's draft head, made for this target; packed for inference, or plain to be trained on."""
    return find_head(source, target.config).load(target, device, dtype, pack=pack)
