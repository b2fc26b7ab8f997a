"""The compiled norms on a CPU: one thread per row, whose squares are summed in 16 lanes, added in a fixed order."""

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
    arguments_of,
    claim,
    counted_loop,
    cpu_kernel,
    floats_at,
    fused_multiply_add,
    load_vector,
    longs_at,
    reals_of,
    words_of,
)

LANES = 16
SERIAL_WORK = 1 << 15  # elements below which a second thread costs more than it saves


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight for x [N, H] or [N, heads, D] float32 on the CPU, weight [H] or [D]."""
    width = x.shape[-1]
    _check(weight, width)
    if x.dim() == 3 and x.stride(2) == 1 and not x.is_contiguous():  # heads cut out of a wider row
        num_rows, heads, _ = x.shape
        stride, head_stride, _ = x.stride()
    else:
        x = x.contiguous()
        num_rows, heads = x.numel() // width, 1
        stride, head_stride = width, 0
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    pieces = pieces_for(num_rows, num_rows * heads * width, SERIAL_WORK)
    pointers = x.data_ptr(), weight.data_ptr(), normed.data_ptr()
    _rms_norm(pieces, *pointers, num_rows, stride, heads, head_stride, width, eps)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm of the sum, the sum) for x and residual [N, H] float32 on the CPU, weight [H]."""
    num_rows, width = x.shape
    _check(weight, width)
    if residual.shape != x.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, x has {tuple(x.shape)}")
    x, residual = x.contiguous(), residual.contiguous()
    normed, total = torch.empty_like(x), torch.empty_like(x)
    pieces = pieces_for(num_rows, num_rows * width, SERIAL_WORK)
    pointers = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), normed.data_ptr(), total.data_ptr()
    _add_rms_norm(pieces, *pointers, num_rows, width, eps)
    return normed, total


def norm_pair(
    tokens: Tensor, embedding: Tensor, first_norm: Tensor, hidden: Tensor, second_norm: Tensor, eps: float
) -> Tensor:
    """Normed rows of embedding [V, H] for tokens [N] i64, beside normed hidden states [N, H]: [N, 2 H]."""
    num_rows, width = hidden.shape
    for weight in (first_norm, second_norm):
        _check(weight, width)
    tokens, embedding, hidden = tokens.contiguous(), embedding.contiguous(), hidden.contiguous()
    both = torch.empty(num_rows, 2 * width, dtype=torch.float32)
    tensors = tokens, embedding, first_norm, hidden, second_norm, both
    pieces = pieces_for(num_rows, 2 * num_rows * width, SERIAL_WORK)
    _norm_pair(pieces, *(x.data_ptr() for x in tensors), num_rows, width, embedding.shape[0], eps)
    return both


def _check(weight: Tensor, width: int) -> None:
    if weight.numel() != width or not weight.is_contiguous():
        raise ValueError(f"weight must be a dense [{width}], it has shape {tuple(weight.shape)}")


@intrinsic
def _sum_squares(context: Any, address: Any, width: Any) -> Any:
    """(address, width) -> the sum of the squares of so many floats."""

    def build(codegen: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        values, width = builder.inttoptr(arguments[0], FLOAT.as_pointer()), arguments[1]

        def add(sums: list[ir.Value], first: ir.Value, step: int) -> list[ir.Value]:
            taken = load_vector(builder, builder.gep(values, [first]), step)
            return [fused_multiply_add(builder, taken, taken, sums[0])]

        def zero(count: int) -> ir.Value:
            return ir.Constant(ir.VectorType(FLOAT, count), [0.0] * count)

        whole = builder.sub(width, builder.srem(width, INT64(LANES)))
        (total,) = counted_loop(builder, INT64(0), whole, LANES, [zero(LANES)], add)
        (rest,) = counted_loop(builder, whole, width, 1, [zero(1)], add)
        while total.type.count > 1:
            half = total.type.count // 2
            low, high = (_lanes(builder, total, range(start, start + half)) for start in (0, half))
            total = builder.fadd(low, high)
        return builder.extract_element(builder.fadd(total, rest), ir.IntType(32)(0))

    return types.float32(types.int64, types.int64), build


def _lanes(builder: ir.IRBuilder, vector: ir.Value, lanes: range) -> ir.Value:
    kept = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), kept)


@njit
def _norm_row(source, weight, target, width, eps):  # type: ignore[no-untyped-def]
    mean = _sum_squares(source, width) / np.float32(width)
    scale = np.float32(1) / math.sqrt(mean + eps)
    x, w, y = floats_at(source, width), floats_at(weight, width), floats_at(target, width)
    for i in range(width):
        y[i] = w[i] * (x[i] * scale)


@cpu_kernel("qqqqqqqqd")
def _rms_norm(block):  # type: ignore[no-untyped-def]
    words, eps = words_of(block), np.float32(reals_of(block)[10])
    pieces = words[1]
    x, weight, normed, rows, stride, heads, head_stride, width = arguments_of(block, 8)
    piece = claim(words)
    while piece < pieces:
        for row in range(piece * rows // pieces, (piece + 1) * rows // pieces):
            for head in range(heads):
                source, target = row * stride + head * head_stride, (row * heads + head) * width
                _norm_row(x + source * 4, weight, normed + target * 4, width, eps)
        piece = claim(words)


@cpu_kernel("qqqqqqqqqd")
def _norm_pair(block):  # type: ignore[no-untyped-def]
    words, eps = words_of(block), np.float32(reals_of(block)[11])
    pieces = words[1]
    tokens, embedding, first, hidden, second, both, rows, width, vocab_size = arguments_of(block, 9)
    ids = longs_at(tokens, rows)
    piece = claim(words)
    while piece < pieces:
        for row in range(piece * rows // pieces, (piece + 1) * rows // pieces):
            token, target = min(max(ids[row], 0), vocab_size - 1), both + row * width * 8
            _norm_row(embedding + token * width * 4, first, target, width, eps)
            _norm_row(hidden + row * width * 4, second, target + width * 4, width, eps)
        piece = claim(words)


@cpu_kernel("qqqqqqqd")
def _add_rms_norm(block):  # type: ignore[no-untyped-def]
    words, eps = words_of(block), np.float32(reals_of(block)[9])
    pieces = words[1]
    x, residual, weight, normed, total, rows, width = arguments_of(block, 7)
    piece = claim(words)
    while piece < pieces:
        for row in range(piece * rows // pieces, (piece + 1) * rows // pieces):
            start = row * width * 4
            a, b = floats_at(x + start, width), floats_at(residual + start, width)
            c = floats_at(total + start, width)
            for i in range(width):
                c[i] = a[i] + b[i]
            _norm_row(total + start, weight, normed + start, width, eps)
        piece = claim(words)
