"""Where an engine's networks come from: a checkpoint folder, or random weights in the shape of a public model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from peregrine.engine.folders import ASSETS, find_model
from peregrine.engine.memory import check_room
from peregrine.errors import ConfigError
from peregrine.models.checkpoint.weights import Weights
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import DraftHead, has_prediction_layer
from peregrine.models.families import read_config
from peregrine.models.loading import load_decoder, num_weights, stored_dtype
from peregrine.spec.registry import DRAFTERS, DraftSource, find_drafter
from peregrine.synthetic.shapes import PREFIX, draw_decoder, draw_head, draw_prediction_layer, shape_config
from peregrine.text.tokenizer import Tokenizer

# How to make each drafter that a shape can have.
SHAPE_DRAFTERS: dict[str, Callable[[Decoder], DraftHead]] = {"eagle3": draw_head, "mtp": draw_prediction_layer}


@dataclass(frozen=True)
class FolderSource:
    """A checkpoint folder in Hugging Face format; its config and its weights' headers are read once, on first use."""

    folder: Path

    @cached_property
    def config(self) -> ModelConfig:
        return read_config(self.folder)

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.folder)

    @property
    def dtype(self) -> torch.dtype:
        return stored_dtype(self.weights)

    def describe(self, asked: str) -> tuple[str, str]:
        """The folder, and why it was taken."""
        return str(self.folder), "asked for" if str(self.folder) == asked else f"{asked} lies there"

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.read(self.folder)

    def target(self, device: torch.device, dtype: torch.dtype) -> Decoder:
        return load_decoder(self.weights, device, dtype)

    def automatic_drafter(self) -> tuple[str, str]:
        """The drafter that "auto" names, and why."""
        if (self.folder / "eagle3" / "config.json").exists():
            return "eagle3", "the model's folder has a head"
        if has_prediction_layer(self.weights):
            return "mtp", "the checkpoint has a prediction layer"
        return "none", "the model's folder has no head; ask for ngram or a folder to speculate"

    def drafter(self, name: str, target: Decoder) -> DraftSource:
        return find_drafter(name, self.weights, target)


@dataclass(frozen=True, slots=True)
class ShapeSource:
    """Random weights in the shape of a public model, for benchmarks, with the embedded model's tokenizer."""

    name: str
    dtype: torch.dtype = torch.bfloat16

    @property
    def config(self) -> ModelConfig:
        return shape_config(self.name)

    def describe(self, asked: str) -> tuple[str, str]:
        return self.name, "random weights in this shape: for measuring only"

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.read(ASSETS / "merlin")

    def target(self, device: torch.device, dtype: torch.dtype) -> Decoder:
        check_room(device, f"the weights of {self.name}", num_weights(self.config) * dtype.itemsize)
        return draw_decoder(self.config, device, dtype)

    def automatic_drafter(self) -> tuple[str, str]:
        if self._drafters[0] == "mtp":
            return "mtp", "the shape has a prediction layer"
        return "eagle3", "a head of the usual shape"

    def drafter(self, name: str, target: Decoder) -> DraftSource:
        if name in DRAFTERS:
            return DraftSource(name, None)
        if name not in self._drafters:
            raise ConfigError(
                f"drafter={name!r}: this shape has no such drafter, and no folder; "
                f"choose {', '.join([*self._drafters, *DRAFTERS])}"
            )
        return DraftSource(name, SHAPE_DRAFTERS[name](target))

    @property
    def _drafters(self) -> list[str]:
        """Drafters the shape can have; "auto" takes the first."""
        return ["mtp", "eagle3"] if self.config.num_extra_layers else ["eagle3"]


ModelSource = FolderSource | ShapeSource


def open_source(name: str) -> ModelSource:
    """The source a model's name stands for."""
    return ShapeSource(name) if name.startswith(PREFIX) else FolderSource(find_model(name))
