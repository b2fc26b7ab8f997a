"""Which tensors the Triton kernels take, and the one door through which they are launched.

Triton is optional and slow to import: only the `*_gpu.py` files import it, and those are imported at the first
call that needs them. Numbers that follow the batch are never specialised (`do_not_specialize`): the machine code of
a row is then the same in any company.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from peregrine.hardware import triton_interprets

TRITON_PRESENT = importlib.util.find_spec("triton") is not None
HOPPER = 9  # the generation, as devices tell it
HOPPER_SHARED_BYTES = 227 * 1024


def triton_ready(tensor: Tensor) -> bool:
    """Whether Triton kernels may take this tensor and its companions: they lie on a GPU and Triton is there."""
    return tensor.is_cuda and TRITON_PRESENT


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, early: bool = False, **options: Any) -> None:
    """Queue one kernel: `grid` programs, arguments in its order, constants and options (num_warps) by name.

    `early`: its programs may start before the kernel before has ended, and wait themselves (see early_gpu.py).
    """
    if early and starts_early():
        options["launch_pdl"] = True
    kernel[grid](*arguments, **options)


def starts_early() -> bool:
    """Whether a kernel can start before the one before has ended: Hopper and later devices do that."""
    return not triton_interprets() and generation() >= HOPPER


def is_hopper(tensor: Tensor) -> bool:
    """Whether the kernels that are written for Hopper alone may take this tensor."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] == HOPPER


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program can have; where none is known, as on a CPU, that of Hopper."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    # Imports triton, which is slow; whoever asks is about to launch one of its kernels.
    from triton.runtime import driver

    properties: dict[str, int] = driver.active.utils.get_device_properties(device.index or 0)
    return properties["max_shared_mem"]


@functools.cache
def generation() -> int:
    """Of the device that kernels are launched on; where there is none they are only compiled, for Hopper."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else HOPPER


def processors(device: torch.device, elsewhere: int) -> int:
    """How many multiprocessors a device has; where kernels are interpreted, as many as the caller says."""
    if device.type != "cuda":
        return elsewhere
    return torch.cuda.get_device_properties(device).multi_processor_count


def dense_rows(x: Tensor) -> Tensor:
    """x [N, H] with the values of a row side by side, as the kernels read them; rows may lie apart."""
    return x if x.stride(1) == 1 else x.contiguous()
