"""The compiled linear layer on a CPU: tiles of some rows by 16 outputs, held in registers over the whole sum.

Every output of a tile is its own chain of fused multiply-adds, so the tile's height changes speed and no bit. Five rows
are what 32 registers of four floats hold, or 16 of eight; with four, loads and arithmetic are balanced best. The 32
larger ones of AVX-512 hold eight rows: linears of 8 and 16 float32 rows take 0.7 of the time of tiles of four.

Weights may be held in bfloat16: the kernel then reads half the bytes. They are widened to float32 exactly, so the bits
are those of the same values held in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from peregrine.kernels.copy import copy_into
from peregrine.kernels.linear.reference import DenseWeight, WeightFormat
from peregrine.kernels.runtime.cpu import FLOAT32, numba_ready, pieces_for
from peregrine.kernels.runtime.cpu_jit import (
    BFLOAT16,
    FLOAT,
    INT64,
    arguments_of,
    broadcast_lane,
    claim,
    counted_loop,
    cpu_kernel,
    fused_multiply_add,
    has_avx512,
    load_vector,
    load_widened,
    store_vector,
    words_of,
)

PANEL = 16  # outputs that lie together
UNROLL = 4  # inputs of a row that are loaded by one vector load
SERIAL_WORK = 1 << 15  # multiply-adds below which a second thread costs more than it saves
# The largest tile, the tile of many rows, and the most rows for which bfloat16 is widened while it is multiplied: with
# more, a panel is widened once for all of them.
TILE_ROWS, MANY_ROWS, WIDEN_ROWS = (8, 8, 48) if has_avx512() else (5, 4, 5)


@dataclass(frozen=True, slots=True)
class PanelWeight(WeightFormat):
    """float32 on the CPU: the weights of PANEL outputs lie together, one input after the other."""

    is_recordable = True
    num_outputs: int
    panels: (
        Tensor  # [ceil(O / PANEL), I, PANEL], float32, or bfloat16 where that holds the same values; padded with zeros
    )
    bias: Tensor  # [ceil(O / PANEL) * PANEL]

    @classmethod
    def pack(cls, dense: DenseWeight, held: torch.dtype | None = None) -> "PanelWeight":
        """Lay out weight [O, I] and bias [O]."""
        weight, bias = dense.weight, dense.bias
        num_outputs, num_inputs = weight.shape
        padding = -num_outputs % PANEL
        padded = F.pad(weight, (0, 0, 0, padding)).view(-1, PANEL, num_inputs)
        offsets = F.pad(weight.new_zeros(num_outputs) if bias is None else bias, (0, padding))
        kept = padded.bfloat16() if held is torch.bfloat16 else padded
        return cls(num_outputs, kept.transpose(1, 2).contiguous(), offsets)

    def unpack(self) -> DenseWeight:
        """The plain tensors, for the twin."""
        weight = self.panels.float().transpose(1, 2).flatten(0, 1)[: self.num_outputs]
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
        shape = num_rows, stride, width, num_panels
        if self.panels.dtype is FLOAT32:
            _linear(pieces, *pointers, *shape)
        else:
            wide = x.new_empty((pieces, width, PANEL) if num_rows > WIDEN_ROWS else 0)  # a panel for each thread
            _linear_bf16(pieces, *pointers, *shape, wide.data_ptr())
        return y if columns == self.num_outputs else _without_padding(y, self.num_outputs)


def _without_padding(y: Tensor, num_outputs: int) -> Tensor:
    """The first outputs of y [N, O]."""
    trimmed = y.new_empty(len(y), num_outputs)
    copy_into(trimmed, y[:, :num_outputs])
    return trimmed


def _tile(rows: int, weight: ir.Type) -> Any:
    """The intrinsic (x, x_stride, panel, bias, width, y, y_stride) for so many rows; strides count floats."""

    @intrinsic
    def tile(context: Any, x: Any, x_stride: Any, panel: Any, bias: Any, width: Any, y: Any, y_stride: Any) -> Any:
        def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            _build_tile(builder, rows, weight, arguments)
            return codegen.get_dummy_value()

        return types.void(*[types.int64] * 7), build

    return tile


def _build_tile(builder: ir.IRBuilder, rows: int, held_in: ir.Type, arguments: Sequence[ir.Value]) -> None:
    x, x_stride, panel, bias, width, y, y_stride = arguments

    def row_pointers(address: ir.Value, stride: ir.Value) -> list[ir.Value]:
        first = builder.inttoptr(address, FLOAT.as_pointer())
        return [builder.gep(first, [builder.mul(stride, INT64(row))]) for row in range(rows)]

    inputs, outputs = row_pointers(x, x_stride), row_pointers(y, y_stride)
    weights = builder.inttoptr(panel, held_in.as_pointer())

    def add_inputs(sums: list[ir.Value], first: ir.Value, count: int) -> list[ir.Value]:
        """Add the products of `count` consecutive inputs to every row's sums."""
        taken = [load_vector(builder, builder.gep(row, [first]), count) for row in inputs]
        for lane in range(count):
            start = builder.mul(builder.add(first, INT64(lane)), INT64(PANEL))
            weight = load_widened(builder, builder.gep(weights, [start]), PANEL)
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


