"""Where an engine's networks come from: a checkpoint, or random weights in the shape of a public model."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from peregrine.engine.folders import ASSETS, find_model, home_of, own_head
from peregrine.models.checkpoint.generation import sampling_defaults
from peregrine.models.checkpoint.gguf.file import open_header
from peregrine.models.checkpoint.gguf.header import is_gguf
from peregrine.models.checkpoint.weights import Weights
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import has_prediction_layer
from peregrine.models.families import read_config
from peregrine.models.loading import load_decoder, stored_dtype
from peregrine.models.parallel import ALONE, Ranks
from peregrine.spec.registry import AskedDepth, LoadDrafter, find_drafter
from peregrine.synthetic.shapes import PREFIX
from peregrine.synthetic.source import ShapeSource
from peregrine.text.gguf import tokenizer_of
from peregrine.text.tokenizer import Tokenizer, missing_reason


@dataclass(frozen=True)
class FolderSource:
    """A folder in Hugging Face format or a GGUF file; its config and headers are read once, on first use."""

    folder: Path

    @cached_property
    def config(self) -> ModelConfig:
        return read_config(self.folder)

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.folder)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.weights.is_quantised else stored_dtype(self.weights)

    @property
    def is_bfloat16(self) -> bool:
        """Whether bfloat16 holds every weight exactly."""
        return all(self.weights.stored_dtype(name) == "BF16" for name in self.weights.names())

    def describe(self, asked: str) -> tuple[str, str]:
        """The folder, and why it was taken."""
        why = "asked for" if str(self.folder) == asked else f"where {asked} is"
        return str(self.folder), why + ("; quantised weights are dequantised" if self.weights.is_quantised else "")

    def tokenizer(self) -> Tokenizer:
        if is_gguf(self.folder):
            return tokenizer_of(str(self.folder), open_header(self.folder).metadata)
        if self.folder.is_dir() and not (self.folder / "tokenizer.json").exists():
            return Tokenizer.absent(missing_reason(self.folder))
        return Tokenizer.read(self.folder)

    def target(
        self, device: torch.device, dtype: torch.dtype, num_positions: int | None = None, ranks: Ranks = ALONE
    ) -> Decoder:
        """The decoder, for this many positions (None: the model's context); of several ranks each holds its shards."""
        return load_decoder(self.weights, device, dtype, num_positions=num_positions, ranks=ranks)

    def sampling_defaults(self) -> tuple[dict[str, object], str]:
        """Sampling parameters that the checkpoint's authors recommend, and what to say about them."""
        return sampling_defaults(home_of(self.folder))

    def automatic_drafter(self) -> tuple[str, str]:
        """The drafter that "auto" names, and why."""
        head = own_head(self.folder)
        if head is not None and head.parent == self.folder:
            return head.name, "the model's folder has a head"
        if head is not None:
            return str(head), "a head for this model comes with Peregrine"
        if has_prediction_layer(self.weights):
            return "mtp", "the checkpoint has a prediction layer"
        return "none", "the model's folder has no head; ask for ngram or a folder to speculate"

    def drafter(self, name: str, depth: AskedDepth = (None, None, 0.0)) -> LoadDrafter:
        """The drafter of this name or folder, checked against the model; its weights are loaded by a call."""
        return find_drafter(name, self.weights, self.config, depth)


ModelSource = FolderSource | ShapeSource


def open_source(name: str) -> ModelSource:
    """The source a model's name stands for."""
    return ShapeSource(name, ASSETS / "merlin") if name.startswith(PREFIX) else FolderSource(find_model(name))
