"""Small random checkpoints written by transformers, and a dense `attend` without pages."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.head_files import LAYERS
from models.head_files import SHAPE as HEAD_SHAPE
from peregrine.attention import Attend, LayerAttention
from peregrine.models.checkpoint.folder import Fields
from peregrine.models.decoder import Decoder
from peregrine.models.families import parse_config
from peregrine.models.layers import draw_weights

SHAPE: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}


class DenseCache:
    """Keys and values of one sequence in one tensor, without pages; attention in float64."""

    def __init__(self, layers: Sequence[LayerAttention]) -> None:
        self.layers = layers
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def bind(self, positions: Tensor, live: Tensor | None = None) -> Attend:
        """An `attend` for queries at these positions; keys and values are appended in order."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rope: object = None) -> Tensor:
            spec = self.layers[layer]
            keys, values = (
                torch.cat([held[layer], new]) if layer in held else new
                for held, new in ((self.keys, k), (self.values, v))
            )
            self.keys[layer], self.values[layer] = keys, values
            at = positions if len(positions) == len(q) or live is None else positions[live]
            past = torch.arange(len(keys))[None, :]
            seen = past <= at[:, None]
            if spec.window is not None:
                seen = seen & (past > at[:, None] - spec.window)
            group = q.shape[1] // keys.shape[1]
            wide = (x.repeat_interleave(group, dim=1).double() for x in (keys, values))
            keys, values = wide
            scores = torch.einsum("nhd,shd->hns", q.double(), keys) * spec.scale
            scores = scores if spec.cap is None else spec.cap * (scores / spec.cap).tanh()
            scores = scores.masked_fill(~seen, float("-inf"))
            if spec.sinks is not None:  # a column of its own, with no value
                sinks = spec.sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)
                scores = torch.cat([scores, sinks], dim=2)
            weights = scores.softmax(-1)[:, :, : len(keys)]
            return torch.einsum("hns,shd->nhd", weights, values).to(q.dtype)

        return attend


@pytest.fixture(scope="session")
def target() -> Decoder:
    """A decoder of eight small layers for draft heads to read."""
    fields = HEAD_SHAPE | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS, "rope_theta": 1e4}
    decoder = Decoder(parse_config(Fields("target", fields)), num_positions=64)
    draw_weights(decoder, torch.Generator().manual_seed(3), scale=0.2)
    return decoder.pack()


@pytest.fixture
def dense_cache() -> type[DenseCache]:
    return DenseCache


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Write a random checkpoint of a family with transformers; keywords change its config."""
    transformers = pytest.importorskip("transformers")

    def write(family: str, seed: int = 0, **changes: Any) -> Path:
        torch.manual_seed(seed)
        kind = getattr(transformers, f"{family}ForCausalLM")
        config = kind.config_class(**{**SHAPE, **changes})
        model = kind(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norm weights of one and biases of zero would hide a missing parameter, so they are drawn too.
                spread = 0.3 if parameter.dim() == 1 else 0.15
                parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if "norm" in name else 0.0))
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn_like(buffer) * 0.3)
        folder = tmp_path / f"{family.lower()}-{seed}"
        model.save_pretrained(folder)
        return folder

    return write


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """Change fields of a JSON file in place; a field set to `...` is removed."""

    def edit(path: Path, **changes: Any) -> None:
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))

    return edit
