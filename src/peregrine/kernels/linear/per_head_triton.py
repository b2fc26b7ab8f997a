"""One linear per head on a GPU: all heads in one launch, with the law of `linear_gpu`.

Every output is one chain of matrix instructions over the inputs in ascending order, whatever the tile. So each number
of rows may have the tile that suits it, and a row's bits do not depend on its company.
"""

import triton
import triton.language as tl
from torch import Tensor

from peregrine.errors import ConfigError
from peregrine.kernels.runtime.gpu import launch
from peregrine.kernels.runtime.pdl import enter

MIN_DEPTH = 16  # of a matrix instruction: inputs must be a multiple of it
MAX_DEPTH = 128
FEW_ROWS, DEEP = (
    32,
    512,
)  # with few rows a step may be so deep: all weights of a program are then read before it waits
HEIGHTS = (16, 32, 64, 128)  # rows a tile may have
WANTED_PROGRAMS = 128  # about as many as there are multiprocessors: narrower tiles until there are so many


@triton.jit(do_not_specialize=["num_rows"])
def heads_kernel(  # type: ignore[no-untyped-def]
    x,  # [N, h, K], rows and heads apart
    weight,  # [h, O, K]
    out,  # [N, h, O], rows and heads apart
    num_rows,
    x_row,
    x_head,
    out_row,
    out_head,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Grid (tiles of outputs, tiles of rows, heads)."""
    head = tl.program_id(2).to(tl.int64)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    live = rows < num_rows
    # The weight is the left matrix of the product, as in `linear_kernel`: there are more outputs than tokens. Outputs
    # past the last are computed from others and not stored.
    weights_at = weight + (head * OUTPUTS + cols % OUTPUTS)[:, None] * INPUTS + depth[None, :]
    values_at = x + head * x_head + rows.to(tl.int64)[None, :] * x_row + depth[:, None]
    weights = tl.load(weights_at)
    enter()
    values = tl.load(values_at, mask=live[None, :], other=0.0)
    total = tl.dot(weights, values, input_precision="ieee")
    for start in range(DEPTH, INPUTS, DEPTH):
        values = tl.load(values_at + start, mask=live[None, :], other=0.0)
        total = tl.dot(tl.load(weights_at + start), values, total, input_precision="ieee")
    places = head * out_head + rows.to(tl.int64)[:, None] * out_row + cols[None, :]
    inside = live[:, None] & (cols < OUTPUTS)[None, :]
    tl.store(out + places, tl.trans(total).to(out.dtype.element_ty), mask=inside)


def per_head_linear_gpu(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x[:, i] @ weight[i].T for every head i: [N, h, K], [h, O, K] -> [N, h, O], written to `out` if that is given."""
    num_rows, heads, inputs = x.shape
    outputs = weight.shape[1]
    if weight.shape != (heads, outputs, inputs):
        raise ValueError(f"x has {heads} heads of {inputs}, but the weight is {tuple(weight.shape)}")
    if inputs % MIN_DEPTH:
        raise ConfigError(
            f"a linear of {inputs} inputs per head: GPU kernels take multiples of {MIN_DEPTH}; use device='cpu'"
        )
    if out is None:
        out = x.new_empty(num_rows, heads, outputs)
    elif out.shape != (num_rows, heads, outputs) or out.stride(2) != 1:
        raise ValueError(f"out is {tuple(out.shape)}, not a dense {(num_rows, heads, outputs)}")
    x = x if x.stride(2) == 1 else x.contiguous()
    if num_rows:
        rows, cols = pick_tile(num_rows, heads, outputs)
        launch(
            heads_kernel,
            (triton.cdiv(outputs, cols), triton.cdiv(num_rows, rows), heads),
            *(x, weight, out, num_rows, x.stride(0), x.stride(1), out.stride(0), out.stride(1)),
            OUTPUTS=outputs,
            INPUTS=inputs,
            ROWS=rows,
            COLS=cols,
            DEPTH=min(inputs & -inputs, DEEP if rows <= FEW_ROWS else MAX_DEPTH),
            num_warps=4,
            num_stages=3,
            pdl=True,
        )
    return out


def pick_tile(num_rows: int, heads: int, outputs: int) -> tuple[int, int]:
    """Rows and outputs of a tile. Neither changes a bit."""
    rows = next((height for height in HEIGHTS if num_rows <= height), HEIGHTS[-1])
    cols = 64
    while cols > 16 and heads * -(-outputs // cols) * -(-num_rows // rows) < WANTED_PROGRAMS:
        cols //= 2
    return rows, cols
