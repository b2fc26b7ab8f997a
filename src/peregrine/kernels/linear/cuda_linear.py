"""Launches the linears in CUDA C++: `clustered.cu` and `fitted.cu`, whose arguments are the same."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from peregrine.kernels.linear.cuda_tiles import CudaPlan, FittedPlan
from peregrine.kernels.linear.reference import DenseWeight
from peregrine.kernels.linear.tiles import LARGE_DEPTH, LARGE_HEIGHT
from peregrine.kernels.residual.reference import FINE_UNIT, MAX_SQUARE, SMALL_MEAN, SQUARE_UNIT
from peregrine.kernels.runtime.cuda import (
    NUMBERS,
    Kernel,
    load_kernel,
    paired_tensor_map,
    pointer,
    product_source,
    shared_source,
    tensor_map,
)


class Sizes(ctypes.Structure):
    """The struct of that name in `epilogue.cuh`."""

    _fields_ = [
        ("rows", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("inputs", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("coarse_unit", ctypes.c_float),
        ("fine_unit", ctypes.c_float),
    ]


def run_cuda(
    x: Tensor,
    weight: DenseWeight,
    out: Tensor,
    plan: CudaPlan,
    scale: tuple[Tensor, float] | None,
    gate: bool,
    addition: tuple[Tensor, ...] | None,
) -> None:
    """One launch. `addition`: residual, norm, scaled, squares and stale squares; others as in `run` of triton.py."""
    (rows, outputs), inputs = out.shape, x.shape[1]
    squares, eps = scale or (None, 0.0)
    sizes = Sizes(rows, outputs, inputs, eps, 1.0 / (inputs * SQUARE_UNIT), 1.0 / (inputs * FINE_UNIT))
    weights = (paired_tensor_map if gate else tensor_map)(weight.weight, plan.cols, LARGE_DEPTH)
    x_rows = LARGE_HEIGHT if isinstance(plan, FittedPlan) else rows
    pointers = map(pointer, (weight.bias, out, squares, *(addition or (None,) * 5)))
    kernel = kernel_of(plan, gate, addition is not None, x.dtype, x.device)
    programs = plan.programs(rows, len(weight.weight))
    kernel.launch((programs, 1, 1), weights, tensor_map(x, x_rows, LARGE_DEPTH), *pointers, sizes)


@functools.cache
def kernel_of(plan: CudaPlan, gate: bool, add: bool, dtype: torch.dtype, device: torch.device) -> Kernel:
    """The kernel of a plan, compiled once."""
    with torch.cuda.device(device):
        source = linear_source(plan, gate, add, dtype)
        return load_kernel(source, "linear", plan.threads, plan.shared_bytes, cluster=plan.split)


def linear_source(plan: CudaPlan, gate: bool, add: bool, dtype: torch.dtype) -> str:
    """The CUDA C++ of a plan."""
    known: dict[str, object] = {"STAGES": plan.stages, "SPLIT": plan.split, "ADD": int(add)}
    if isinstance(plan, FittedPlan):
        name, columns = "fitted.cu", plan.cols
        known |= {"GROUPS": plan.groups, "COLS": plan.cols, "GATE": int(gate)}
    else:
        name, columns = "clustered.cu", plan.width
        known |= {"WIDTH": plan.width}
    units = {"SQUARE_UNIT": SQUARE_UNIT, "FINE_UNIT": FINE_UNIT, "MAX_SQUARE": MAX_SQUARE}
    known |= {unit: f"{value:.1f}f" for unit, value in units.items()}
    known |= {"SMALL_UNITS": int(SMALL_MEAN * SQUARE_UNIT)}
    here = Path(__file__)
    parts = product_source(columns, NUMBERS[dtype]), *(here.with_name(f).read_text() for f in ("epilogue.cuh", name))
    return shared_source(dtype, known) + "\n".join(parts)
