"""Compiled attention over paged keys and values: float32 on the CPU, dense and MLA, one kernel for every window.

As in `reference.py`, a query reads its keys in order, by index. All heads of a KV head and all queries of
a row share what they read. Scores of all keys come first, then the softmax, then values: nothing is rescaled, and each
result is a chain of operations that depends on the query and its keys alone. Only keys that some query of a piece sees
are scored, and only values that a query sees are added to it.
"""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from peregrine.config import MAX_NODES
from peregrine.kernels.attention.plan import dense_heads
from peregrine.kernels.attention.plan_cpu import CpuKV, CpuPlan
from peregrine.kernels.attention.tiles_cpu import LANES, highest, score_tile, value_tile, weigh
from peregrine.kernels.runtime.cpu_jit import claim, cpu_kernel, floats_at, longs_at, reals_of, words_of

BLOCK = 64  # keys that all query rows of a piece read before the next ones, to find them in the cache
MAX_PIECE_ROWS = 24  # query rows (query tokens x heads of one KV head) that one thread works on together
SERIAL_WORK = 1 << 15  # multiply-adds below which a second thread costs more than it saves

# Per query row: first key index it sees, where the row's keys end, where all keys end, address of its own keys' slots.
LOW, SHARED, LIMIT, OWN = 0, 1, 2, 3


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
