"""What a drafter says of its scores, compiled for the CPU: shares of the largest ones."""

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from peregrine.kernels.runtime.cpu import pieces_for
from peregrine.kernels.runtime.cpu_jit import (
    FLOAT,
    INT32,
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
from peregrine.kernels.sampling.filters_cpu import LEAST, SERIAL_WORK, span
from peregrine.kernels.sampling.noise_cpu import LANES

ONE = np.float32(1)


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


@intrinsic
def _sum_of_shares(context: Any, scores: Any, best: Any, count: Any) -> Any:
    """(scores, best, count) -> the sum of exp(score - best) over so many scores at an address."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        scores = builder.inttoptr(arguments[0], FLOAT.as_pointer())
        best, count = arguments[1], arguments[2]

        def take(carried: list[ir.Value], first: ir.Value, step: int) -> list[ir.Value]:
            below = builder.fsub(
                load_vector(builder, builder.gep(scores, [first]), step), broadcast(builder, best, step)
            )
            return [builder.fadd(carried[0], exponential(builder, below))]

        whole = builder.sub(count, builder.srem(count, INT64(LANES)))
        none = ir.Constant(ir.VectorType(FLOAT, LANES), [0.0] * LANES)
        sums = counted_loop(builder, INT64(0), whole, LANES, [none], take)[0]
        total = ir.Constant(FLOAT, 0.0)
        for lane in range(LANES):
            total = builder.fadd(total, builder.extract_element(sums, INT32(lane)))
        rest = counted_loop(builder, whole, count, 1, [broadcast(builder, total, 1)], take)[0]
        return builder.extract_element(rest, INT32(0))

    return types.float32(types.int64, types.float32, types.int64), build


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
