"""Which tensors the Triton kernels take, and the one door through which they are launched.

Triton is optional and slow to import: only the `*_gpu.py` files import it, and those are imported at the first
call that needs them. Numbers that follow the batch are never specialised (`do_not_specialize`): the machine code of
a row is then the same in any company.
"""

import importlib.util
from typing import Any

from torch import Tensor

from peregrine.hardware import triton_interprets

TRITON_PRESENT = importlib.util.find_spec("triton") is not None


def gpu_ready(tensor: Tensor) -> bool:
    """Whether Triton kernels may take this tensor and its companions: they lie on a GPU and Triton is there."""
    return tensor.is_cuda and TRITON_PRESENT


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, early: bool = False, **options: Any) -> None:
    """Queue one kernel: `grid` programs, arguments in its order, constants and options (num_warps) by name.

    `early`: its programs may start before the kernel before has ended, and wait themselves (see early_gpu.py).
    """
    if early and not triton_interprets():
        options["launch_pdl"] = True
    kernel[grid](*arguments, **options)


def dense_rows(x: Tensor) -> Tensor:
    """x [N, H] with the values of a row side by side, as the kernels read them; rows may lie apart."""
    return x if x.stride(1) == 1 else x.contiguous()
