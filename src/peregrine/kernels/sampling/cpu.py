"""Sampling compiled for the CPU: noise, filters, and the choice of a token in one call, one node per thread.

Noise: the bits of `noise.py`, a vector logarithm, and a bound that needs none. Whole rows and single tokens take the
same operations in the same order, so a token's noise has the same bits in both.

Filters: the lowest score that top-k, top-p and min-p keep is found by halving ranges instead of sorting. Counts and
masses are whole numbers, so no order of adding them can change the result.

Choice: only a token whose score plus the most noise its hash allows reaches the best sum so far has its noise
computed, and only a block of tokens with such a score is hashed at all. The choice is that of adding noise
everywhere: sums are compared as the same floats, and rounding keeps their order.
"""

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from peregrine.kernels.runtime.cpu import pieces_for
from peregrine.kernels.runtime.cpu_jit import (
    FLOAT,
    INT64,
    LN2_HIGH,
    LN2_LOW,
    broadcast_lane,
    bytes_at,
    claim,
    counted_loop,
    cpu_kernel,
    exponential,
    floats_at,
    fused_multiply_add,
    load_vector,
    longs_at,
    store_vector,
    words_of,
)
from peregrine.kernels.sampling import noise
from peregrine.kernels.sampling.params import COLDEST, MASS, Features, Masks, SamplingTensors

LANES = 16
BLOCK = 64  # tokens that are passed over together
SERIAL_WORK = 1 << 12  # scores below which a second thread costs more than it saves
ONE, SLACK = np.float32(1), np.float32(2.0**-20)
COLDEST_DIVISOR = np.float32(COLDEST)
LEAST, MOST = np.float32(-np.inf), np.float32(np.inf)
LOWEST = -float(np.finfo(np.float32).max)
SIGN, REST = np.int32(31), np.int32(0x7FFFFFFF)
FIRST_KEY, LAST_KEY = np.int32(-(1 << 31)), np.int32((1 << 31) - 1)
SCRATCH = 16  # bytes of working space per score: a weight and two floats
MAX_HALVINGS = 8  # between two gatherings of what is left
MAX_GATHERINGS = 256  # more than any range of floats takes: NaN cannot keep a search going
GATHER_SHIFT = 3  # gather what is left as soon as it is an eighth
INT32 = ir.IntType(32)
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
        vector = _gumbel(builder, _broadcast(builder, arguments[0], 1))
        return builder.extract_element(vector, INT32(0))

    return types.float32(types.float32), build


