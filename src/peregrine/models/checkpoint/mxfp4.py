"""MXFP4 checkpoints (gpt-oss): four-bit numbers with a power of two for every 32 of them, multiplied out when read.

A stack NAME [E, in, out] is stored as NAME_blocks [E, out, in / 32, 16], two numbers a byte, the lower half first, and
NAME_scales [E, out, in / 32], exponents shifted by 127. A product has two significant bits: bfloat16 holds it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peregrine.errors import CheckpointError

METHOD = "mxfp4"  # of quantization_config
BLOCKS, SCALES = "_blocks", "_scales"
_PER_BLOCK, _BYTES = 32, 16
_SHIFT = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth is the sign


@dataclass(frozen=True, slots=True)
class PackedStack:
    """One stack under its own name, with the interface of an opened safetensors file and of its slices."""

    name: str
    blocks: Any  # the open file that holds NAME_blocks
    scales: Any

    def get_slice(self, name: str) -> "PackedStack":
        return self

    def get_dtype(self) -> str:
        """As of a safetensors slice: the number format of what is read."""
        return "BF16"

    def __getitem__(self, place: slice) -> Tensor:
        """As of a safetensors slice: an empty tensor, for its dtype."""
        return torch.empty(0, dtype=torch.bfloat16)

    def get_shape(self) -> list[int]:
        """[E, in, out]; CheckpointError if what is stored does not fit together."""
        (blocks, kind), (scales, other) = (
            (list(part.get_shape()), part.get_dtype())
            for part in (self.blocks.get_slice(self.name + BLOCKS), self.scales.get_slice(self.name + SCALES))
        )
        if len(blocks) != 4 or blocks[3] != _BYTES or scales != blocks[:3] or (kind, other) != ("U8", "U8"):
            raise CheckpointError(
                f"{self.name}{BLOCKS} is {kind} {blocks} and {self.name}{SCALES} {other} {scales}, not bytes "
                f"[E, out, in / {_PER_BLOCK}, {_BYTES}] and one scale for each {_BYTES}; download the files again"
            )
        return [blocks[0], blocks[2] * _PER_BLOCK, blocks[1]]

    def get_tensor(self, name: str) -> Tensor:
        stored = self.blocks.get_tensor(self.name + BLOCKS), self.scales.get_tensor(self.name + SCALES)
        return multiply_out(*stored).transpose(1, 2)


def join_stacks(files: dict[str, Any]) -> dict[str, Any]:
    """Tensor -> file, with every pair of blocks and scales as the stack it stands for."""
    names = {name.removesuffix(BLOCKS) for name in files if name.endswith(BLOCKS)}
    stacks = {
        name: PackedStack(name, files[name + BLOCKS], files[name + SCALES]) for name in names if name + SCALES in files
    }
    parts = {name + part for name in stacks for part in (BLOCKS, SCALES)}
    return {name: file for name, file in files.items() if name not in parts} | stacks


def multiply_out(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., B, 16] and [..., B] bytes -> [..., B * 32] bfloat16."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)  # [..., B, 32]
    factors = torch.ldexp(torch.ones(scales.shape), scales.int() - _SHIFT).to(torch.bfloat16)
    return (values[numbers.int()] * factors[..., None]).flatten(-2)
