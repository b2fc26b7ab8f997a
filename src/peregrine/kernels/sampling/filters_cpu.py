"""Filters compiled for the CPU: the lowest score that top-k, top-p and min-p keep, found by halving ranges.

Nothing is sorted. Counts and masses are whole numbers, so no order of adding them can change the result.
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
    broadcast,
    claim,
    counted_loop,
    cpu_kernel,
    exponential,
    floats_at,
    load_vector,
    longs_at,
    words_of,
)
from peregrine.kernels.sampling.noise_cpu import LANES
from peregrine.kernels.sampling.params import MASS, SamplingTensors

SERIAL_WORK = 1 << 12  # scores below which a second thread costs more than it saves
LEAST, MOST = np.float32(-np.inf), np.float32(np.inf)
LOWEST = -float(np.finfo(np.float32).max)
SIGN, REST = np.int32(31), np.int32(0x7FFFFFFF)
FIRST_KEY, LAST_KEY = np.int32(-(1 << 31)), np.int32((1 << 31) - 1)
SCRATCH = 16  # bytes of working space per score: a weight and two floats
MAX_HALVINGS = 8  # between two gatherings of what is left
MAX_GATHERINGS = 256  # more than any range of floats takes: NaN cannot keep a search going
GATHER_SHIFT = 3  # gather what is left as soon as it is an eighth


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
            bests = broadcast(builder, best, step)
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
