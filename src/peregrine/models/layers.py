"""The parts of a decoder's layers: linear, norm, attention, MLP.

Every part is a plain module with parameters, so the same code trains. A packed `Linear` runs the kernel whose
rows do not depend on their company; an unpacked one is `F.linear` and differentiable. The residual stream is
made ready for its next norm wherever something is added to it, so that norms are not steps of their own.
Parts call each other's `forward`, not the module: a call through it costs as much as a small kernel.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peregrine.attention import Attend, Deferred
from peregrine.kernels.activation import silu_mul
from peregrine.kernels.linear import PackedWeight, linear, pack_weight
from peregrine.kernels.norm import rms_norm
from peregrine.kernels.residual import Residual, add_to_residual, join_stream, stream_gate, stream_linear
from peregrine.kernels.rope import DeferredRope, rope
from peregrine.kernels.runtime.gpu import triton_ready
from peregrine.models.config import ModelConfig


class Packable(nn.Module, ABC):
    """A part whose weight is laid out for a kernel as soon as it is whole; `packed` is None before."""

    packed: object | None

    @abstractmethod
    def pack(self, keep_weight: bool = False) -> None:
        """Switch to the kernel's own layout; the plain weight goes, unless another module shares it."""


class Linear(Packable):
    """x @ weight.T + bias; after `pack` with the row-exact kernel and without the plain weight."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    packed: PackedWeight | None

    def __init__(self, in_size: int, out_size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None
        self.packed = None

    def pack(self, keep_weight: bool = False) -> None:
        """Switch to the kernel's own layout; the plain weight goes, unless another module shares it."""
        if self.weight is None:
            raise RuntimeError("this linear is packed already")
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        self.packed = pack_weight(weight, bias)
        self.bias = None
        if not keep_weight:
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        if self.packed is not None:
            return linear(x, self.packed)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def of(self, stream: Residual) -> Tensor:
        """The linear of the normed stream. -> [N, out]"""
        return self.forward(stream.ready) if self.packed is None else stream_linear(stream, self.packed)

    def gated(self, stream: Residual) -> Tensor:
        """silu(first half) * second half of it. -> [N, out / 2]"""
        if self.packed is None:
            return silu_mul(self.forward(stream.ready))
        return stream_gate(stream, self.packed)

    def join(self, x: Tensor, stream: Residual, norm: "RMSNorm | None") -> Residual:
        """The stream with the linear of x added to it, ready for the norm that comes next, if one does."""
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        if self.packed is None:
            return add_to_residual(self.forward(x), stream, weight, eps)
        return join_stream(x, self.packed, stream, weight, eps)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] or [N, heads, D] -> the same shape."""
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class QKV:
    """What attention is asked: queries, keys and values in heads; turned, or with the turn still to be made."""

    q: Tensor  # [N or R, Hq, D]
    k: Tensor  # [N, Hkv, D]
    v: Tensor  # [N, Hkv, Dv]
    rope: Deferred | None = None  # set if the backend must still apply it

    def attend(self, attend: Attend, layer: int) -> Tensor:
        """What the queries found. [N or R, Hq, Dv]"""
        return attend(layer, self.q, self.k, self.v, self.rope)


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The rows that ask something of a layer whose keys and values are computed for all."""

    rows: Tensor  # [R] i64
    residual: Residual  # [R, H]
    positions: Tensor  # [R] i64

    @staticmethod
    def of(rows: Tensor | None, stream: Residual, positions: Tensor) -> "LiveRows | None":
        """None if no rows are named: all ask."""
        return None if rows is None else LiveRows(rows, stream.rows(rows), positions.index_select(0, rows))


class Attention(nn.Module):
    """Projections, head norms and rotation around `attend`.

    One projection is fused from three, or two if queries may be fewer: a layer that is asked for few live
    queries projects them apart from keys and values. It does so always, so that a query has the same bits
    with company and without.
    """

    def __init__(self, config: ModelConfig, layer: int, in_size: int, split: bool) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        q_size, kv_size = self.num_heads * self.head_dim, 2 * self.num_kv_heads * self.head_dim
        self.qkv = None if split else Linear(in_size, q_size + kv_size, config.qkv_bias)
        self.q = Linear(in_size, q_size, config.qkv_bias) if split else None
        self.kv = Linear(in_size, kv_size, config.qkv_bias) if split else None
        self.out = Linear(q_size, config.hidden_size, config.out_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None

    def project(self, stream: Residual, positions: Tensor, table: Tensor, live_rows: "LiveRows | None" = None) -> QKV:
        """Queries, keys and values of the normed stream [N, in]; queries of the live_rows rows, if not all ask."""
        q_positions = positions if live_rows is None else live_rows.positions
        if self.qkv is not None:
            assert live_rows is None, "this layer projects queries with keys and values"
            heads = self.qkv.of(stream).view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
            q, kv = torch.split_with_sizes(heads, (self.num_heads, 2 * self.num_kv_heads), 1)
        else:
            assert self.q is not None
            assert self.kv is not None
            heads = None
            kv = self.kv.of(stream).view(-1, 2 * self.num_kv_heads, self.head_dim)
            q = self.q.of(stream if live_rows is None else live_rows.residual).view(-1, self.num_heads, self.head_dim)
        k, v = torch.split_with_sizes(kv, (self.num_kv_heads, self.num_kv_heads), 1)
        if self.out.packed is not None and triton_ready(q):
            return QKV(q, k, v, self._turn(q_positions, positions, table))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        elif heads is not None:  # side by side: one call turns both
            turned = rope(heads[:, : self.num_heads + self.num_kv_heads], positions, table)
            q, k = torch.split_with_sizes(turned, (self.num_heads, self.num_kv_heads), 1)
            return QKV(q, k, v)
        return QKV(rope(q, q_positions, table), rope(k, positions, table), v)

    def merge_heads(self, attended: Tensor) -> Tensor:
        """What the queries found [N, Hq, D], as `out` reads it. -> [N, Hq * D]"""
        return attended.flatten(1)

    def _turn(self, q_positions: Tensor, positions: Tensor, table: Tensor) -> DeferredRope:
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None:
            return DeferredRope(q_positions, positions, table, None, None, 0.0)
        return DeferredRope(q_positions, positions, table, q_norm.weight, k_norm.weight, q_norm.eps)


class MLP(nn.Module):
    """The gated feed-forward part, gate and up fused."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, stream: Residual, next_norm: RMSNorm | None) -> Residual:
        """The stream with the MLP of its norm added to it, ready for the norm that comes next."""
        return self.down.join(self.gate_up.gated(stream), stream, next_norm)


def pack_linears(module: nn.Module, shared: Linear | None = None) -> None:
    """Switch every linear to the row-exact kernel, for inference; the module can no longer be trained.

    A shared linear keeps its plain weight.
    """
    module.requires_grad_(False)
    for part in module.modules():
        if isinstance(part, Packable) and part.packed is None:
            part.pack(keep_weight=part is shared)
    settle(module)


def settle(module: nn.Module) -> None:
    """Make a packed module's parts plain attributes: nn.Module finds them by a look-up of a microsecond each.

    Only for modules that will not be moved, cast or trained any more.
    """
    for part in module.modules():
        part.__dict__.update(part._modules | part._parameters | part._buffers)


def draw_weights(module: nn.Module, generator: torch.Generator, scale: float = 0.02) -> None:
    """Fresh weights for training: normal with the given deviation, norms one, biases zero."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
