"""Launches Hopper's kernel for many rows (`hopper_large.py`)."""

from typing import Any

from torch import Tensor

from peregrine.kernels.linear.epilogue import Addition
from peregrine.kernels.linear.hopper import tiled
from peregrine.kernels.linear.hopper_large import large_kernel
from peregrine.kernels.linear.hopper_ring import CHUNK, DEPTH, HEIGHT, weight_tiles
from peregrine.kernels.linear.reference import DenseWeight
from peregrine.kernels.linear.tiles import LargePlan
from peregrine.kernels.runtime.gpu import launch


def run_large(
    x: Tensor,
    weight: DenseWeight,
    out: Tensor,
    scale: tuple[Tensor, float] | None,
    gate: bool,
    add: Addition | None,
    plan: LargePlan,
    workspace: tuple[Tensor, Tensor],
) -> None:
    """One launch. `workspace`: partial sums and counters; the other arguments are those of `run` in triton.py."""

    def in_chunks(matrix: Tensor, halved: bool = plan.eighths % 2 > 0) -> Any:
        return tiled(matrix, HEIGHT.value, CHUNK.value // 2 if halved else CHUNK.value)

    squares, eps = scale or (None, 0.0)
    results = in_chunks(out)
    ends = in_chunks(out, halved=True) if gate and plan.rest % 2 else results
    launch(
        large_kernel,
        (plan.programs,),
        *(tiled(x, HEIGHT.value, DEPTH.value), weight_tiles(weight.weight, gate, box=plan.box), results),
        *((in_chunks(add.scaled), in_chunks(add.residual)) if add else (ends, results)),
        *(out if weight.bias is None else weight.bias, out if squares is None else squares),
        *((add.norm, add.squares, add.stale_squares) if add else (out,) * 3),
        *(*workspace, len(out), plan.tiles, plan.pieces, eps),
        N=out.shape[1],
        K=x.shape[1],
        SCALE=squares is not None,
        BIAS=weight.bias is not None,
        GATE=gate,
        ADD=add is not None,
        SPLIT=plan.split,
        PAIRS=plan.in_pairs,
        GROUPS=plan.groups,
        EIGHTHS=plan.eighths,
        REST=plan.rest,
        num_warps=4,
        pdl=True,
    )
