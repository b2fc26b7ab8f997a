"""The residual stream: plus an update, and some of its rows. Compiled kernels can be part of a recorded step."""

import torch
from torch import Tensor

from peregrine.kernels.runtime.cpu import pieces_for
from peregrine.kernels.runtime.cpu_jit import arguments_of, claim, cpu_kernel, floats_at, longs_at, words_of

SERIAL_WORK = 1 << 15  # elements below which a second thread costs more than it saves


def add(update: Tensor, values: Tensor) -> Tensor:
    """update + values, both [N, H] float32 on the CPU."""
    update, values = update.contiguous(), values.contiguous()
    if update.shape != values.shape:
        raise ValueError(f"update has shape {tuple(update.shape)}, values have {tuple(values.shape)}")
    total = torch.empty_like(values)
    count = total.numel()
    _add(pieces_for(count, count, SERIAL_WORK), update.data_ptr(), values.data_ptr(), total.data_ptr(), count)
    return total


def take_rows(values: Tensor, rows: Tensor) -> Tensor:
    """values[rows] of dense values [N, ...] on the CPU, whose rows are whole words of eight bytes."""
    taken = values.new_empty(len(rows), *values.shape[1:])
    size = values.stride(0) * values.element_size() // 8
    _take(1, values.data_ptr(), rows.data_ptr(), taken.data_ptr(), len(values), len(rows), size)
    return taken


@cpu_kernel("qqqqqq")
def _take(block):  # type: ignore[no-untyped-def]
    values, rows, taken, total, count, size = arguments_of(block, 6)
    if claim(words_of(block)) != 0:
        return
    source, chosen, target = longs_at(values, (total, size)), longs_at(rows, count), longs_at(taken, (count, size))
    for i in range(count):
        for j in range(size):
            target[i, j] = source[chosen[i], j]


@cpu_kernel("qqqq")
def _add(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces = words[1]
    update, values, total, count = arguments_of(block, 4)
    a, b, c = floats_at(update, count), floats_at(values, count), floats_at(total, count)
    piece = claim(words)
    while piece < pieces:
        for i in range(piece * count // pieces, (piece + 1) * count // pieces):
            c[i] = a[i] + b[i]
        piece = claim(words)
