"""Blockwise float8 checkpoints are dequantized on loading; every other quantization is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.deepseek_fields import DEEPSEEK_FIELDS
from peregrine.errors import CheckpointError
from peregrine.models.checkpoint.folder import Fields
from peregrine.models.checkpoint.fp8 import multiply_out
from peregrine.models.checkpoint.weights import Weights
from peregrine.models.families import parse_config
from peregrine.models.loading import load_decoder, stored_dtype

BLOCKS = (32, 16)  # neither divides the sizes of all weights
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCKS)}


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(float8, scales, dequantized), block by block in a plain loop."""
    rows, columns = weight.shape
    held = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(-(-rows // BLOCKS[0]), -(-columns // BLOCKS[1]))
    meant = torch.zeros(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * BLOCKS[0], (i + 1) * BLOCKS[0]), slice(j * BLOCKS[1], (j + 1) * BLOCKS[1])
            scales[i, j] = weight[block].abs().max() / 448.0
            held[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[block] = held[block].float() * scales[i, j]
    return held, scales, meant


@pytest.fixture
def folders(write_checkpoint: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint whose linears are float8, and the same in float32."""
    plain = write_checkpoint("DeepseekV3", **DEEPSEEK_FIELDS)
    folder = tmp_path / "float8"
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    tensors = load_file(plain / "model.safetensors")
    quantised = {}
    for name in [n for n in tensors if n.endswith("_proj.weight") or "_proj_with_mqa" in n]:
        quantised[name], quantised[f"{name}_scale_inv"], tensors[name] = in_blocks(tensors[name])
    save_file(tensors, plain / "model.safetensors")
    save_file(tensors | quantised, folder / "model.safetensors")
    return folder, plain


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of the second layer's attention; None removes one."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        name = f"model.layers.1.self_attn.{name.replace('__', '.')}"
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def test_weights_are_dequantized(folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    folder, plain = folders
    decoder = load_decoder(folder, pack=False, dtype=torch.bfloat16)
    expected = dict(load_decoder(plain, pack=False, dtype=torch.bfloat16).named_parameters())
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert stored_dtype(folder) is torch.float32  # of the embedding, which stays as it is
    (line,) = [record.getMessage() for record in caplog.records if "fp8" in record.getMessage()]
    assert line == "fp8 weights 0.0 GB, held in bfloat16 as 0.0 GB"


def test_scales_are_not_separate_tensors(folders: tuple[Path, Path]) -> None:
    assert Weights(folders[0]).names() == Weights(folders[1]).names()


def test_a_block_at_the_edge_is_cut() -> None:
    held, scales, meant = in_blocks(torch.randn(33, 17))
    assert scales.shape == (2, 2)
    assert torch.equal(multiply_out(held, scales, BLOCKS), meant)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"o_proj__weight_scale_inv": None}, "not float32, float16 or bfloat16: model.layers.1.self_attn.o_proj"),
        (
            {"o_proj__weight_scale_inv": torch.ones(2, 3)},
            "1 not scaled in whole blocks: model.layers.1.self_attn.o_proj.weight_scale_inv is [2, 3] "
            "for blocks of [32, 16]",
        ),
        (
            {"o_proj__weight": torch.ones(48, 60)},
            "1 not scaled in whole blocks: model.layers.1.self_attn.o_proj.weight has scales, but is F32",
        ),
        ({"o_proj__weight": None}, "1 missing: model.layers.1.self_attn.o_proj.weight"),
    ],
)
def test_scales_that_do_not_fit_are_named(
    folders: tuple[Path, Path], changes: dict[str, Tensor | None], part: str
) -> None:
    rewrite(folders[0], **changes)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(folders[0])
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("quantization", "part"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq'"),
        ({"quant_method": "awq"}, "quant_method='awq'"),
        ({"quant_method": "compressed-tensors"}, "quant_method='compressed-tensors'"),
        ({"load_in_8bit": True}, "quant_method=None"),
        ({**FP8, "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": "fp8"}, "weight_block_size=None: float8 weights without blocks"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size=[128]: not [rows, columns]"),
        ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size=[0, 128]"),
    ],
)
def test_other_quantizations_are_refused_by_name(quantization: dict[str, Any], part: str) -> None:
    fields = {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    with pytest.raises(CheckpointError) as caught:
        parse_config(Fields("config.json", fields))
    assert f"config.json, quantization_config: {part}" in str(caught.value)
