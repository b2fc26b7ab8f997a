"""Copies of matrices. Where kernel calls are recorded a kernel makes them, since what torch does cannot be replayed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peregrine.kernels.runtime.cpu import NUMBA_PRESENT, is_recording
from peregrine.kernels.runtime.dispatch import DeviceFile

_cpu = DeviceFile("peregrine.kernels.copy.cpu")


def copy_into(target: Tensor, source: Tensor) -> None:
    """target[:] = source, both [N, C] with the columns of a row side by side; rows may be any distance apart."""
    if is_recording() and NUMBA_PRESENT and target.element_size() % 4 == 0:
        _cpu.copy_into(target, source)
    else:
        target.copy_(source)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """Parts [N, C] side by side: [N, len(parts) * C]."""
    if not is_recording():
        return torch.cat(list(parts), dim=1)
    rows, width = parts[0].shape
    joined = parts[0].new_empty(rows, len(parts) * width)
    for i, part in enumerate(parts):
        copy_into(joined[:, i * width : (i + 1) * width], part)
    return joined
