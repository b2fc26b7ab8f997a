"""Compiled attention over paged keys and values: float32 on the CPU, dense and MLA, one kernel for every window.

As in `reference.py`, a query reads its keys in order, by index. All heads of a KV head and all queries of
a row share what they read. Scores of all keys come first, then the softmax, then values: nothing is rescaled, and each
result is a chain of operations that depends on the query and its keys alone. Only keys that some query of a piece sees
are scored, and only values that a query sees are added to it.

The inner loops are written in LLVM vector instructions. How many query rows or keys a tile holds decides speed alone.
Their addresses and pitches count bytes; a slot list has one slot per key.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from peregrine.config import MAX_NODES
from peregrine.kernels.attention.plan import dense_heads
from peregrine.kernels.runtime.cpu_jit import (
    FLOAT,
    INT64,
    broadcast_lane,
    claim,
    counted_loop,
    cpu_kernel,
    exponential,
    floats_at,
    fused_multiply_add,
    load_vector,
    longs_at,
    reals_of,
    store_vector,
    words_of,
)

LANES = 8  # key indices are scored, weighed and summed in groups of so many
BLOCK = 64  # keys that all query rows of a piece read before the next ones, to find them in the cache
MAX_PIECE_ROWS = 24  # query rows (query tokens x heads of one KV head) that one thread works on together
SERIAL_WORK = 1 << 15  # multiply-adds below which a second thread costs more than it saves
INT32 = ir.IntType(32)
VECTOR = ir.VectorType(FLOAT, LANES)
NUMBERS = ir.VectorType(INT32, LANES)

# Per query row: first key index it sees, where the row's keys end, where all keys end, address of its own keys' slots.
LOW, SHARED, LIMIT, OWN = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """Which keys the queries of one forward see, shared by all layers; addresses point into the tensors of `held`."""

    num_rows: int
    num_tokens: int
    max_q_len: int
    width: int  # C, key indices per row: a multiple of LANES
    key_slots: int  # [R, C] i64 slot of each row's key at each index
    shared: int  # [N] i64 keys below this index are the row's; from here on they are the query's own
    limits: int  # [N] i64 the query sees key indices below this
    own_slots: int  # [N, MAX_NODES] i64 slots of the query's own keys: its tree ancestors
    q_starts: int  # [R + 1] i64
    positions: int  # [N] i64
    held: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class CpuKV:
    """Addresses of one layer's keys and values [slots, Hkv, D]; the same address if keys hold their values (MLA)."""

    keys: int
    values: int
    num_heads: int
    value_dim: int
    value_stride: int  # entries from one slot's values to the next slot's

    @property
    def is_shared(self) -> bool:
        return self.keys == self.values


def plan_cpu(
    positions: Tensor,
    q_starts: Tensor,
    past_lens: Tensor,
    max_q_len: int,
    page_table: Tensor,
    page_size: int,
    ancestors: Tensor | None,
) -> CpuPlan:
    """Find the slots of all keys and ancestors, once for all layers. Shapes are those of AttentionMetadata."""
    num_rows, num_pages = page_table.shape
    num_tokens = positions.shape[0]
    num_keys = num_pages * page_size
    width = num_keys + -num_keys % LANES
    num_own = 0 if ancestors is None else num_tokens * MAX_NODES
    buffer = torch.empty(num_rows * width + 2 * num_tokens + num_own, dtype=torch.int64)
    inputs = [positions, q_starts, past_lens, page_table, *([] if ancestors is None else [ancestors])]
    inputs = [x if x.dtype == torch.int64 and x.is_contiguous() else x.long().contiguous() for x in inputs]
    addresses = [x.data_ptr() for x in inputs]
    key_slots = buffer.data_ptr()
    shared = key_slots + num_rows * width * 8
    plan = CpuPlan(
        num_rows=num_rows,
        num_tokens=num_tokens,
        max_q_len=max_q_len,
        width=width,
        key_slots=key_slots,
        shared=shared,
        limits=shared + num_tokens * 8,
        own_slots=shared + 2 * num_tokens * 8,
        q_starts=addresses[1],
        positions=addresses[0],
        held=(buffer, *inputs),
    )
    outputs = (plan.key_slots, plan.shared, plan.limits, plan.own_slots)
    words = 0 if ancestors is None else addresses[4]
    _plan(1, *addresses[:4], *outputs, words, num_rows, num_pages, page_size, width, num_tokens)
    return plan


