"""What compiled CPU kernels are written with: a decorator, a claim counter, raw memory, vector instructions.

Imports numba: only `cpu.py` files of kernel folders may import this one.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from peregrine.kernels.runtime.cpu import CpuKernel
from peregrine.kernels.runtime.cpu_cache import compile_cached
from peregrine.kernels.runtime.cpu_team import CpuTeam

TEAM = CpuTeam()
MAX_WORDS = 32
INT32, INT64 = ir.IntType(32), ir.IntType(64)
FLOAT, BFLOAT16 = ir.FloatType(), ir.IntType(16)  # a bfloat16 is the upper half of a float
ROUND = 12582912.0  # 1.5 * 2**23: added to a float, it leaves the nearest integer in the low bits
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.428606765330187045e-06
EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)

Body = Callable[[Any], None]


def cpu_kernel(layout: str) -> Callable[[Body], CpuKernel]:
    """Compile `body(block)`, or load it from the cache, as a kernel whose arguments follow `layout`.

    A body claims pieces until none is left:

        words = words_of(block)
        piece = claim(words)
        while piece < words[1]:
            ...
            piece = claim(words)
    """

    def compile_body(body: Body) -> CpuKernel:
        signature = types.void(types.voidptr)
        compiled = compile_cached(body, signature, error_model="numpy", boundscheck=False)
        return CpuKernel(compiled, layout, TEAM)

    return compile_body


@intrinsic
def _pointer(context: Any, address: Any) -> Any:
    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), build


@intrinsic
def _add_one(context: Any, address: Any) -> Any:
    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(INT64, 1), "monotonic")

    return types.int64(types.int64), build


@njit
def words_of(block):  # type: ignore[no-untyped-def]
    """The block as integers and addresses: [0] claim counter, [1] number of pieces, [2...] the arguments."""
    return carray(block, MAX_WORDS, types.int64)


@njit
def reals_of(block):  # type: ignore[no-untyped-def]
    """The block as floats, for the arguments whose layout is "d"."""
    return carray(block, MAX_WORDS, types.float64)


@intrinsic(prefer_literal=True)
def arguments_of(context: Any, block: Any, count: Any) -> Any:
    """(block, count) -> the first `count` arguments as integers, to be unpacked into names; `count` is a literal."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        words = builder.bitcast(arguments[0], INT64.as_pointer())
        places = range(2, 2 + count.literal_value)  # after the claim counter and the number of pieces
        values = [builder.load(builder.gep(words, [INT64(place)])) for place in places]
        return codegen.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(types.int64, count.literal_value)(block, count), build


@njit
def claim(words):  # type: ignore[no-untyped-def]
    """The next piece that no thread has taken; the body is done when it is not below words[1]."""
    return _add_one(words[0])


@njit
def floats_at(address, shape):  # type: ignore[no-untyped-def]
    """The float32 array of this shape that starts at an address."""
    return carray(_pointer(address), shape, types.float32)


@njit
def doubles_at(address, shape):  # type: ignore[no-untyped-def]
    """The float64 array of this shape that starts at an address."""
    return carray(_pointer(address), shape, types.float64)


@njit
def bytes_at(address, count):  # type: ignore[no-untyped-def]
    """Memory as an array of bytes."""
    return carray(_pointer(address), count, types.uint8)


@njit
def longs_at(address, shape):  # type: ignore[no-untyped-def]
    """The int64 array of this shape that starts at an address."""
    return carray(_pointer(address), shape, types.int64)


def has_avx512() -> bool:
    """Whether code that LLVM compiles for this machine has the vector registers of AVX-512."""
    try:
        return bool(get_host_cpu_features().get("avx512f"))
    except RuntimeError:  # LLVM does not know this machine's features
        return False


def load_vector(builder: ir.IRBuilder, pointer: ir.Value, width: int) -> ir.Value:
    """`width` floats from a float pointer of any alignment."""
    vector = builder.load(builder.bitcast(pointer, ir.VectorType(FLOAT, width).as_pointer()))
    vector.align = 4
    return vector


def load_widened(builder: ir.IRBuilder, pointer: ir.Value, width: int) -> ir.Value:
    """`width` floats from a pointer to floats or to bfloat16, of any alignment."""
    if pointer.type.pointee == FLOAT:
        return load_vector(builder, pointer, width)
    short = builder.load(builder.bitcast(pointer, ir.VectorType(BFLOAT16, width).as_pointer()))
    short.align = 2
    numbers = ir.VectorType(ir.IntType(32), width)
    upper = builder.shl(builder.zext(short, numbers), ir.Constant(numbers, [16] * width))
    return builder.bitcast(upper, ir.VectorType(FLOAT, width))


def store_vector(builder: ir.IRBuilder, vector: ir.Value, pointer: ir.Value) -> None:
    """Write a vector of floats to a float pointer of any alignment."""
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer())).align = 4


def broadcast_lane(builder: ir.IRBuilder, vector: ir.Value, lane: int, width: int) -> ir.Value:
    """A vector of `width` copies of one lane."""
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), width), [lane] * width)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), lanes)


def broadcast(builder: ir.IRBuilder, value: ir.Value, width: int) -> ir.Value:
    """A vector of `width` copies of a number."""
    one = ir.Constant(ir.VectorType(value.type, 1), ir.Undefined)
    return broadcast_lane(builder, builder.insert_element(one, value, INT32(0)), 0, width)


def fused_multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c per lane, rounded once."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32")
    return builder.call(function, [a, b, c])


Step = Callable[[list[ir.Value], ir.Value, int], list[ir.Value]]


def counted_loop(
    builder: ir.IRBuilder, start: ir.Value, end: ir.Value, step: int, carried: list[ir.Value], body: Step
) -> list[ir.Value]:
    """Carry values through `body(values, index, step)` for index = start, start + step, ... below end."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(INT64)
    values = [builder.phi(value.type) for value in carried]
    builder.cbranch(builder.icmp_signed("<", index, end), inside, after)
    builder.position_at_end(inside)
    results = [*body(values, index, step), builder.add(index, INT64(step))]
    for value, first, result in zip([*values, index], [*carried, start], results, strict=True):
        value.add_incoming(first, before)
        value.add_incoming(result, builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def exponential(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e**x per lane for x <= 0, good to about one unit in the last place; 0 below -87, NaN stays NaN."""
    width = x.type.count
    numbers = ir.VectorType(ir.IntType(32), width)

    def constant(number: float) -> ir.Value:
        return ir.Constant(x.type, [number] * width)

    # e**x = 2**n * e**r with |r| <= ln(2) / 2: ROUND leaves n in the low bits, Cephes' polynomial gives e**r.
    shifted = fused_multiply_add(builder, x, constant(1.44269504088896341), constant(ROUND))
    whole = builder.fsub(shifted, constant(ROUND))
    rest = fused_multiply_add(builder, whole, constant(-LN2_HIGH), x)
    rest = fused_multiply_add(builder, whole, constant(-LN2_LOW), rest)
    series = constant(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        series = fused_multiply_add(builder, series, rest, constant(term))
    series = fused_multiply_add(builder, series, builder.fmul(rest, rest), rest)
    exponent = builder.shl(builder.bitcast(shifted, numbers), ir.Constant(numbers, [23] * width))
    power = builder.bitcast(builder.add(exponent, ir.Constant(numbers, [127 << 23] * width)), x.type)
    result = builder.fmul(builder.fadd(series, constant(1.0)), power)
    return builder.select(builder.fcmp_ordered("<", x, constant(-87.0)), constant(0.0), result)