@intrinsic
def add_noise(context: Any, scores: Any, divisor: Any, hashes: Any, width: Any) -> Any:
    """(scores, divisor, hashes, width): hashes become scores / divisor + their noise; addresses in bytes."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        scores, hashes = (builder.inttoptr(arguments[i], FLOAT.as_pointer()) for i in (0, 2))
        divisor, width = arguments[1], arguments[3]

        def take(carried: list[ir.Value], first: ir.Value, step: int) -> list[ir.Value]:
            divisors = _broadcast(builder, divisor, step)
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


def _broadcast(builder: ir.IRBuilder, value: ir.Value, width: int) -> ir.Value:
    """A vector of `width` copies of a float."""
    one = ir.Constant(ir.VectorType(FLOAT, 1), ir.Undefined)
    return broadcast_lane(builder, builder.insert_element(one, value, INT32(0)), 0, width)


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


def lowest_kept(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    """The score a token needs to stay: [R, T, V] f32 on the CPU -> [R, T, 1]; -inf where all do."""
    scores = scores.contiguous()
    num_rows, num_nodes, width = scores.shape
    lowest = scores.new_empty(num_rows, num_nodes, 1)
    pieces = min(pieces_for(num_rows * num_nodes, scores.numel(), SERIAL_WORK), torch.get_num_threads())
    limits = limits_of(sampling)
    scratch = scratch_for(pieces, width)
    pointers = (tensor.data_ptr() for tensor in (scores, lowest, scratch, *limits))
    _lowest_kept(pieces, *pointers, num_rows, num_nodes, width)
    return lowest


def masses(scores: Tensor, best: Tensor) -> Tensor:
    """exp(score - best) in units of 1 / MASS, rounded down: [..., V], [..., 1] f32 on the CPU -> [..., V] i64."""
    scores, best = scores.contiguous(), best.contiguous()
    width = scores.shape[-1]
    found = torch.empty(scores.shape, dtype=torch.int64)
    pieces = pieces_for(best.numel(), scores.numel(), SERIAL_WORK)
    _masses(pieces, scores.data_ptr(), best.data_ptr(), found.data_ptr(), best.numel(), width)
    return found


def top_chances(scores: Tensor) -> Tensor:
    """The largest probability of each line of scores [n, V] f32 on the CPU: [n]."""
    scores = scores.contiguous()
    num_rows, width = scores.shape
    found = scores.new_empty(num_rows)
    pieces = pieces_for(num_rows, scores.numel(), SERIAL_WORK)
    _top_chances(pieces, scores.data_ptr(), found.data_ptr(), num_rows, width)
    return found


def ranked(scores: Tensor, ids: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """The ids [V] (None: places) of the largest of each line of scores [n, V] f32 on the CPU, and their shares."""
    scores, ids = scores.contiguous(), None if ids is None else ids.contiguous()
    num_rows, width = scores.shape
    tokens, shares = torch.empty(num_rows, count, dtype=torch.int64), scores.new_empty(num_rows, count)
    pieces = pieces_for(num_rows, scores.numel(), SERIAL_WORK)
    pointers = (x.data_ptr() for x in (scores, tokens, shares))
    _ranked(pieces, *pointers, 0 if ids is None else ids.data_ptr(), num_rows, width, count)
    return tokens, shares


def mask(scores: Tensor, masks: Masks) -> Tensor:
    """Scores [R, T, V] f32 on the CPU with illegal tokens at -inf, in rows that have masks."""
    scores, rows, words = scores.contiguous(), masks.rows.contiguous(), masks.words.contiguous()
    num_rows, num_nodes, width = scores.shape
    masked = torch.empty_like(scores)
    pieces = pieces_for(num_rows * num_nodes, scores.numel(), SERIAL_WORK)
    pointers = (tensor.data_ptr() for tensor in (scores, rows, words, masked))
    _mask_nodes(pieces, *pointers, num_rows * num_nodes, num_nodes, width)
    return masked


def limits_of(sampling: SamplingTensors) -> tuple[Tensor, Tensor, Tensor]:
    """top_k, top_p and the logarithm of min_p, dense: [R] each."""
    return sampling.top_k.contiguous(), sampling.top_p.contiguous(), sampling.log_min_p.contiguous()


def scratch_for(pieces: int, width: int) -> Tensor:
    """Working space for `lowest_of` in each piece: [pieces, SCRATCH * width] bytes."""
    return torch.empty(pieces, SCRATCH * width, dtype=torch.uint8)


@intrinsic
def _weigh(context: Any, scores: Any, best: Any, weights: Any, count: Any) -> Any:
    """(scores, best, weights, count): weights become masses (see filters.py); addresses in bytes."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        scores = builder.inttoptr(arguments[0], FLOAT.as_pointer())
        weights = builder.inttoptr(arguments[2], INT64.as_pointer())
        best, count = arguments[1], arguments[3]

        def take(carried: list[ir.Value], first: ir.Value, step: int) -> list[ir.Value]:
            bests = _broadcast(builder, best, step)
            below = builder.fsub(load_vector(builder, builder.gep(scores, [first]), step), bests)
            share = builder.fmul(exponential(builder, below), ir.Constant(below.type, [MASS] * step))
            # What is not a number weighs nothing: as an integer it could be anything.
            zero = ir.Constant(below.type, [0.0] * step)
            share = builder.select(builder.fcmp_ordered("ord", share, zero), share, zero)
            masses = builder.fptosi(share, ir.VectorType(INT64, step))
            place = builder.gep(weights, [first])
            builder.store(masses, builder.bitcast(place, masses.type.as_pointer())).align = 8
            return []

        whole = builder.sub(count, builder.srem(count, INT64(LANES)))
        counted_loop(builder, INT64(0), whole, LANES, [], take)
        counted_loop(builder, whole, count, 1, [], take)
        return codegen.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64, types.int64), build


