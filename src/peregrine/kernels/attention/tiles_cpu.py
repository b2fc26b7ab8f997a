"""The inner loops of attention on a CPU, in LLVM vector instructions: scores, their softmax, and sums of values.

How many query rows or keys a tile holds decides speed alone. Addresses and pitches count bytes; a slot list has one
slot per key.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from peregrine.kernels.runtime.cpu_jit import (
    FLOAT,
    INT32,
    INT64,
    broadcast,
    broadcast_lane,
    counted_loop,
    exponential,
    fused_multiply_add,
    load_vector,
    store_vector,
)

LANES = 8  # key indices are scored, weighed and summed in groups of so many
VECTOR = ir.VectorType(FLOAT, LANES)
NUMBERS = ir.VectorType(INT32, LANES)


def _float_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, FLOAT.as_pointer())


def _slot_addresses(builder: ir.IRBuilder, slots: ir.Value, count: int, base: ir.Value, pitch: ir.Value) -> Any:
    """Addresses of the keys or values that `count` consecutive entries of a slot list name."""
    first = builder.inttoptr(slots, INT64.as_pointer())
    entries = [builder.load(builder.gep(first, [INT64(i)])) for i in range(count)]
    return [builder.add(base, builder.mul(entry, pitch)) for entry in entries]


def _shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, lanes: range) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes)))


def _neighbours_added(builder: ir.IRBuilder, *vectors: ir.Value) -> ir.Value:
    """Sums of neighbouring lanes of one or two vectors, in order: a0 + a1, a2 + a3, ..., b0 + b1, ..."""
    width = len(vectors) * vectors[0].type.count
    even, odd = (_shuffle(builder, vectors[0], vectors[-1], range(first, width, 2)) for first in (0, 1))
    return builder.fadd(even, odd)


def _halves_added(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    half = vector.type.count // 2
    low, high = (_shuffle(builder, vector, vector, range(start, start + half)) for start in (0, half))
    return builder.fadd(low, high)


def score_tile(rows: int, keys: int) -> Any:
    """The intrinsic (q, q_pitch, slots, base, pitch, dim, scores, s_pitch): scores q . k of so many rows and keys.

    Lanes are added as ((0+4) + (1+5)) + ((2+6) + (3+7)), whatever the tile.
    """

    @intrinsic
    def tile(
        context: Any, q: Any, q_pitch: Any, slots: Any, base: Any, pitch: Any, dim: Any, scores: Any, s_pitch: Any
    ) -> Any:
        def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            q, q_pitch, slots, base, pitch, dim, scores, s_pitch = arguments
            queries = [_float_at(builder, builder.add(q, builder.mul(q_pitch, INT64(i)))) for i in range(rows)]
            sources = [_float_at(builder, x) for x in _slot_addresses(builder, slots, keys, base, pitch)]

            def add_lanes(sums: list[ir.Value], first: ir.Value, step: int) -> list[ir.Value]:
                own, key = (
                    [load_vector(builder, builder.gep(pointer, [first]), LANES) for pointer in pointers]
                    for pointers in (queries, sources)
                )
                pairs = [(a, b) for a in own for b in key]
                return [fused_multiply_add(builder, a, b, c) for (a, b), c in zip(pairs, sums, strict=True)]

            zero = ir.Constant(VECTOR, [0.0] * LANES)
            sums = counted_loop(builder, INT64(0), dim, LANES, [zero] * (rows * keys), add_lanes)
            for row in range(rows):
                target = builder.add(scores, builder.mul(s_pitch, INT64(row)))
                own = [_halves_added(builder, total) for total in sums[row * keys : (row + 1) * keys]]
                pairs = [_neighbours_added(builder, *own[i : i + 2]) for i in range(0, keys, 2)]
                for i in range(0, len(pairs), 2):
                    total = _neighbours_added(builder, *pairs[i : i + 2])
                    store_vector(builder, total, _float_at(builder, builder.add(target, INT64(8 * i))))
            return codegen.get_dummy_value()

        return types.void(*[types.int64] * 8), build

    return tile


def value_tile(rows: int, width: int) -> Any:
    """The intrinsic (weights, w_pitch, slots, base, pitch, keys, out, out_pitch): out += weights * values.

    It takes `width` columns of so many rows; each column adds its keys one after the other.
    """
    unroll = 4  # weights of a row that are loaded by one vector load

    @intrinsic
    def tile(
        context: Any, weights: Any, w_pitch: Any, slots: Any, base: Any, pitch: Any, keys: Any, out: Any, o_pitch: Any
    ) -> Any:
        def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            weights, w_pitch, slots, base, pitch, keys, out, o_pitch = arguments

            def rows_at(address: ir.Value, row_pitch: ir.Value) -> list[ir.Value]:
                return [_float_at(builder, builder.add(address, builder.mul(row_pitch, INT64(i)))) for i in range(rows)]

            factors, targets = rows_at(weights, w_pitch), rows_at(out, o_pitch)

            def add_keys(sums: list[ir.Value], first: ir.Value, step: int) -> list[ir.Value]:
                taken = [load_vector(builder, builder.gep(row, [first]), step) for row in factors]
                entries = builder.add(slots, builder.mul(first, INT64(8)))
                for lane, source in enumerate(_slot_addresses(builder, entries, step, base, pitch)):
                    value = load_vector(builder, _float_at(builder, source), width)
                    own = [broadcast_lane(builder, vector, lane, width) for vector in taken]
                    sums = [fused_multiply_add(builder, a, value, c) for a, c in zip(own, sums, strict=True)]
                return sums

            whole = builder.sub(keys, builder.srem(keys, INT64(unroll)))
            sums = [load_vector(builder, pointer, width) for pointer in targets]
            sums = counted_loop(builder, INT64(0), whole, unroll, sums, add_keys)
            sums = counted_loop(builder, whole, keys, 1, sums, add_keys)
            for pointer, total in zip(targets, sums, strict=True):
                store_vector(builder, total, pointer)
            return codegen.get_dummy_value()

        return types.void(*[types.int64] * 8), build

    return tile


def _constant(number: float) -> ir.Value:
    return ir.Constant(VECTOR, [number] * LANES)


def _visible(builder: ir.IRBuilder, first: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    """Which of the key indices first, first + 1, ... lie in [low, high)."""
    start, bottom, top = (broadcast(builder, builder.trunc(x, INT32), LANES) for x in (first, low, high))
    index = builder.add(start, ir.Constant(NUMBERS, list(range(LANES))))
    return builder.and_(builder.icmp_signed(">=", index, bottom), builder.icmp_signed("<", index, top))


def _over_groups(
    builder: ir.IRBuilder, low: ir.Value, high: ir.Value, carried: ir.Value, take: Callable[..., ir.Value]
) -> ir.Value:
    """Carry a vector through the groups that touch [low, high); only groups at the edges get a mask."""
    down = INT64(-LANES)
    begin = builder.and_(low, down)
    inner_begin = builder.and_(builder.add(low, INT64(LANES - 1)), down)
    inner_end = builder.and_(high, down)
    is_empty = builder.icmp_signed("<", inner_end, inner_begin)
    inner_end = builder.select(is_empty, inner_begin, inner_end)

    def masked(values: list[ir.Value], first: ir.Value, step: int) -> list[ir.Value]:
        return [take(values[0], first, _visible(builder, first, low, high))]

    def whole(values: list[ir.Value], first: ir.Value, step: int) -> list[ir.Value]:
        return [take(values[0], first, None)]

    values = counted_loop(builder, begin, inner_begin, LANES, [carried], masked)
    values = counted_loop(builder, inner_begin, inner_end, LANES, values, whole)
    return counted_loop(builder, inner_end, high, LANES, values, masked)[0]


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger of two per lane; if one is NaN, the other."""
    name = f"llvm.maxnum.v{LANES}f32"
    kind = ir.FunctionType(VECTOR, [VECTOR, VECTOR])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, [a, b])


