"""The networks of an engine with random weights in the shape of a public model, for benchmarks."""

from dataclasses import dataclass
from pathlib import Path

import torch

from peregrine.errors import ConfigError
from peregrine.hardware import check_room
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.loading import num_weights
from peregrine.models.parallel import ALONE, Ranks
from peregrine.spec.block import check_confidence
from peregrine.spec.registry import DRAFTERS, AskedDepth, DraftSource, LoadDrafter
from peregrine.synthetic.heads import SHAPE_DRAFTERS
from peregrine.synthetic.shapes import draw_decoder, shape_config
from peregrine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ShapeSource:
    """Random weights in the shape of a public model, with the tokenizer of some folder."""

    name: str
    tokenizer_folder: Path
    dtype: torch.dtype = torch.bfloat16
    is_bfloat16: bool = False  # weights are drawn in the dtype that is asked for

    @property
    def config(self) -> ModelConfig:
        return shape_config(self.name)

    def describe(self, asked: str) -> tuple[str, str]:
        return self.name, "random weights in this shape: for measuring only"

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.read(self.tokenizer_folder)

    def target(
        self, device: torch.device, dtype: torch.dtype, num_positions: int | None = None, ranks: Ranks = ALONE
    ) -> Decoder:
        check_room(device, f"the weights of {self.name}", num_weights(self.config) * dtype.itemsize // ranks.size)
        return draw_decoder(self.config, device, dtype, num_positions=num_positions, ranks=ranks)

    def sampling_defaults(self) -> tuple[dict[str, object], str]:
        return {}, "a shape has no sampling defaults"

    def automatic_drafter(self) -> tuple[str, str]:
        if "mtp" in self._drafters:
            return "mtp", "the shape has a prediction layer"
        return "eagle3", "a head of the usual shape"

    def drafter(self, name: str, depth: AskedDepth = (None, None, 0.0)) -> LoadDrafter:
        if name in DRAFTERS:
            check_confidence(name, False, depth[2])
            return lambda target: DraftSource(name, None)
        if name not in self._drafters:
            raise ConfigError(
                f"drafter={name!r}: this shape has no such drafter, and no folder; "
                f"choose {', '.join([*self._drafters, *DRAFTERS])}"
            )
        check_confidence(name, name == "dspark", depth[2])
        return lambda target: DraftSource(name, SHAPE_DRAFTERS[name](target))

    @property
    def _drafters(self) -> list[str]:
        """Drafters the shape can have."""
        return [name for name in reversed(SHAPE_DRAFTERS) if name != "mtp" or self.config.num_extra_layers]
