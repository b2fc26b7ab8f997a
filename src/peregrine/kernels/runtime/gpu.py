"""Which tensors the Triton kernels take, what a device offers them, and the one function that launches them.

Triton is optional and slow to import: only `triton.py` and `hopper.py` files import it, and those are imported at the
first call that needs them. Numbers that follow from the batch are never specialised (`do_not_specialize`): the machine
code that computes a row is then the same for every batch.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from peregrine.hardware import triton_interprets

TRITON_PRESENT = importlib.util.find_spec("triton") is not None
HOPPER = 9  # major compute capability
HOPPER_SHARED_BYTES = 227 * 1024


def triton_ready(tensor: Tensor) -> bool:
    """Whether Triton kernels take this tensor: it lies on a GPU and Triton is installed."""
    return tensor.is_cuda and TRITON_PRESENT


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, pdl: bool = False, **options: Any) -> None:
    """Queue one kernel: `grid` programs, arguments in order, constants and options (num_warps) by name.

    `pdl`: a programmatic dependent launch, whose programs may start before the previous kernel has ended and wait for
    it themselves (see pdl.py).
    """
    if pdl and pdl_ready():
        options["launch_pdl"] = True
    kernel[grid](*arguments, **options)


def pdl_ready() -> bool:
    """Whether kernels are launched with PDL: from Hopper on, and not in the interpreter."""
    return not triton_interprets() and generation() >= HOPPER


@functools.cache
def generation() -> int:
    """Lowest major compute capability of all visible GPUs: what every kernel of this process may rely on.

    Without a GPU kernels are only compiled, for Hopper.
    """
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return min((torch.cuda.get_device_capability(device)[0] for device in devices), default=HOPPER)


def is_hopper(tensor: Tensor) -> bool:
    """Whether the tensor lies on a Hopper GPU, so that the kernels written for Hopper alone take it."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] == HOPPER


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program can have on this device; Hopper's where kernels run on a CPU."""
    if device.type != "cuda":
        return HOPPER_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs do not know the field
    return int(properties.shared_memory_per_block_optin)


def multiprocessors(device: torch.device, elsewhere: int) -> int:
    """Multiprocessors (SMs) of this device; `elsewhere` where kernels run on a CPU."""
    if device.type != "cuda":
        return elsewhere
    return torch.cuda.get_device_properties(device).multi_processor_count


def dense_rows(x: Tensor) -> Tensor:
    """x [N, H] with the values of each row side by side, as the kernels read them; rows may lie apart."""
    return x if x.stride(1) == 1 else x.contiguous()
