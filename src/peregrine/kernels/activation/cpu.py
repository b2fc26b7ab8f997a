"""The compiled gated activation on a CPU: one pass over each row, with a vector exponential."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from peregrine.kernels.runtime.cpu import pieces_for
from peregrine.kernels.runtime.cpu_jit import (
    FLOAT,
    INT64,
    arguments_of,
    claim,
    counted_loop,
    cpu_kernel,
    exponential,
    load_vector,
    store_vector,
    words_of,
)

LANES = 16
SERIAL_WORK = 1 << 12  # elements below which a second thread costs more than it saves


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [N, 2I] float32 on the CPU: [N, I]."""
    gate_up = gate_up.contiguous()
    num_rows, double_width = gate_up.shape
    width, odd = divmod(double_width, 2)
    if odd:
        raise ValueError(f"gate_up has rows of {double_width}, which are not two halves")
    out = gate_up.new_empty(num_rows, width)
    pieces = pieces_for(num_rows, num_rows * width, SERIAL_WORK)
    _silu_mul(pieces, gate_up.data_ptr(), out.data_ptr(), num_rows, width)
    return out


@intrinsic
def _silu_mul_row(context: Any, gate: Any, up: Any, out: Any, width: Any) -> Any:
    """(gate, up, out, width): one row, addresses in bytes."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        gates, ups, outs = (builder.inttoptr(address, FLOAT.as_pointer()) for address in arguments[:3])
        width = arguments[3]

        def take(carried: list[ir.Value], first: ir.Value, step: int) -> list[ir.Value]:
            gate, up = (load_vector(builder, builder.gep(pointer, [first]), step) for pointer in (gates, ups))
            zero, one = (ir.Constant(gate.type, [number] * step) for number in (0.0, 1.0))
            negative = builder.fcmp_ordered("<", gate, zero)
            decay = exponential(builder, builder.select(negative, gate, builder.fneg(gate)))  # e**-|gate|
            share = builder.select(negative, builder.fmul(gate, decay), gate)
            silu = builder.fdiv(share, builder.fadd(one, decay))
            store_vector(builder, builder.fmul(silu, up), builder.gep(outs, [first]))
            return []

        whole = builder.sub(width, builder.srem(width, INT64(LANES)))
        counted_loop(builder, INT64(0), whole, LANES, [], take)
        counted_loop(builder, whole, width, 1, [], take)
        return codegen.get_dummy_value()

    return types.void(*[types.int64] * 4), build


@cpu_kernel("qqqq")
def _silu_mul(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces = words[1]
    gate_up, out, rows, width = arguments_of(block, 4)
    piece = claim(words)
    while piece < pieces:
        for row in range(piece * rows // pieces, (piece + 1) * rows // pieces):
            gate = gate_up + 2 * row * width * 4
            _silu_mul_row(gate, gate + width * 4, out + row * width * 4, width)
        piece = claim(words)
