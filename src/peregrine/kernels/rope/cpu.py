"""The compiled rotation on a CPU: one pass over each row's heads."""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from peregrine.kernels.runtime.cpu import pieces_for
from peregrine.kernels.runtime.cpu_jit import arguments_of, claim, cpu_kernel, floats_at, longs_at, words_of

SERIAL_WORK = 1 << 15  # elements below which a second thread costs more than it saves


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate x [N, heads, D] float32 by table [C, D] at positions [N] i64, all on the CPU.

    A position outside the table gives NaN; nothing is read there.
    """
    num_rows, heads, dim = x.shape
    if positions.numel() != num_rows or positions.dtype is not torch.int64 or not positions.is_cpu:
        given = f"{positions.dtype} {tuple(positions.shape)} on {positions.device}"
        raise ValueError(f"positions must be int64 [{num_rows}] on the CPU, they are {given}")
    if table.shape[1] != dim or dim % 2:
        raise ValueError(f"table has rows of {table.shape[1]}, the heads have {dim} (which must be even)")
    positions, table = positions.contiguous(), table.contiguous()
    strides = x.stride()
    if strides[2] != 1:
        x = x.contiguous()
        strides = x.stride()
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    pieces = pieces_for(num_rows, num_rows * heads * dim, SERIAL_WORK)
    pointers = x.data_ptr(), positions.data_ptr(), table.data_ptr(), rotated.data_ptr()
    _rope(pieces, *pointers, num_rows, strides[0], heads, strides[1], dim, table.shape[0])
    return rotated


@njit
def _rotate_head(source, cos, sin, target, half):  # type: ignore[no-untyped-def]
    first, second = floats_at(source, half), floats_at(source + half * 4, half)
    low, high = floats_at(target, half), floats_at(target + half * 4, half)
    for i in range(half):
        low[i] = first[i] * cos[i] - second[i] * sin[i]
    for i in range(half):
        high[i] = second[i] * cos[i] + first[i] * sin[i]


@cpu_kernel("qqqqqqqqqq")
def _rope(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces = words[1]
    x, positions_at, table, rotated, rows, stride, heads, head_stride, dim, table_rows = arguments_of(block, 10)
    positions = longs_at(positions_at, rows)
    half = dim // 2
    piece = claim(words)
    while piece < pieces:
        for row in range(piece * rows // pieces, (piece + 1) * rows // pieces):
            target = rotated + row * heads * dim * 4
            position = positions[row]
            if position < 0 or position >= table_rows:
                floats_at(target, heads * dim)[:] = np.nan
                continue
            entry = table + position * dim * 4
            cos, sin = floats_at(entry, half), floats_at(entry + half * 4, half)
            for head in range(heads):
                source = x + (row * stride + head * head_stride) * 4
                _rotate_head(source, cos, sin, target + head * dim * 4, half)
        piece = claim(words)
