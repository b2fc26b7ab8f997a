"""Where an engine's parts come from: a checkpoint's folder, or the mere shape of a model."""

from dataclasses import dataclass
from pathlib import Path

import torch

from peregrine.engine.folders import ASSETS, find_model
from peregrine.errors import ConfigError
from peregrine.models.decoder import Decoder
from peregrine.models.loading import load_decoder, stored_dtype
from peregrine.models.shapes import PREFIX, draw_decoder, draw_head, shape_config
from peregrine.spec.registry import DRAFTERS, DraftSource, find_drafter
from peregrine.text.tokenizer import Tokenizer

SHAPE_DRAFTER = "eagle3"


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A checkpoint in Hugging Face format."""

    folder: Path

    @property
    def dtype(self) -> torch.dtype:
        return stored_dtype(self.folder)

    def describe(self, asked: str) -> tuple[str, str]:
        """Its name, and why it was taken."""
        return str(self.folder), "asked for" if str(self.folder) == asked else f"{asked} lies there"

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.read(self.folder)

    def target(self, device: torch.device, dtype: torch.dtype) -> Decoder:
        return load_decoder(self.folder, device, dtype)

    def automatic_drafter(self) -> tuple[str, str]:
        """The drafter for those who did not ask for one, and why."""
        if (self.folder / "eagle3" / "config.json").exists():
            return "eagle3", "the model's folder has a head"
        return "none", "the model's folder has no head; ask for ngram or a folder to speculate"

    def drafter(self, name: str, target: Decoder) -> DraftSource:
        return find_drafter(name, self.folder, target)


@dataclass(frozen=True, slots=True)
class ShapeSource:
    """Random weights in the shape of a public model, for measuring; text goes through the embedded tokenizer."""

    name: str
    dtype: torch.dtype = torch.bfloat16

    def describe(self, asked: str) -> tuple[str, str]:
        return self.name, "random weights in this shape: for measuring only"

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.read(ASSETS / "merlin")

    def target(self, device: torch.device, dtype: torch.dtype) -> Decoder:
        return draw_decoder(shape_config(self.name), device, dtype)

    def automatic_drafter(self) -> tuple[str, str]:
        return SHAPE_DRAFTER, "a head of the usual shape"

    def drafter(self, name: str, target: Decoder) -> DraftSource:
        if name == SHAPE_DRAFTER:
            return DraftSource(name, draw_head(target))
        if name not in DRAFTERS:
            raise ConfigError(
                f"drafter={name!r}: a shape has no folder; choose {', '.join([SHAPE_DRAFTER, *DRAFTERS])}"
            )
        return DraftSource(name, None)


ModelSource = FolderSource | ShapeSource


def open_source(name: str) -> ModelSource:
    """What a model's name comes to."""
    return ShapeSource(name) if name.startswith(PREFIX) else FolderSource(find_model(name))