@intrinsic
def _sum_of_shares(context: Any, scores: Any, best: Any, count: Any) -> Any:
    """(scores, best, count) -> the sum of exp(score - best) over so many scores at an address."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        scores = builder.inttoptr(arguments[0], FLOAT.as_pointer())
        best, count = arguments[1], arguments[2]

        def take(carried: list[ir.Value], first: ir.Value, step: int) -> list[ir.Value]:
            below = builder.fsub(
                load_vector(builder, builder.gep(scores, [first]), step), _broadcast(builder, best, step)
            )
            return [builder.fadd(carried[0], exponential(builder, below))]

        whole = builder.sub(count, builder.srem(count, INT64(LANES)))
        none = ir.Constant(ir.VectorType(FLOAT, LANES), [0.0] * LANES)
        sums = counted_loop(builder, INT64(0), whole, LANES, [none], take)[0]
        total = ir.Constant(FLOAT, 0.0)
        for lane in range(LANES):
            total = builder.fadd(total, builder.extract_element(sums, INT32(lane)))
        rest = counted_loop(builder, whole, count, 1, [_broadcast(builder, total, 1)], take)[0]
        return builder.extract_element(rest, INT32(0))

    return types.float32(types.int64, types.float32, types.int64), build


@njit
def key_of_float(value):  # type: ignore[no-untyped-def]
    """Integers in the order of the floats, whose maximum is vector code where that of floats is not."""
    bits = np.float32(value).view(np.int32)
    return np.int32(bits ^ np.int32(np.int32(bits >> SIGN) & REST))


@njit
def float_of_key(key):  # type: ignore[no-untyped-def]
    """The float of a key."""
    return np.int32(key ^ np.int32(np.int32(key >> SIGN) & REST)).view(np.float32)


@njit
def span(values, count):  # type: ignore[no-untyped-def]
    """The smallest and the largest of so many values."""
    low, high = LAST_KEY, FIRST_KEY
    for i in range(count):
        key = key_of_float(values[i])
        low, high = min(low, key), max(high, key)
    return float_of_key(low), float_of_key(high)


@njit
def _gather(values, spare, weights, count, low, ceiling):  # type: ignore[no-untyped-def]
    """Move the values in [low, ceiling) and their weights to the front of `spare` and `weights`; how many."""
    num = np.int64(0)
    for i in range(count):
        value, weight = values[i], weights[i]
        spare[num] = value
        weights[num] = weight
        num += np.int64(value >= low) & np.int64(value < ceiling)
    return num


@njit
def _num_from(values, count, low):  # type: ignore[no-untyped-def]
    """How many of the values are not below `low`."""
    num = np.int32(0)
    for i in range(count):
        num = np.int32(num + np.int32(values[i] >= low))
    return np.int64(num)


@njit
def _weight_from(values, weights, count, low):  # type: ignore[no-untyped-def]
    """The total weight of the values that are not below `low`."""
    weight = np.int64(0)
    for i in range(count):
        weight += weights[i] & -np.int64(values[i] >= low)
    return weight


@njit
def _select(values, spare, weights, weighed, count, wanted):  # type: ignore[no-untyped-def]
    """The largest v such that the weights of all values >= v sum to `wanted`, which they do for the least v.

    Unless `weighed`, each value weighs 1. Writes to `spare`, which may be the values themselves, and to the weights.
    """
    above = 0  # weight of what was dropped for being too large
    low = LEAST
    for _ in range(MAX_GATHERINGS):
        low, top = span(values, count)
        ceiling, num_low, num_high, weight_high = MOST, count, 0, 0
        for _ in range(MAX_HALVINGS):
            if low == top or num_low == 1:
                return top
            high = min(ceiling, top)
            mid = np.float32(0.5 * (max(np.float64(low), LOWEST) + np.float64(high)))
            if mid <= low:  # no float between them
                if ceiling < MOST:
                    return low
                mid = top
            elif mid >= ceiling:
                return low
            num = _num_from(values, count, mid)
            weight = _weight_from(values, weights, count, mid) if weighed else num
            if above + weight >= wanted:
                low, num_low = mid, num
            else:
                ceiling, num_high, weight_high = mid, num, weight
            if num_low - num_high <= count >> GATHER_SHIFT:
                break
        count = _gather(values, spare, weights, count, low, ceiling)
        values = spare
        above += weight_high
    return low


@njit
def lowest_of(source, divisor, best, top_k, top_p, log_min_p, room):  # type: ignore[no-untyped-def]
    """The lowest of scores / divisor that stays, given the best of them; -inf if that is not finite."""
    width = len(source)
    by_rank = 0 < top_k < width
    by_mass = top_p < 1
    if not LEAST < best < MOST:
        return LEAST
    lowest = best + log_min_p
    if not (by_rank or by_mass):
        return lowest
    weights, scaled_at, kept_at = longs_at(room, width), room + 8 * width, room + 12 * width
    scaled, kept, count = floats_at(scaled_at, width), floats_at(kept_at, width), width
    for i in range(width):
        scaled[i] = source[i] / divisor
    if by_rank:
        ranked = _select(scaled, kept, weights, False, width, top_k)
        lowest = max(lowest, ranked)
        if not by_mass:
            return lowest
        count = _gather(scaled, kept, weights, width, ranked, MOST)
    else:
        kept, kept_at = scaled, scaled_at
    _weigh(kept_at, best, room, count)
    total = weights[:count].sum()
    wanted = math.ceil(np.float64(total) * np.float64(top_p))
    return max(lowest, _select(kept, kept, weights, True, count, wanted))


@cpu_kernel("qqqqqqqqq")
def _lowest_kept(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces, scores, lowest, scratch = words[1], words[2], words[3], words[4]
    rows, nodes, width = words[8], words[9], words[10]
    top_k, top_p, log_min_p = longs_at(words[5], rows), floats_at(words[6], rows), floats_at(words[7], rows)
    found = floats_at(lowest, rows * nodes)
    piece = claim(words)
    while piece < pieces:
        room = scratch + piece * width * SCRATCH
        for place in range(piece * rows * nodes // pieces, (piece + 1) * rows * nodes // pieces):
            source, row = floats_at(scores + place * width * 4, width), place // nodes
            best = span(source, width)[1]
            found[place] = lowest_of(source, np.float32(1), best, top_k[row], top_p[row], log_min_p[row], room)
        piece = claim(words)


@cpu_kernel("qqqqq")
def _masses(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces, scores, found, rows, width = words[1], words[2], words[4], words[5], words[6]
    best = floats_at(words[3], rows)
    piece = claim(words)
    while piece < pieces:
        for row in range(piece * rows // pieces, (piece + 1) * rows // pieces):
            _weigh(scores + row * width * 4, best[row], found + row * width * 8, width)
        piece = claim(words)


@cpu_kernel("qqqqqqq")
def _mask_nodes(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces, scores, rows, masks, masked = words[1], words[2], words[3], words[4], words[5]
    places, nodes, width = words[6], words[7], words[8]
    mask_bytes = (width + 31) // 32 * 4
    piece = claim(words)
    while piece < pieces:
        for place in range(piece * places // pieces, (piece + 1) * places // pieces):
            source = floats_at(scores + place * width * 4, width)
            target = floats_at(masked + place * width * 4, width)
            bits = bytes_at(masks + place * mask_bytes, mask_bytes)
            if bytes_at(rows + place // nodes * 4, 4)[0] == 0:
                target[:] = source
            else:
                for token in range(width):
                    legal = (bits[token >> 3] >> (token & 7)) & 1
                    target[token] = source[token] if legal else LEAST
        piece = claim(words)


def choose(
    scores: Tensor,
    positions: Tensor,
    ids: Tensor | None,
    sampling: SamplingTensors,
    features: Features,
    checked: bool,
    out: Tensor | None = None,
) -> Tensor:
    """The token at each node: scores [R, T, V] f32 on the CPU, positions [R, T] -> [R, T] i64.

    Scores are those of token ids [V] (None: 0, 1, ...). Checked: -1 if a score is not finite; otherwise some scores
    may be -inf, and the token among scores that are not numbers is undefined. Results go to `out`, a dense [R, T],
    if given.
    """
    scores, positions = scores.contiguous(), positions.contiguous()
    num_rows, num_nodes, width = scores.shape
    tokens = torch.empty(num_rows, num_nodes, dtype=torch.int64) if out is None else out
    pieces = pieces_for(num_rows * num_nodes, scores.numel(), SERIAL_WORK)
    # Greedy rows take the best score, which every filter keeps.
    filtered = features.sampled and features.filtered
    if filtered:
        pieces = min(pieces, torch.get_num_threads())  # each has working space of several rows
    room = torch.empty(pieces, -(-width // BLOCK) + BLOCK, dtype=torch.float32)  # maxima of blocks, hashes of one
    of_rows = sampling.temperature.contiguous(), sampling.seeds.contiguous()
    limits = (*limits_of(sampling), scratch_for(pieces, width)) if filtered else (room,) * 4
    ids = None if ids is None else ids.contiguous()
    pointers = (tensor.data_ptr() for tensor in (scores, positions, tokens, room, *of_rows, *limits))
    flags = features.sampled, filtered, checked
    address = 0 if ids is None else ids.data_ptr()
    _choose_nodes(pieces, *pointers, address, num_rows, num_nodes, width, *flags)
    return tokens


def pick_scores(scores: Tensor, positions: Tensor, ids: Tensor | None, sampling: SamplingTensors) -> Tensor:
    """Scores [R, T, V] f32 on the CPU over the temperature, plus the noise of token ids [V] at positions [R, T].

    Rows at temperature 0 keep their scores.
    """
    scores, positions = scores.contiguous(), positions.contiguous()
    num_rows, num_nodes, width = scores.shape
    sums = torch.empty_like(scores)
    pieces = pieces_for(num_rows * num_nodes, scores.numel(), SERIAL_WORK)
    of_rows = sampling.temperature.contiguous(), sampling.seeds.contiguous()
    ids = None if ids is None else ids.contiguous()
    pointers = (tensor.data_ptr() for tensor in (scores, positions, sums, *of_rows))
    _pick_scores(pieces, *pointers, 0 if ids is None else ids.data_ptr(), num_rows, num_nodes, width)
    return sums


@njit
def _block(start, number, width):  # type: ignore[no-untyped-def]
    """A block of the scores that start at an address."""
    return floats_at(start + number * BLOCK * 4, min(BLOCK, width - number * BLOCK))


@njit
def _survey(start, width, maxima):  # type: ignore[no-untyped-def]
    """The largest score and the largest magnitude; maxima become those of the blocks."""
    scores, size = floats_at(start, width), np.int32(0)
    for i in range(width):  # apart from the loop below: together they are not vector code
        size = max(size, np.int32(np.float32(scores[i]).view(np.int32) & REST))
    best = FIRST_KEY
    for number in range(len(maxima)):
        block, top = _block(start, number, width), FIRST_KEY
        for i in range(len(block)):
            top = max(top, key_of_float(block[i]))
        maxima[number] = float_of_key(top)
        best = max(best, top)
    return float_of_key(best), float_of_key(size)


@njit
def _find(start, width, maxima, best):  # type: ignore[no-untyped-def]
    """The first place of the best score; 0 if there is none."""
    for number in range(len(maxima)):
        if maxima[number] == best:
            block = _block(start, number, width)
            for i in range(len(block)):
                if block[i] == best:
                    return number * BLOCK + i
    return 0


@njit
def _draw(start, width, maxima, hashes, divisor, lowest, key, ids, first):  # type: ignore[no-untyped-def]
    """The place of the largest sum of score and noise, lowest on ties; `first` is that of the highest score."""
    highest = floats_at(start, width)[first] / divisor
    hash_tokens(key, ids, first, hashes, 1)
    winner, best = first, highest + noise_of(hashes[0])
    # A product stands in for each quotient. Slack covers the rounding of both and of the sums for every score that
    # can win, which is less than two MOST_NOISE below the highest.
    factor, slack = ONE / divisor, (abs(highest) + MOST_NOISE + MOST_NOISE) * SLACK
    for number in range(len(maxima)):
        top = maxima[number] / divisor
        if top < lowest or top + MOST_NOISE < best:
            continue
        block = _block(start, number, width)
        hash_tokens(key, ids, number * BLOCK, hashes, len(block))
        reach = FIRST_KEY
        for i in range(len(block)):
            reach = max(reach, key_of_float(block[i] * factor + noise_bound(hashes[i])))
        if float_of_key(reach) + slack < best:
            continue
        for i in range(len(block)):
            if block[i] * factor + noise_bound(hashes[i]) + slack < best:
                continue
            score, place = block[i] / divisor, number * BLOCK + i
            total = score + noise_of(hashes[i])
            if score >= lowest and (total > best or (total == best and place < winner)):
                winner, best = place, total
    return winner


@cpu_kernel("q" * 17)
def _choose_nodes(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces, scores, ids, scratch = words[1], words[2], words[12], words[11]
    rows, nodes, width = words[13], words[14], words[15]
    sampled, filtered, checked = words[16], words[17], words[18]
    positions, tokens = longs_at(words[3], rows * nodes), longs_at(words[4], rows * nodes)
    temperature, seeds = floats_at(words[6], rows), longs_at(words[7], rows)
    top_k, top_p, log_min_p = longs_at(words[8], rows), floats_at(words[9], rows), floats_at(words[10], rows)
    num_blocks = (width + BLOCK - 1) // BLOCK
    piece = claim(words)
    while piece < pieces:
        room = words[5] + piece * (num_blocks + BLOCK) * 4
        maxima, hashes = floats_at(room, num_blocks), floats_at(room + num_blocks * 4, BLOCK)
        for place in range(piece * rows * nodes // pieces, (piece + 1) * rows * nodes // pieces):
            row, start = place // nodes, scores + place * width * 4
            best, size = _survey(start, width, maxima)
            if checked and not size < MOST:
                tokens[place] = -1
                continue
            token = _find(start, width, maxima, best)
            if sampled and temperature[row] > 0:
                divisor, lowest = max(temperature[row], COLDEST_DIVISOR), LEAST
                if filtered:
                    source, spare = floats_at(start, width), scratch + piece * width * SCRATCH
                    lowest = lowest_of(source, divisor, best / divisor, top_k[row], top_p[row], log_min_p[row], spare)
                key = key_of(seeds[row], positions[place])
                token = _draw(start, width, maxima, hashes, divisor, lowest, key, ids, token)
            tokens[place] = token if ids == 0 else longs_at(ids, width)[token]
        piece = claim(words)


@cpu_kernel("q" * 4)
def _top_chances(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces, scores, rows, width = words[1], words[2], words[4], words[5]
    found = floats_at(words[3], rows)
    piece = claim(words)
    while piece < pieces:
        for row in range(piece * rows // pieces, (piece + 1) * rows // pieces):
            start = scores + row * width * 4
            best = span(floats_at(start, width), width)[1]
            chance = ONE / _sum_of_shares(start, best, width)
            found[row] = chance if chance > 0 else np.float32(0)
        piece = claim(words)


@cpu_kernel("q" * 7)
def _ranked(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces, scores, ids, rows, width, count = words[1], words[2], words[5], words[6], words[7], words[8]
    tokens, shares = longs_at(words[3], (rows, count)), floats_at(words[4], (rows, count))
    piece = claim(words)
    while piece < pieces:
        for row in range(piece * rows // pieces, (piece + 1) * rows // pieces):
            start = scores + row * width * 4
            line, places, best = floats_at(start, width), tokens[row], shares[row]
            for rank in range(count):
                places[rank], best[rank] = min(rank, width - 1), LEAST
            for i in range(width):
                if line[i] > best[count - 1]:  # one in a few hundred
                    rank = count - 1
                    while rank > 0 and line[i] > best[rank - 1]:
                        places[rank], best[rank] = places[rank - 1], best[rank - 1]
                        rank -= 1
                    places[rank], best[rank] = i, line[i]
            top = best[0]
            total = _sum_of_shares(start, top, width)
            for rank in range(count):
                share = np.float32(np.exp(best[rank] - top)) / total
                best[rank] = share if share > 0 else np.float32(0)
                if ids:
                    places[rank] = longs_at(ids, width)[places[rank]]
        piece = claim(words)


@cpu_kernel("q" * 9)
def _pick_scores(block):  # type: ignore[no-untyped-def]
    words = words_of(block)
    pieces, scores, sums, ids = words[1], words[2], words[4], words[7]
    rows, nodes, width = words[8], words[9], words[10]
    positions = longs_at(words[3], rows * nodes)
    temperature, seeds = floats_at(words[5], rows), longs_at(words[6], rows)
    piece = claim(words)
    while piece < pieces:
        for place in range(piece * rows * nodes // pieces, (piece + 1) * rows * nodes // pieces):
            row, start = place // nodes, place * width * 4
            source, target = floats_at(scores + start, width), floats_at(sums + start, width)
            if temperature[row] > 0:
                key = key_of(seeds[row], positions[place])
                hash_tokens(key, ids, 0, target, width)
                add_noise(scores + start, max(temperature[row], COLDEST_DIVISOR), sums + start, width)
            else:
                target[:] = source
        piece = claim(words)
