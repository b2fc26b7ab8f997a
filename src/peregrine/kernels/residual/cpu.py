"""The residual stream plus an update, compiled for the CPU: as a kernel it can be part of a recorded step."""

import torch
from torch import Tensor

from peregrine.kernels.runtime.cpu import pieces_for
from peregrine.kernels.runtime.cpu_jit import arguments_of, claim, cpu_kernel, floats_at, words_of

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
