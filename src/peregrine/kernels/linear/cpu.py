"""The compiled linear layer on a CPU: tiles of 1 to 5 rows by 16 outputs, held in registers over the whole sum.

Every output of a tile is its own chain of fused multiply-adds, so the tile's height changes speed and no bit. Five rows
are what 32 registers of four floats hold; with four, loads and arithmetic are balanced best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from peregrine.kernels.linear.reference import DenseWeight, WeightFormat
from peregrine.kernels.runtime.cpu import numba_ready, pieces_for
from peregrine.kernels.runtime.cpu_jit import (
    FLOAT,
    INT64,
    arguments_of,
    broadcast_lane,
    claim,
    counted_loop,
    cpu_kernel,
    fused_multiply_add,
    load_vector,
    store_vector,
    words_of,
)

PANEL = 16  # outputs that lie together
UNROLL = 4  # inputs of a row that are loaded by one vector load
SERIAL_WORK = 1 << 15  # multiply-adds below which a second thread costs more than it saves


@dataclass(frozen=True, slots=True)
class PanelWeight(WeightFormat):
    """float32 on the CPU: the weights of PANEL outputs lie together, one input after the other."""

    is_recordable = True
    num_outputs: int
    panels: Tensor  # [ceil(O / PANEL), I, PANEL]; outputs past the last are zero
    bias: Tensor  # [ceil(O / PANEL) * PANEL]

    @classmethod
    def pack(cls, dense: DenseWeight) -> "PanelWeight":
        """Lay out weight [O, I] and bias [O]."""
        weight, bias = dense.weight, dense.bias
        num_outputs, num_inputs = weight.shape
        padding = -num_outputs % PANEL
        padded = F.pad(weight, (0, 0, 0, padding)).view(-1, PANEL, num_inputs)
        offsets = F.pad(weight.new_zeros(num_outputs) if bias is None else bias, (0, padding))
        return cls(num_outputs, padded.transpose(1, 2).contiguous(), offsets)

    def unpack(self) -> DenseWeight:
        """The plain tensors, for the twin."""
        weight = self.panels.transpose(1, 2).flatten(0, 1)[: self.num_outputs]
        return DenseWeight(weight, self.bias[: self.num_outputs])

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.num_outputs, self.panels.shape[1]

    @property
    def num_bytes(self) -> int:
        """What a layer reads: the weight's size in memory."""
        return self.panels.nbytes

    def linear(self, x: Tensor) -> Tensor:
        """x @ weight.T + bias: [N, I] -> [N, O]; where a gradient is wanted, the twin."""
        if not numba_ready(x):
            return self.unpack().linear(x)
        num_rows, width = x.shape
        num_panels, num_inputs, _ = self.panels.shape
        if width != num_inputs:
            raise ValueError(f"x has rows of {width}, the weight takes rows of {num_inputs}")
        if x.stride(1) != 1:
            x = x.contiguous()
        stride = width if x.is_contiguous() else x.stride(0)
        columns = num_panels * PANEL
        y = x.new_empty(num_rows, columns)
        pieces = pieces_for(num_panels, num_rows * columns * width, SERIAL_WORK)
        pointers = x.data_ptr(), self.panels.data_ptr(), self.bias.data_ptr(), y.data_ptr()
        _linear(pieces, *pointers, num_rows, stride, width, num_panels)
        return y if columns == self.num_outputs else y[:, : self.num_outputs].contiguous()


def _tile(rows: int) -> Any:
    """The intrinsic (x, x_stride, panel, bias, width, y, y_stride) for so many rows; strides count floats."""

    @intrinsic
    def tile(context: Any, x: Any, x_stride: Any, panel: Any, bias: Any, width: Any, y: Any, y_stride: Any) -> Any:
        def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            _build_tile(builder, rows, arguments)
            return codegen.get_dummy_value()

        return types.void(*[types.int64] * 7), build

    return tile


def _build_tile(builder: ir.IRBuilder, rows: int, arguments: Sequence[ir.Value]) -> None:
    x, x_stride, panel, bias, width, y, y_stride = arguments

    def row_pointers(address: ir.Value, stride: ir.Value) -> list[ir.Value]:
        first = builder.inttoptr(address, FLOAT.as_pointer())
        return [builder.gep(first, [builder.mul(stride, INT64(row))]) for row in range(rows)]

    inputs, outputs = row_pointers(x, x_stride), row_pointers(y, y_stride)
    weights = builder.inttoptr(panel, FLOAT.as_pointer())

    def add_inputs(sums: list[ir.Value], first: ir.Value, count: int) -> list[ir.Value]:
        """Add the products of `count` consecutive inputs to every row's sums."""
        taken = [load_vector(builder, builder.gep(row, [first]), count) for row in inputs]
        for lane in range(count):
            start = builder.mul(builder.add(first, INT64(lane)), INT64(PANEL))
            weight = load_vector(builder, builder.gep(weights, [start]), PANEL)
            factors = [broadcast_lane(builder, vector, lane, PANEL) for vector in taken]
            pairs = zip(factors, sums, strict=True)
            sums = [fused_multiply_add(builder, factor, weight, total) for factor, total in pairs]
        return sums

    zero = ir.Constant(ir.VectorType(FLOAT, PANEL), [0.0] * PANEL)
    whole = builder.sub(width, builder.srem(width, INT64(UNROLL)))
    sums = counted_loop(builder, INT64(0), whole, UNROLL, [zero] * rows, add_inputs)
    sums = counted_loop(builder, whole, width, 1, sums, add_inputs)
    offsets = load_vector(builder, builder.inttoptr(bias, FLOAT.as_pointer()), PANEL)
    for pointer, total in zip(outputs, sums, strict=True):
        store_vector(builder, builder.fadd(total, offsets), pointer)


_tile1, _tile2, _tile3, _tile4, _tile5 = (_tile(rows) for rows in range(1, 6))


@cpu_kernel("qqqqqqqq")
def _linear(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces = words[1]
    x, panels, bias, y, rows, stride, width, num_panels = arguments_of(block, 8)
    y_stride = num_panels * PANEL
    piece = claim(words)
    while piece < pieces:
        for j in range(piece * num_panels // pieces, (piece + 1) * num_panels // pieces):
            panel, offsets = panels + j * width * PANEL * 4, bias + j * PANEL * 4
            row = 0
            while row < rows:
                source, target = x + row * stride * 4, y + (row * y_stride + j * PANEL) * 4
                left = rows - row
                if left == 4 or left > 5:
                    _tile4(source, stride, panel, offsets, width, target, y_stride)
                    row += 4
                elif left == 5:
                    _tile5(source, stride, panel, offsets, width, target, y_stride)
                    row += 5
                elif left == 3:
                    _tile3(source, stride, panel, offsets, width, target, y_stride)
                    row += 3
                elif left == 2:
                    _tile2(source, stride, panel, offsets, width, target, y_stride)
                    row += 2
                else:
                    _tile1(source, stride, panel, offsets, width, target, y_stride)
                    row += 1
        piece = claim(words)