@intrinsic
def _widen(context: Any, source: Any, target: Any, count: Any) -> Any:
    """Write `count` bfloat16, a multiple of PANEL, as floats."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        source, target, count = arguments
        short, wide = builder.inttoptr(source, BFLOAT16.as_pointer()), builder.inttoptr(target, FLOAT.as_pointer())

        def step(values: list[ir.Value], index: ir.Value, size: int) -> list[ir.Value]:
            store_vector(builder, load_widened(builder, builder.gep(short, [index]), size), builder.gep(wide, [index]))
            return values

        counted_loop(builder, INT64(0), count, PANEL, [], step)
        return codegen.get_dummy_value()

    return types.void(*[types.int64] * 3), build


def _tile_of(smaller: Any, size: int, tile: Any) -> Any:
    """`tile` if there are `size` rows, else what `smaller` does."""

    @njit
    def tile_of(rows, x, stride, panel, offsets, width, y, y_stride):  # type: ignore[no-untyped-def]
        if rows == size:
            tile(x, stride, panel, offsets, width, y, y_stride)
        else:
            smaller(rows, x, stride, panel, offsets, width, y, y_stride)

    return tile_of


@njit
def _no_tile(rows, x, stride, panel, offsets, width, y, y_stride):  # type: ignore[no-untyped-def]
    """There are no rows."""


def _rows_by(weight: ir.Type) -> Any:
    """All rows of one panel, by tiles of up to TILE_ROWS rows."""
    tile = _no_tile
    for size in range(1, 1 + TILE_ROWS):
        tile = _tile_of(tile, size, _tile(size, weight))

    @njit
    def rows_of_panel(x, stride, panel, offsets, width, y, y_stride, rows):  # type: ignore[no-untyped-def]
        row = 0
        while row < rows:
            left = rows - row
            count = left if left <= TILE_ROWS else (left + 1) // 2 if left < 2 * MANY_ROWS else MANY_ROWS
            source, target = x + row * stride * 4, y + row * y_stride * 4
            tile(count, source, stride, panel, offsets, width, target, y_stride)
            row += count

    return rows_of_panel


_rows, _short_rows = _rows_by(FLOAT), _rows_by(BFLOAT16)


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
            _rows(x, stride, panel, offsets, width, y + j * PANEL * 4, y_stride, rows)
        piece = claim(words)


@cpu_kernel("qqqqqqqqq")
def _linear_bf16(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces = words[1]
    x, panels, bias, y, rows, stride, width, num_panels, scratch = arguments_of(block, 9)
    y_stride = num_panels * PANEL
    piece = claim(words)
    while piece < pieces:
        wide = scratch + piece * width * PANEL * 4
        for j in range(piece * num_panels // pieces, (piece + 1) * num_panels // pieces):
            panel, offsets, target = panels + j * width * PANEL * 2, bias + j * PANEL * 4, y + j * PANEL * 4
            if rows > WIDEN_ROWS:
                _widen(panel, wide, width * PANEL)
                _rows(x, stride, wide, offsets, width, target, y_stride, rows)
            else:
                _short_rows(x, stride, panel, offsets, width, target, y_stride, rows)
        piece = claim(words)
