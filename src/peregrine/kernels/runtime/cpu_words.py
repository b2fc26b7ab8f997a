"""What compiled code does with single words of memory that several threads share, and calls by address.

Addresses and values are 64-bit integers. Every access is atomic and sequentially consistent.
Imports numba: only `cpu_team.py` may import this one.
"""

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# What tells a CPU that a loop waits: an intrinsic of LLVM and its arguments.
PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.isb", (15,))}
PAUSES |= {"AMD64": PAUSES["x86_64"], "arm64": PAUSES["aarch64"]}

INT64 = ir.IntType(64)


def _place(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, INT64.as_pointer())


@intrinsic
def read(context: Any, address: Any) -> Any:
    """The word at an address; no later access is done before it."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_place(builder, arguments[0]), "seq_cst", 8)

    return types.int64(types.int64), build


@intrinsic
def write(context: Any, address: Any, value: Any) -> Any:
    """Write a word; every earlier access is done before it."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], _place(builder, arguments[0]), "seq_cst", 8)
        return codegen.get_dummy_value()

    return types.void(types.int64, types.int64), build


@intrinsic
def add(context: Any, address: Any, value: Any) -> Any:
    """Add to a word; its new value."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        old = builder.atomic_rmw("add", _place(builder, arguments[0]), arguments[1], "seq_cst")
        return builder.add(old, arguments[1])

    return types.int64(types.int64, types.int64), build


@intrinsic
def swap_if(context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Write `value` if the word is `expected`; whether it was."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        place = _place(builder, arguments[0])
        return builder.extract_value(builder.cmpxchg(place, arguments[1], arguments[2], "seq_cst", "seq_cst"), 1)

    return types.boolean(types.int64, types.int64, types.int64), build


@intrinsic
def invoke(context: Any, function: Any, first: Any, second: Any) -> Any:
    """Call the C function at an address with two addresses; one that takes a single argument ignores the second."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [INT64, INT64])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return codegen.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), build


@intrinsic
def pause(context: Any) -> Any:
    """Tell the CPU that this is a loop that waits."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        name, numbers = PAUSES.get(platform.machine(), ("llvm.donothing", ()))
        values = [ir.Constant(ir.IntType(32), number) for number in numbers]
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)
        return codegen.get_dummy_value()

    return types.void(), build
