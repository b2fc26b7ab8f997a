"""Launches `fitted.cu`: linears of 65 to 384 rows on Hopper, in tiles of any width."""

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from peregrine.kernels.linear.fitted_tiles import FittedPlan
from peregrine.kernels.linear.reference import DenseWeight
from peregrine.kernels.linear.tiles import LARGE_DEPTH, LARGE_HEIGHT
from peregrine.kernels.residual.reference import FINE_UNIT, MAX_SQUARE, SMALL_MEAN, SQUARE_UNIT
from peregrine.kernels.runtime.cuda import Kernel, load_kernel, paired_tensor_map, pointer, product_source, tensor_map

NUMBERS = {torch.bfloat16: "bf16", torch.float16: "f16"}


class Sizes(ctypes.Structure):
    """The struct of that name in `fitted.cu`."""

    _fields_ = [
        ("rows", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("inputs", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("coarse_unit", ctypes.c_float),
        ("fine_unit", ctypes.c_float),
    ]


def run_fitted(
    x: Tensor,
    weight: DenseWeight,
    out: Tensor,
    plan: FittedPlan,
    scale: tuple[Tensor, float] | None,
    gate: bool,
    addition: tuple[Tensor, ...] | None,
) -> None:
    """One launch. `addition`: residual, norm, scaled, squares and stale squares; others as in `run` of triton.py."""
    (rows, outputs), inputs = out.shape, x.shape[1]
    squares, eps = scale or (None, 0.0)
    sizes = Sizes(rows, outputs, inputs, eps, 1.0 / (inputs * SQUARE_UNIT), 1.0 / (inputs * FINE_UNIT))
    weights = (paired_tensor_map if gate else tensor_map)(weight.weight, plan.cols, LARGE_DEPTH)
    pointers = map(pointer, (weight.bias, out, squares, *(addition or (None,) * 5)))
    kernel = kernel_of(plan, gate, addition is not None, x.dtype, x.device)
    programs = plan.programs(rows, len(weight.weight))
    kernel.launch(programs, weights, tensor_map(x, LARGE_HEIGHT, LARGE_DEPTH), *pointers, sizes)


@functools.cache
def kernel_of(plan: FittedPlan, gate: bool, add: bool, dtype: torch.dtype, device: torch.device) -> Kernel:
    """The kernel of a plan, compiled once."""
    with torch.cuda.device(device):
        source = fitted_source(plan, gate, add, dtype)
        return load_kernel(source, "fitted_linear", plan.threads, plan.shared_bytes, cluster=plan.split)


def fitted_source(plan: FittedPlan, gate: bool, add: bool, dtype: torch.dtype) -> str:
    """The CUDA C++ of a plan."""
    number = NUMBERS[dtype]
    known: dict[str, object] = {"GROUPS": plan.groups, "COLS": plan.cols, "STAGES": plan.stages, "SPLIT": plan.split}
    known |= {"GATE": int(gate), "ADD": int(add), "NUMBER": f'"{number}"', "SMALL_UNITS": int(SMALL_MEAN * SQUARE_UNIT)}
    units = {"SQUARE_UNIT": SQUARE_UNIT, "FINE_UNIT": FINE_UNIT, "MAX_SQUARE": MAX_SQUARE}
    known |= {name: f"{value:.1f}f" for name, value in units.items()}
    lines = [f"#define {name} {value}" for name, value in known.items()]
    return "\n".join([*lines, product_source(plan.cols, number), Path(__file__).with_suffix(".cu").read_text()])
