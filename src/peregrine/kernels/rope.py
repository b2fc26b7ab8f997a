"""Rotary positions in the half-split layout of the Llama family: element i of a head turns with i + D/2.

A table row is cos | sin, D/2 each, float32, with any attention factor folded in.
"""

import functools
from types import ModuleType

import torch
from torch import Tensor

from peregrine.kernels.cpu import cpu_ready


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Turn x [N, heads, D] by the table [C, D] rows at positions [N] i64: [N, heads, D]."""
    kernel = _compiled().rope if cpu_ready(x, table) else rope_torch
    turned: Tensor = kernel(x, positions, table)
    return turned


def rope_torch(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """The twin: computed in float32, then rounded to the dtype of x."""
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)  # [N, 1, D/2]
    first, second = x.float().chunk(2, dim=-1)  # [N, heads, D/2]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


@functools.cache
def _compiled() -> ModuleType:
    from peregrine.kernels import rope_cpu

    return rope_cpu
