"""The residual stream of a decoder, and the linears that read from it and add to it.

A stream carries what the next linear reads beside its own values. Where it is added to, it is made ready for the norm
that comes next, so that no norm is a step of its own: on a CPU the addition and the norm are one kernel; on a GPU the
addition is part of the linear before it, and the norm's division is part of the linear after it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from peregrine.kernels.activation import silu_mul
from peregrine.kernels.linear import PackedWeight, linear
from peregrine.kernels.norm import add_rms_norm, rms_norm
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.kernels.runtime.gpu import triton_ready

_triton = DeviceFile("peregrine.kernels.residual.triton")


@dataclass(frozen=True, slots=True)
class Residual:
    """Values [N, H] and their norm: whole, or in two halves of which the next linear does the second."""

    values: Tensor  # [N, H]
    ready: Tensor  # [N, H] the norm of the values; where squares are there, the values times its weight
    squares: Tensor | None = None  # [N] i64 sums of the values' squares, see linear_gpu.py
    spare: Tensor | None = None  # [N] i64 zeros, for the sums of the next addition
    eps: float = 0.0

    def rows(self, chosen: Tensor) -> "Residual":
        """The stream of some rows [R] alone."""
        values, ready = self.values.index_select(0, chosen), self.ready.index_select(0, chosen)
        if self.squares is None:
            return Residual(values, ready)
        squares = self.squares.index_select(0, chosen)
        return Residual(values, ready, squares, torch.zeros_like(squares), self.eps)


def start_residual(values: Tensor, norm: Tensor | None, eps: float) -> Residual:
    """A stream of these values [N, H]; without a norm the next linear reads them as they are."""
    return Residual(values, values if norm is None else rms_norm(values, norm, eps))


def embed_residual(tokens: Tensor, embedding: Tensor, norm: Tensor | None, eps: float) -> Residual:
    """A stream of the tokens' embeddings: [N] -> [N, H]."""
    if norm is None or not triton_ready(embedding):
        return start_residual(F.embedding(tokens, embedding), norm, eps)
    values, scaled, squares, spare = _triton.embed(tokens, embedding, norm)
    return Residual(values, scaled, squares, spare, eps)


def stream_linear(stream: Residual, packed: PackedWeight) -> Tensor:
    """The linear of the normed stream. -> [N, O]"""
    if stream.squares is None:
        return linear(stream.ready, packed)
    assert packed.weight is not None
    out: Tensor = _triton.linear_scaled(stream.ready, stream.squares, stream.eps, packed.weight, packed.bias, False)
    return out


def stream_gate(stream: Residual, packed: PackedWeight) -> Tensor:
    """silu(first half) * second half of the linear of the normed stream. -> [N, O / 2]"""
    if stream.squares is None:
        return silu_mul(linear(stream.ready, packed))
    assert packed.weight is not None
    out: Tensor = _triton.linear_scaled(stream.ready, stream.squares, stream.eps, packed.weight, packed.bias, True)
    return out


def join_stream(x: Tensor, packed: PackedWeight, stream: Residual, norm: Tensor | None, eps: float) -> Residual:
    """The stream with the linear of x [N, I] added to it, ready for the norm that comes next."""
    if norm is None or packed.weight is None or not triton_ready(packed.weight):
        return add_to_residual(linear(x, packed), stream, norm, eps)
    squares = stream.spare
    if squares is None or stream.squares is None:
        squares = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    stale = torch.empty_like(squares) if stream.squares is None else stream.squares
    values, scaled = _triton.linear_add(x, packed.weight, packed.bias, stream.values, norm, squares, stale)
    return Residual(values, scaled, squares, stale, eps)


def add_to_residual(update: Tensor, stream: Residual, norm: Tensor | None, eps: float) -> Residual:
    """The stream with an update [N, H] added to it."""
    if norm is None:
        values = update + stream.values
        return Residual(values, values)
    normed, values = add_rms_norm(update, stream.values, norm, eps)
    return Residual(values, normed)


def normed(stream: Residual) -> Tensor:
    """The stream after the norm it was made ready for. [N, H]"""
    if stream.squares is None:
        return stream.ready
    whole: Tensor = _triton.finish_norm(stream.ready, stream.squares, stream.eps)
    return whole
