"""Rotary tables against transformers' own frequencies, at positions far out."""

from typing import Any

import pytest
import torch

from peregrine.models.checkpoint.folder import Fields
from peregrine.models.rope_table import SPARE_POSITIONS, read_rope, rope_table

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512},
    "yarn-smooth": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "truncate": False,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
}


@pytest.mark.parametrize("name", list(SCALINGS))
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10000.0), (6, 500000.0), (128, 1e6)])
def test_table_agrees_with_transformers(name: str, head_dim: int, theta: float) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    scaling = SCALINGS[name] | {"rope_theta": theta}
    config = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=4096,
        rope_parameters=dict(scaling),
    )
    cos, sin = llama.LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(4096)[None])
    rope = read_rope(Fields("config.json", {"rope_parameters": scaling}), max_positions=4096)
    table = rope_table(rope, head_dim, 4096, "cpu")
    assert table.shape == (4096 + SPARE_POSITIONS, head_dim)
    half = head_dim // 2
    torch.testing.assert_close(table[:4096, :half], cos[0, :, :half], atol=1e-3, rtol=0)
    torch.testing.assert_close(table[:4096, half:], sin[0, :, :half], atol=1e-3, rtol=0)
    torch.testing.assert_close(table[:64, half:], sin[0, :64, :half], atol=1e-5, rtol=0)