def write_cpu(kv: CpuKV, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """k and v [M, Hkv, D] go to slots [M] of one layer. Where keys hold their values, v is not read."""
    k, v = dense_heads(k), k if kv.is_shared else dense_heads(v)
    count, heads, head_dim = k.shape
    if count != slots.shape[0]:
        raise ValueError(f"k has {count} tokens, but slots has {slots.shape[0]}")
    pointers = kv.keys, 0 if kv.is_shared else kv.values, slots.data_ptr(), k.data_ptr(), v.data_ptr()
    _write(1, *pointers, count, heads * head_dim, k.stride(0), v.stride(0))


def paged_attention_cpu(
    q: Tensor, kv: CpuKV, plan: CpuPlan, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """Attention of q [N, Hq, D] over stored keys and values. -> [N, Hq, Dv]"""
    q = dense_heads(q)
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens != plan.num_tokens:
        raise ValueError(f"q has {num_tokens} tokens, but the window was planned for {plan.num_tokens}")
    group = num_heads // kv.num_heads
    out = torch.empty((num_tokens, num_heads, kv.value_dim), dtype=torch.float32)
    rows, jobs = plan.max_q_len * group, plan.num_rows * kv.num_heads
    chunks = -(-rows // MAX_PIECE_ROWS)
    if rows * jobs * plan.width * head_dim > SERIAL_WORK:
        threads = torch.get_num_threads()
        rounds = -(-jobs * chunks // threads)
        chunks = min(rows, -(-rounds * threads // jobs))  # every thread gets the same number of pieces
    piece_rows = -(-rows // chunks)
    chunks = -(-rows // piece_rows)
    sinks = None if sinks is None else sinks.float().contiguous()
    _attend(
        jobs * chunks,
        *(q.data_ptr(), out.data_ptr(), kv.keys, kv.values, 0 if sinks is None else sinks.data_ptr()),
        *(plan.key_slots, plan.q_starts, plan.positions, plan.shared, plan.limits, plan.own_slots),
        *(q.stride(0), kv.num_heads, group, head_dim, kv.value_dim, kv.value_stride, plan.width),
        *(piece_rows, chunks, 0 if window is None else window, scale),
    )
    return out


@cpu_kernel("qqqqqqqqqqqqqq")
def _plan(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    num_rows, num_pages, page_size, width, num_tokens = words[11], words[12], words[13], words[14], words[15]
    positions, q_starts = longs_at(words[2], num_tokens), longs_at(words[3], num_rows + 1)
    past_lens, table = longs_at(words[4], num_rows), longs_at(words[5], (num_rows, num_pages))
    key_slots, shared = longs_at(words[6], (num_rows, width)), longs_at(words[7], num_tokens)
    limits, own_slots = longs_at(words[8], num_tokens), longs_at(words[9], (num_tokens, MAX_NODES))
    is_tree, ancestors = words[10] != 0, longs_at(words[10], num_tokens)
    num_keys = num_pages * page_size  # nothing is read past the table, whatever positions and lengths say
    for r in range(num_rows):
        needed = 0
        for n in range(q_starts[r], q_starts[r + 1]):
            shared[n] = limits[n] = min(past_lens[r] if is_tree else positions[n] + 1, num_keys)
            needed = max(needed, shared[n])
            if is_tree:
                own_slots[n] = 0
                count = 0
                for bit in range(MAX_NODES):
                    if (ancestors[n] >> bit) & 1:
                        key = min(past_lens[r] + bit, num_keys - 1)
                        own_slots[n, count] = table[r, key // page_size] * page_size + key % page_size
                        count += 1
                limits[n] += count
        for s in range(needed):
            key_slots[r, s] = table[r, s // page_size] * page_size + s % page_size
        # The last group of keys is scored whole: past the end it reads the scratch slot, and the scores are dropped.
        key_slots[r, needed : min(width, needed + LANES)] = 0


@cpu_kernel("qqqqqqqqq")
def _write(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    count, width, k_stride, v_stride = words[7], words[8], words[9], words[10]
    slots = longs_at(words[4], count)
    for i in range(count):
        offset = slots[i] * width * 4
        k, key = floats_at(words[5] + i * k_stride * 4, width), floats_at(words[2] + offset, width)
        for d in range(width):
            key[d] = k[d]
        if words[3] != 0:
            v, value = floats_at(words[6] + i * v_stride * 4, width), floats_at(words[3] + offset, width)
            for d in range(width):
                value[d] = v[d]


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


def _splat(builder: ir.IRBuilder, scalar: ir.Value, vector_type: ir.VectorType) -> ir.Value:
    single = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, INT32(0))
    lanes = ir.Constant(ir.VectorType(INT32, vector_type.count), [0] * vector_type.count)
    return builder.shuffle_vector(single, ir.Constant(vector_type, ir.Undefined), lanes)


def _constant(number: float) -> ir.Value:
    return ir.Constant(VECTOR, [number] * LANES)


def _visible(builder: ir.IRBuilder, first: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    """Which of the key indices first, first + 1, ... lie in [low, high)."""
    start, bottom, top = (_splat(builder, builder.trunc(x, INT32), NUMBERS) for x in (first, low, high))
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
        pointer, bottom = _float_at(builder, scores), _splat(builder, floor, VECTOR)

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
        pointer, m_lanes = _float_at(builder, scores), _splat(builder, m, VECTOR)

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


# Heights of one to three query rows; the widths fill 32 vector registers of four floats, or 16 of eight.
_scores1, _scores2, _scores3 = score_tile(1, 8), score_tile(2, 4), score_tile(3, 4)
_values1, _values2, _values3 = value_tile(1, 64), value_tile(2, 32), value_tile(3, 16)
_edge1, _edge2, _edge3 = value_tile(1, LANES), value_tile(2, LANES), value_tile(3, LANES)


@njit
def _tile_height(left):  # type: ignore[no-untyped-def]
    """How many of the rows that are left form the next tile: threes, but two and two for four."""
    return left if left < 4 else 2 if left == 4 else 3


@njit
def _score(rows, q, dim, slots, base, pitch, count, scores, scores_pitch):  # type: ignore[no-untyped-def]
    """Scores of one to three query rows and `count` keys, rounded up to whole groups."""
    row = dim * 4
    for first in range(0, count, LANES):
        entry, out = slots + first * 8, scores + first * 4
        if rows == 3:
            _scores3(q, row, entry, base, pitch, dim, out, scores_pitch)
            _scores3(q, row, entry + 32, base, pitch, dim, out + 16, scores_pitch)
        elif rows == 2:
            _scores2(q, row, entry, base, pitch, dim, out, scores_pitch)
            _scores2(q, row, entry + 32, base, pitch, dim, out + 16, scores_pitch)
        else:
            _scores1(q, row, entry, base, pitch, dim, out, scores_pitch)


@njit
def _add_values(rows, weights, weights_pitch, slots, base, pitch, count, out, dim):  # type: ignore[no-untyped-def]
    """Add `count` keys' values, by weight, to one to three rows of outputs."""
    row = dim * 4
    step = 16 if rows == 3 else 32 if rows == 2 else 64
    wide = dim - dim % step
    for column in range(0, wide, step):
        source, target = base + column * 4, out + column * 4
        if rows == 3:
            _values3(weights, weights_pitch, slots, source, pitch, count, target, row)
        elif rows == 2:
            _values2(weights, weights_pitch, slots, source, pitch, count, target, row)
        else:
            _values1(weights, weights_pitch, slots, source, pitch, count, target, row)
    for column in range(wide, dim, LANES):
        source, target = base + column * 4, out + column * 4
        if rows == 3:
            _edge3(weights, weights_pitch, slots, source, pitch, count, target, row)
        elif rows == 2:
            _edge2(weights, weights_pitch, slots, source, pitch, count, target, row)
        else:
            _edge1(weights, weights_pitch, slots, source, pitch, count, target, row)


@njit
def _add_seen_values(tile, marks, begin, end, weights, weights_pitch, slots, base, pitch, out, dim):  # type: ignore[no-untyped-def]
    """Add the values at key indices [begin, end) to a tile's rows, each row those it sees, in key order."""
    first, stop = tile
    lows, ends = marks[LOW], marks[SHARED]
    low, high = begin, end  # the keys that all of the tile's rows see
    for i in range(first, stop):
        low, high = max(low, lows[i]), min(high, ends[i])
    high = max(high, low)
    for i in range(first, stop):
        a, b = max(begin, lows[i]), min(low, end, ends[i])
        if a < b:
            own = weights + i * weights_pitch + a * 4
            _add_values(1, own, 0, slots + a * 8, base, pitch, b - a, out + i * dim * 4, dim)
    if low < high:
        own = weights + first * weights_pitch + low * 4
        target = out + first * dim * 4
        _add_values(stop - first, own, weights_pitch, slots + low * 8, base, pitch, high - low, target, dim)
    for i in range(first, stop):
        a, b = max(high, lows[i]), min(end, ends[i])
        if a < b:
            own = weights + i * weights_pitch + a * 4
            _add_values(1, own, 0, slots + a * 8, base, pitch, b - a, out + i * dim * 4, dim)


@njit
def _attend_rows(  # type: ignore[no-untyped-def]
    q, rows, marks, sinks, slots, keys, pitch, dim, values, value_pitch, value_dim, out
):
    """Query rows [rows, dim] over one KV head: out [rows, value_dim] becomes acc, sinks [rows] become 1 / l."""
    begin, end, longest = marks[LOW, :rows].min(), marks[SHARED, :rows].max(), marks[LIMIT, :rows].max()
    begin -= begin % LANES
    row = dim * 4
    scores_pitch = (longest + 2 * LANES) * 4
    buffer = np.empty(rows * (longest + 2 * LANES), np.float32)
    scores = buffer.ctypes.data
    for block in range(begin, end, BLOCK):
        first = 0
        while first < rows:
            height = _tile_height(rows - first)
            count = min(BLOCK, marks[SHARED, first : first + height].max() - block)
            target = scores + first * scores_pitch + block * 4
            _score(height, q + first * row, dim, slots + block * 8, keys, pitch, count, target, scores_pitch)
            first += height
    for i in range(rows):
        own, low, shared, limit = scores + i * scores_pitch, marks[LOW, i], marks[SHARED, i], marks[LIMIT, i]
        if limit > shared:
            _score(1, q + i * row, dim, marks[OWN, i], keys, pitch, limit - shared, own + shared * 4, 0)
        m = highest(own, low, limit, sinks[i])
        total = weigh(own, low, limit, m)
        if sinks[i] > -np.inf:
            total += np.float32(math.exp(sinks[i] - m))
        sinks[i] = np.float32(1.0) / total
    for block in range(begin, end, BLOCK):
        first = 0
        while first < rows:
            tile = (first, first + _tile_height(rows - first))
            stop = min(end, block + BLOCK)
            _add_seen_values(
                *(tile, marks, block, stop, scores, scores_pitch, slots, values, value_pitch, out, value_dim)
            )
            first = tile[1]
    for i in range(rows):
        shared, limit = marks[SHARED, i], marks[LIMIT, i]
        if limit > shared:
            own = scores + i * scores_pitch + shared * 4
            target = out + i * value_dim * 4
            _add_values(1, own, 0, marks[OWN, i], values, value_pitch, limit - shared, target, value_dim)
    buffer[0] = 0.0  # numba frees an array after its last use, and does not know that of its address


@cpu_kernel("qqqqqqqqqqqqqqqqqqqqqd")
def _attend(block):  # type: ignore[no-untyped-def]
    words, scale = words_of(block), np.float32(reals_of(block)[23])
    q, out, keys, values, sinks, key_slots = words[2], words[3], words[4], words[5], words[6], words[7]
    q_stride, num_kv_heads, group, dim = words[13], words[14], words[15], words[16]
    value_dim, value_stride, width = words[17], words[18], words[19]
    piece_rows, chunks, window = words[20], words[21], words[22]
    padded = value_dim + -value_dim % LANES  # a value that ends inside a vector is followed by the rest of its key
    num_rows = words[1] // (chunks * num_kv_heads)
    q_starts = longs_at(words[8], num_rows + 1)
    num_tokens = q_starts[num_rows]
    positions, shared = longs_at(words[9], num_tokens), longs_at(words[10], num_tokens)
    limits = longs_at(words[11], num_tokens)
    marks, row_sinks = np.empty((4, piece_rows), np.int64), np.empty(piece_rows, np.float32)
    packed, acc = np.empty((piece_rows, dim), np.float32), np.empty((piece_rows, padded), np.float32)
    piece = claim(words)
    while piece < words[1]:
        # Later queries see more keys: they go first, so that no thread starts the longest piece last.
        job, first = piece // chunks, (chunks - 1 - piece % chunks) * piece_rows
        r, kv_head = job // num_kv_heads, job % num_kv_heads
        rows = min(piece_rows, (q_starts[r + 1] - q_starts[r]) * group - first)
        for i in range(rows):
            n, head = q_starts[r] + (first + i) // group, kv_head * group + (first + i) % group
            marks[LOW, i] = 0 if window == 0 else max(0, min(positions[n] - window + 1, shared[n]))
            marks[SHARED, i], marks[LIMIT, i] = shared[n], limits[n]
            marks[OWN, i] = words[12] + n * MAX_NODES * 8
            row_sinks[i] = -np.inf if sinks == 0 else floats_at(sinks, num_kv_heads * group)[head]
            source = floats_at(q + (n * q_stride + head * dim) * 4, dim)
            for d in range(dim):
                packed[i, d] = source[d] * scale
            acc[i] = 0.0
        if rows > 0:
            slots, target = key_slots + r * width * 8, acc.ctypes.data
            own_keys, own_values = keys + kv_head * dim * 4, values + kv_head * value_dim * 4
            _attend_rows(
                *(packed.ctypes.data, rows, marks, row_sinks, slots, own_keys, num_kv_heads * dim * 4, dim),
                *(own_values, value_stride * 4, padded, target),
            )
        for i in range(rows):
            n, head = q_starts[r] + (first + i) // group, kv_head * group + (first + i) % group
            result = floats_at(out + (n * num_kv_heads * group + head) * value_dim * 4, value_dim)
            for d in range(value_dim):
                result[d] = acc[i, d] * row_sinks[i]
        piece = claim(words)
