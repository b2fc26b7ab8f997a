"""gpt-oss checkpoints whose experts are stored in MXFP4, against transformers' reading of the same files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peregrine.errors import CheckpointError
from peregrine.models.checkpoint.mxfp4 import multiply_out
from peregrine.models.checkpoint.weights import Weights
from peregrine.models.loading import check_decoder, load_decoder

FIELDS = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
STACKS = {"gate_up_proj": (64, 2), "down_proj": (64, 1)}  # outputs, and blocks of 32 inputs


@pytest.fixture
def folder(write_checkpoint: Callable[..., Path]) -> Path:
    """A bfloat16 checkpoint with random bytes for its experts."""
    made = write_checkpoint("GptOss", sliding_window=7, swiglu_limit=0.5, **FIELDS)
    config = json.loads((made / "config.json").read_text())
    packed = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (made / "config.json").write_text(json.dumps(config | packed | {"dtype": "bfloat16"}))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(made / "model.safetensors").items()}
    random = torch.Generator().manual_seed(5)
    for layer in range(config["num_hidden_layers"]):
        for stack, (outputs, blocks) in STACKS.items():
            name = f"model.layers.{layer}.mlp.experts.{stack}"
            del tensors[name]
            shape = 4, outputs, blocks
            tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=random)
            tensors[f"{name}_scales"] = torch.randint(122, 125, shape, dtype=torch.uint8, generator=random)
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


@torch.no_grad()
def test_logits_are_those_of_transformers(folder: Path, dense_cache: Any) -> None:
    transformers = pytest.importorskip("transformers")
    tokens, positions = torch.arange(40) * 5 % 257, torch.arange(40)
    read = {"attn_implementation": "eager", "quantization_config": transformers.Mxfp4Config(dequantize=True)}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **read).float()
    weights = Weights(folder)
    assert weights.is_quantised
    assert weights.dtype("model.layers.0.mlp.experts.down_proj") is torch.bfloat16
    decoder = load_decoder(weights)
    hidden, _ = decoder(tokens, positions, dense_cache(decoder.layer_attention()).bind(positions))
    torch.testing.assert_close(decoder.logits(hidden), theirs(tokens[None]).logits[0], atol=1e-4, rtol=0)


def test_a_byte_is_two_numbers_times_a_power_of_two() -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    blocks, scales = torch.arange(16, dtype=torch.uint8).mul(16).view(1, 16) + 9, torch.tensor([127 - 3])
    found = multiply_out(blocks, scales.byte()) * 8
    assert found.dtype is torch.bfloat16
    assert found[0::2].tolist() == [-0.5] * 16  # the lower halves: 9
    assert found[1::2].tolist() == values + [-value for value in values]


def test_scales_that_do_not_fit_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    save_file(tensors | {f"{name}_scales": torch.zeros(4, 64, 2, dtype=torch.uint8)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}_scales U8 \[4, 64, 2\].*one scale for each"):
        check_decoder(Weights(folder))
    del tensors[f"{name}_scales"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"1 missing: {name}; 1 unexpected: {name}_blocks"):
        check_decoder(Weights(folder))
