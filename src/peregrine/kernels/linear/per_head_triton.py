"""One linear layer per head on a GPU: all heads in one launch.

Every output is one chain of matrix instructions over the inputs in ascending order, whatever the tile. So each number
of rows has the tile that suits it, and a row's bits do not depend on the batch.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from peregrine.kernels.linear.per_head import PlainPerHead
from peregrine.kernels.linear.tiles import HEIGHTS, check_inputs
from peregrine.kernels.linear.triton import prefetched_product
from peregrine.kernels.runtime.gpu import launch

MAX_DEPTH = 128
FEW_ROWS, DEEP = 32, 512  # with few rows a step may be so deep that a program reads all its weights before it waits
WANTED_PROGRAMS = 128  # about the number of multiprocessors: tiles are narrowed until there are this many programs


@triton.jit(do_not_specialize=["num_rows"])
def per_head_kernel(  # type: ignore[no-untyped-def]
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
    # past the last one repeat others and are not stored.
    weights_at = weight + (head * OUTPUTS + cols % OUTPUTS)[:, None] * INPUTS + depth[None, :]
    values_at = x + head * x_head + rows.to(tl.int64)[None, :] * x_row + depth[:, None]
    total = prefetched_product(weights_at, values_at, live, INPUTS, DEPTH)
    places = head * out_head + rows.to(tl.int64)[:, None] * out_row + cols[None, :]
    inside = live[:, None] & (cols < OUTPUTS)[None, :]
    tl.store(out + places, tl.trans(total).to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class TritonPerHead(PlainPerHead):
    """One dense tensor on a GPU, read by the kernel of this file."""

    def linear(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x[:, i] @ weight[i].T for every head i: [N, h, K] -> [N, h, O], written to `out` if that is given."""
        num_rows, heads, inputs = x.shape
        outputs = self.weight.shape[1]
        if self.weight.shape != (heads, outputs, inputs):
            raise ValueError(f"x has {heads} heads of {inputs}, but the weight is {tuple(self.weight.shape)}")
        check_inputs(f"a linear of {inputs} inputs per head", inputs)
        if out is None:
            out = x.new_empty(num_rows, heads, outputs)
        elif out.shape != (num_rows, heads, outputs) or out.stride(2) != 1:
            raise ValueError(f"out is {tuple(out.shape)}, not a dense {(num_rows, heads, outputs)}")
        x = x if x.stride(2) == 1 else x.contiguous()
        if num_rows:
            rows, cols = pick_tile(num_rows, heads, outputs)
            grid = triton.cdiv(outputs, cols), triton.cdiv(num_rows, rows), heads
            strides = x.stride(0), x.stride(1), out.stride(0), out.stride(1)
            sizes = {"OUTPUTS": outputs, "INPUTS": inputs, "ROWS": rows, "COLS": cols}
            sizes["DEPTH"] = min(inputs & -inputs, DEEP if rows <= FEW_ROWS else MAX_DEPTH)
            arguments = x, self.weight, out, num_rows, *strides
            launch(per_head_kernel, grid, *arguments, **sizes, num_warps=4, num_stages=3, pdl=True)
        return out


def pick_tile(num_rows: int, heads: int, outputs: int) -> tuple[int, int]:
    """Rows and outputs of a tile. Neither changes a bit."""
    rows = next((height for height in HEIGHTS if num_rows <= height), HEIGHTS[-1])
    cols = 64
    while cols > 16 and heads * -(-outputs // cols) * -(-num_rows // rows) < WANTED_PROGRAMS:
        cols //= 2
    return rows, cols
