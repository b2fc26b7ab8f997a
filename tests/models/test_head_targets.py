"""Heads for targets that differ from the plain decoder: their layers are plain, and embeddings are read as stored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import load_head, save_head
from peregrine.models.loading import load_decoder
from peregrine.train.block import fresh_block_head
from peregrine.train.head import fresh_head
from peregrine.train.options import HeadOptions, HeadOrder

TARGETS: dict[str, dict[str, Any]] = {
    "Granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.22},
    "Gemma3": {"head_dim": 8, "sliding_window": 7, "sliding_window_pattern": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 7},
}
TOKENS, POSITIONS = torch.arange(11) * 7 % 257, torch.arange(11)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, write_checkpoint: Callable[..., Path]) -> tuple[Decoder, Tensor]:
    """A target to train for, and its embedding as stored."""
    folder = write_checkpoint(request.param, **TARGETS[request.param])
    return load_decoder(folder, pack=False), load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


@torch.no_grad()
def test_a_new_head_is_the_same_after_saving(target: tuple[Decoder, Tensor], tmp_path: Path, dense_cache: Any) -> None:
    """Its files say that its layers are those of the plain decoder, so they must be."""
    decoder, _ = target
    made = fresh_head(decoder, (0, 1, 2), None, seed=3)
    save_head(made, tmp_path / "head", torch.float32)
    again = load_head(tmp_path / "head", decoder, "cpu", torch.float32, pack=False)
    hidden = torch.randn(11, decoder.config.hidden_size)
    outputs = []
    for head in (made, again):
        attend = dense_cache(head.layer_attention()).bind(POSITIONS)
        outputs.append(head(TOKENS, hidden, POSITIONS, attend))
    torch.testing.assert_close(outputs[1], outputs[0])


@torch.no_grad()
def test_a_borrowed_embedding_is_read_as_stored(
    target: tuple[Decoder, Tensor], tmp_path: Path, dense_cache: Any
) -> None:
    decoder, stored = target
    order = HeadOrder("", (), tmp_path, kind="dflash", options=HeadOptions(unroll=4))
    head = fresh_block_head(decoder, (0, 1), None, order, 5)
    torch.testing.assert_close(head.embed(TOKENS), stored[TOKENS])
    borrowed = head(TOKENS, POSITIONS, dense_cache(head.layer_attention()).bind(POSITIONS))
    head.embedding = nn.Parameter(stored)
    own = head(TOKENS, POSITIONS, dense_cache(head.layer_attention()).bind(POSITIONS))
    torch.testing.assert_close(borrowed, own, atol=1e-5, rtol=1e-5)
