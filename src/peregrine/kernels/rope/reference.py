"""Rotary positions in the half-split layout of the Llama family: element i of a head turns with i + D/2.

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
    """What is still to be done to queries and keys: head norms, if the model has them, and the rotation."""

    q_positions: Tensor  # [R] i64
    positions: Tensor  # [N] i64 of the keys
    table: Tensor  # [C, D]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    eps: float


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """DeferredRope x [N, heads, D] by the table [C, D] rows at positions [N] i64: [N, heads, D]."""
    kernel = _cpu.rope if numba_ready(x, table) else rope_torch
    turned: Tensor = kernel(x, positions, table)
    return turned


def rope_torch(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """The twin: computed in float32, then rounded to the dtype of x."""
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)  # [N, 1, D/2]
    first, second = x.float().chunk(2, dim=-1)  # [N, heads, D/2]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def rotate_heads(q: Tensor, k: Tensor, turn: DeferredRope) -> tuple[Tensor, Tensor]:
    """Queries [R, Hq, D] and keys [N, Hkv, D], normed and turned; a GPU does this while it stores the keys."""
    if turn.q_norm is not None and turn.k_norm is not None:
        q, k = rms_norm_torch(q, turn.q_norm, turn.eps), rms_norm_torch(k, turn.k_norm, turn.eps)
    return rope_torch(q, turn.q_positions, turn.table), rope_torch(k, turn.positions, turn.table)
