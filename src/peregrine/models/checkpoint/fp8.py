"""Float8 checkpoints: e4m3 weights with one scale per block, dequantised as they are read.

The scales of a weight `NAME` are stored as `NAME_scale_inv`; each multiplies the entries of its block.
"""

from pathlib import Path

import torch
from torch import Tensor

from peregrine.models.checkpoint import mxfp4
from peregrine.models.checkpoint.folder import Fields

DTYPE = "F8_E4M3"  # safetensors' word for it
SCALE_SUFFIX = "_scale_inv"
_REMEDY = "use the float32, float16 or bfloat16 checkpoint, float8 in blocks (quant_method fp8) or MXFP4 (mxfp4)"

Blocks = tuple[int, int]  # rows and columns that share a scale


def read_blocks(config: Fields) -> Blocks | None:
    """The blocks of a config's float8 weights; None if it has none. Any other quantization is refused."""
    if "quantization_config" not in config:
        return None
    fields = config.inner("quantization_config")
    method = fields.text("quant_method", "")
    if method == mxfp4.METHOD:
        return None
    if method != "fp8":
        raise fields.refusal("quant_method", "weights quantized in this way are not supported", _REMEDY)
    if fields.text("fmt", "e4m3") != "e4m3":
        raise fields.refusal("fmt", "this float8 format is not supported; e4m3 is", _REMEDY)
    if "weight_block_size" not in fields:
        raise fields.refusal("weight_block_size", "float8 weights without blocks are not supported", _REMEDY)
    blocks = fields.wholes("weight_block_size", minimum=1)
    if len(blocks) != 2:
        raise fields.refusal("weight_block_size", "not [rows, columns]", "correct the config")
    return blocks[0], blocks[1]


def folder_blocks(folder: Path) -> Blocks | None:
    """The blocks of a checkpoint folder's float8 weights; None if it has none, or no config."""
    path = folder / "config.json"
    return read_blocks(Fields.read(path)) if path.exists() else None


def scale_shape(shape: tuple[int, ...], blocks: Blocks) -> tuple[int, ...]:
    """Shape of the scales of a weight of this shape."""
    return tuple(-(-size // block) for size, block in zip(shape, blocks, strict=True))


def multiply_out(weight: Tensor, scales: Tensor, blocks: Blocks) -> Tensor:
    """Dequantise a float8 weight [O, I] by its block scales. -> [O, I] float32"""
    out = weight.to(torch.float32)
    width = weight.shape[1]
    wide = scales.float().repeat_interleave(min(blocks[1], width), 1)[:, :width]  # [blocks of rows, I]
    for rows, scale in zip(torch.split(out, blocks[0]), wide, strict=True):
        rows.mul_(scale)
    return out