def _highest(context: Any, scores: Any, low: Any, high: Any, floor: Any) -> Any:
    """(scores, low, high, floor) -> the largest of `floor` and the scores at [low, high), ignoring NaN."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        scores, low, high, floor = arguments
        pointer, bottom = _float_at(builder, scores), broadcast(builder, floor, LANES)

        def take(largest: ir.Value, first: ir.Value, seen: ir.Value | None) -> ir.Value:
            own = load_vector(builder, builder.gep(pointer, [first]), LANES)
            own = own if seen is None else builder.select(seen, own, bottom)
            return _larger(builder, largest, own)

        largest = _over_groups(builder, low, high, bottom, take)
        for distance in (4, 2, 1):
            largest = _larger(builder, largest, _shuffle(builder, largest, largest, range(distance, distance + LANES)))
        return builder.extract_element(largest, INT32(0))

    return types.float32(types.int64, types.int64, types.int64, types.float32), build


def _weigh(context: Any, scores: Any, low: Any, high: Any, m: Any) -> Any:
    """(scores, low, high, m) -> the sum of exp(score - m) at [low, high); each weight replaces its score."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        scores, low, high, m = arguments
        pointer, m_lanes = _float_at(builder, scores), broadcast(builder, m, LANES)

        def take(total: ir.Value, first: ir.Value, seen: ir.Value | None) -> ir.Value:
            place = builder.gep(pointer, [first])
            weight = exponential(builder, builder.fsub(load_vector(builder, place, LANES), m_lanes))
            weight = weight if seen is None else builder.select(seen, weight, _constant(0.0))
            store_vector(builder, weight, place)
            return builder.fadd(total, weight)

        halves = _halves_added(builder, _over_groups(builder, low, high, _constant(0.0), take))
        pairs = _neighbours_added(builder, halves)
        return builder.fadd(builder.extract_element(pairs, INT32(0)), builder.extract_element(pairs, INT32(1)))

    return types.float32(types.int64, types.int64, types.int64, types.float32), build


highest: Any = intrinsic(_highest)
weigh: Any = intrinsic(_weigh)
