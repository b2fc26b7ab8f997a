"""Rotary positions in the half-split layout of the Llama family: element i of a head is rotated with i + D/2.

A table row is cos | sin, D/2 each, float32, with any attention factor folded in.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.norm import rms_norm_torch
from peregrine.kernels.runtime.cpu import numba_ready
from peregrine.kernels.runtime.dispatch import DeviceFile

_cpu = DeviceFile("peregrine.kernels.rope.cpu")


@dataclass(frozen=True, slots=True)
class DeferredRope:
    """Head norms, if the model has them, and rotation, which a backend must still apply to queries and keys."""

    q_positions: Tensor  # [R] i64
    positions: Tensor  # [N] i64 of the keys
    table: Tensor  # [C, D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    eps: float


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate x [N, heads, D] by the table [C, D] rows at positions [N] i64: [N, heads, D]."""
    kernel = _cpu.rope if numba_ready(x, table) else rope_torch
    rotated: Tensor = kernel(x, positions, table)
    return rotated


def rope_torch(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """The twin: computed in float32, then rounded to the dtype of x."""
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)  # [N, 1, D/2]
    first, second = x.float().chunk(2, dim=-1)  # [N, heads, D/2]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def rotate_heads(q: Tensor, k: Tensor, rope: DeferredRope) -> tuple[Tensor, Tensor]:
    """Queries [R, Hq, D] and keys [N, Hkv, D], normed and rotated; a GPU does this while it stores the keys."""
    if rope.q_norm is not None and rope.k_norm is not None:
        q, k = rms_norm_torch(q, rope.q_norm, rope.eps), rms_norm_torch(k, rope.k_norm, rope.eps)
    return rope_torch(q, rope.q_positions, rope.table), rope_torch(k, rope.positions, rope.table)
