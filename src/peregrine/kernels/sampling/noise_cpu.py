"""The noise of tokens compiled for the CPU: the bits of `noise.py`, a vector logarithm, and a bound that needs none.

Whole rows and single tokens take the same operations in the same order, so a token's noise has the same bits in both.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from peregrine.kernels.runtime.cpu_jit import (
    FLOAT,
    INT32,
    INT64,
    LN2_HIGH,
    LN2_LOW,
    broadcast,
    counted_loop,
    fused_multiply_add,
    load_vector,
    longs_at,
    store_vector,
)
from peregrine.kernels.sampling import noise

LANES = 16  # of the vectors that a vocabulary is passed over in
WORD = (1 << 64) - 1
GOLDEN = np.uint64(noise.GOLDEN & WORD)
FIRST, SECOND = (np.uint64(multiplier & WORD) for multiplier in noise.MULTIPLIERS)
SHIFTS = tuple(np.uint64(shift) for shift in (30, 27, 31, 32))
HALF = np.float32(0.5)
MOST_NOISE = np.float32(22.9)  # no token has more
SQRT_HALF = 0x3F3504F3  # the float32 bits of sqrt(1/2)
# Cephes' logf: ln(1 + f) = f - f**2 / 2 + f**3 * series(f) for 1 + f in [sqrt(1/2), sqrt(2))
LOG_TERMS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
# A float's bits, read as an integer n, say that its binary logarithm is at least n / 2**23 - 127, and less
# than a tenth above that. Noise is at most -ln(v), v = x / 2**32. The last term covers all rounding.
BOUND_START = np.float32((32 + 127) * np.log(2) + 1e-4)
BOUND_SLOPE = np.float32(np.log(2) * 2.0**-23)


@njit
def _spread(word):  # type: ignore[no-untyped-def]
    word = (word ^ (word >> SHIFTS[0])) * FIRST
    return (word ^ (word >> SHIFTS[1])) * SECOND


@njit
def _hash(word):  # type: ignore[no-untyped-def]
    return np.float32(np.int64(_spread(word) >> SHIFTS[3])) + HALF


@njit
def key_of(seed, position):  # type: ignore[no-untyped-def]
    """The key of a position: (i64, i64) -> u64."""
    word = _spread(np.uint64(seed) + np.uint64(position) * GOLDEN)
    return word ^ (word >> SHIFTS[2])


@njit
def hash_tokens(key, ids, first, hashes, count):  # type: ignore[no-untyped-def]
    """The random bits of `count` tokens, plus one half, as floats: the larger, the less noise.

    The tokens are those from place `first` on of the ids at an address, or without ids (0) `first`, `first` + 1, ...
    """
    if ids:
        named = longs_at(ids + first * 8, count)
        for i in range(count):
            hashes[i] = _hash(key + np.uint64(named[i]) * GOLDEN)
    else:
        key += np.uint64(first) * GOLDEN
        for i in range(count):
            hashes[i] = _hash(key + np.uint64(i) * GOLDEN)


@njit
def noise_bound(hashed):  # type: ignore[no-untyped-def]
    """No less than the noise of this hash, by 0.06 at most where the noise is large, without a logarithm."""
    return BOUND_START - BOUND_SLOPE * np.float32(np.float32(hashed).view(np.int32))


@intrinsic
def noise_of(context: Any, hashed: Any) -> Any:
    """The noise of a hash."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        vector = _gumbel(builder, broadcast(builder, arguments[0], 1))
        return builder.extract_element(vector, INT32(0))

    return types.float32(types.float32), build


@intrinsic
def add_noise(context: Any, scores: Any, divisor: Any, hashes: Any, width: Any) -> Any:
    """(scores, divisor, hashes, width): hashes become scores / divisor + their noise; addresses in bytes."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        scores, hashes = (builder.inttoptr(arguments[i], FLOAT.as_pointer()) for i in (0, 2))
        divisor, width = arguments[1], arguments[3]

        def take(carried: list[ir.Value], first: ir.Value, step: int) -> list[ir.Value]:
            divisors = broadcast(builder, divisor, step)
            place = builder.gep(hashes, [first])
            scaled = builder.fdiv(load_vector(builder, builder.gep(scores, [first]), step), divisors)
            gumbel = _gumbel(builder, load_vector(builder, place, step))
            store_vector(builder, builder.fadd(scaled, gumbel), place)
            return []

        whole = builder.sub(width, builder.srem(width, INT64(LANES)))
        counted_loop(builder, INT64(0), whole, LANES, [], take)
        counted_loop(builder, whole, width, 1, [], take)
        return codegen.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), build


def _gumbel(builder: ir.IRBuilder, hashed: ir.Value) -> ir.Value:
    """-log(-log(1 - v)) per lane, v = hashed / 2**32 but below 1."""
    one, unit, largest = (
        ir.Constant(hashed.type, [number] * hashed.type.count) for number in (1.0, 2.0**-32, noise.LARGEST)
    )
    v = builder.fmul(hashed, unit)
    v = builder.select(builder.fcmp_ordered("<", v, largest), v, largest)
    left = builder.fsub(one, v)
    # Kahan: the rounding of 1 - v cancels in log(1 - v) / ((1 - v) - 1).
    ratio = builder.fdiv(logarithm(builder, left), builder.fsub(left, one))
    exponential = builder.select(builder.fcmp_ordered("==", left, one), v, builder.fmul(ratio, v))
    return builder.fneg(logarithm(builder, exponential))


def logarithm(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """ln(x) per lane for normal positive x, good to about one unit in the last place."""
    width = x.type.count
    numbers = ir.VectorType(INT32, width)

    def constant(number: float) -> ir.Value:
        return ir.Constant(x.type, [number] * width)

    def whole(number: int) -> ir.Value:
        return ir.Constant(numbers, [number] * width)

    # x = 2**n * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2))
    bits = builder.bitcast(x, numbers)
    power = builder.ashr(builder.sub(bits, whole(SQRT_HALF)), whole(23))
    mantissa = builder.bitcast(builder.sub(bits, builder.shl(power, whole(23))), x.type)
    n, f = builder.sitofp(power, x.type), builder.fsub(mantissa, constant(1.0))
    series = constant(LOG_TERMS[0])
    for term in LOG_TERMS[1:]:
        series = fused_multiply_add(builder, series, f, constant(term))
    square = builder.fmul(f, f)
    rest = fused_multiply_add(builder, n, constant(LN2_LOW), builder.fmul(builder.fmul(f, square), series))
    rest = fused_multiply_add(builder, square, constant(-0.5), rest)
    return fused_multiply_add(builder, n, constant(LN2_HIGH), builder.fadd(f, rest))
