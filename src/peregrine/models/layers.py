"""The parts of a decoder layer: linear, norm, attention, MLP.

Every part is a plain module with parameters, so the same code trains. A packed part holds its weight in the format of
its device, whose rows do not depend on the batch; an unpacked one uses the library and is differentiable. The residual
stream is prepared for its next norm wherever something is added to it, so norms are not steps of their own. Parts call
each other's `forward` directly: a call through the module costs as much as a small kernel.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from peregrine.attention import Attend, Deferred
from peregrine.kernels.activation import gelu_mul
from peregrine.kernels.linear import PlainWeight, WeightFormat, pack_weight
from peregrine.kernels.norm import rms_norm
from peregrine.kernels.residual import Residual, add_to_residual, take_rows
from peregrine.kernels.rope import DeferredRope, rope
from peregrine.kernels.runtime.gpu import triton_ready
from peregrine.models.config import ModelConfig
from peregrine.models.parallel import ALONE, Ranks, Shard, Span
from peregrine.models.sharded import ShardedWeight

Format = TypeVar("Format")


class Packable(nn.Module, ABC, Generic[Format]):
    """A part with one weight, which is packed for inference as soon as it is filled."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    packed: Format | None
    held: torch.dtype | None = None  # what a CPU's float32 weight is rounded to and held in
    shard: Shard | None = None  # which rows of the whole weight it holds; None: all

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.packed = None

    @property
    def format(self) -> Format:
        """The weight in the format of its device; before it is packed, in one that trains."""
        return self._pack(train=True) if self.packed is None else self.packed

    def pack(self, keep_weight: bool = False, held: torch.dtype | None = None) -> None:
        """Switch to the format of the device; the plain weight goes, unless another module shares it."""
        if self.weight is None:
            raise RuntimeError(f"this {type(self).__name__} is packed already")
        self.held = held
        self.packed = self._pack(train=False)
        self.bias = None
        if not keep_weight:
            self.weight = None

    @abstractmethod
    def _pack(self, train: bool) -> Format:
        """The weight, which is there, in the format of its device or in one that trains."""


class Linear(Packable[WeightFormat]):
    """x @ weight.T + bias; of several ranks each has some of its rows."""

    def __init__(self, in_size: int, out_size: int, bias: bool = False, shard: Shard | None = None) -> None:
        own = out_size if shard is None else shard.count
        super().__init__(torch.empty(own, in_size), torch.empty(own) if bias else None)
        self.shard = shard

    def _pack(self, train: bool) -> WeightFormat:
        assert self.weight is not None
        if train:
            return PlainWeight(self.weight, self.bias)
        if self.shard is None:
            return pack_weight(self.weight, self.bias, self.held)
        # A weight may be the embedding's, which every rank holds whole: then each packs its own rows of it.
        own = self.shard.take(self.weight) if len(self.weight) == self.shard.total else self.weight
        packed = pack_weight(own, self.bias, self.held, self.shard.total)
        return packed if self.shard.widths is None else ShardedWeight(packed, self.shard)

    def forward(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        return self.format.linear(x)


def output_head(in_size: int, vocab_size: int, ranks: Ranks = ALONE) -> Linear:
    """The linear of hidden states to logits, a network's `head`, split between ranks by the vocabulary."""
    return Linear(in_size, vocab_size, shard=ranks.split(vocab_size))


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
    """Projected queries, keys and values; `rope` is set if the backend must still apply it."""

    q: Tensor  # [N or R, Hq, D]
    k: Tensor  # [N, Hkv, D]
    v: Tensor  # [N, Hkv, Dv]
    rope: Deferred | None = None

    def attend(self, attend: Attend, layer: int) -> Tensor:
        """-> [N or R, Hq, Dv]."""
        return attend(layer, self.q, self.k, self.v, self.rope)


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The rows of a layer that are queried, if not all are; keys and values are computed for every row."""

    residual: Residual  # [R, H]
    positions: Tensor  # [R] i64

    @staticmethod
    def of(rows: Tensor | None, residual: Residual, positions: Tensor) -> "LiveRows | None":
        """Rows [R] i64 of a window; None if all are queried."""
        return None if rows is None else LiveRows(residual.rows(rows), take_rows(positions, rows))


class Attention(nn.Module):
    """Projections, head norms and rotation around `attend`.

    Queries, keys and values are one fused projection. A layer that may be asked for live rows alone (`split`) projects
    queries apart from keys and values, always, so that a query's bits do not depend on which rows are live. Of several
    ranks each has its own heads.
    """

    def __init__(self, config: ModelConfig, layer: int, in_size: int, split: bool, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.layer, self.ranks = layer, ranks
        self.own, self.own_kv = ranks.heads(config.num_heads, config.num_kv_heads)
        self.num_heads, self.num_kv_heads = self.own[1] - self.own[0], self.own_kv[1] - self.own_kv[0]
        self.head_dim = config.head_dim
        q_size, k_size = config.num_heads * self.head_dim, config.num_kv_heads * self.head_dim
        kv_size = 2 * k_size
        self.head_widths, self.kv_widths = ranks.head_widths(config.num_heads, config.num_kv_heads, self.head_dim)

        def rows(own: Span, before: int) -> Span:
            return before + own[0] * self.head_dim, before + own[1] * self.head_dim

        def linear(size: int, *own: Span) -> Linear:
            return Linear(in_size, size, config.qkv_bias, ranks.keep(size, *own))

        q, k, v = rows(self.own, 0), rows(self.own_kv, q_size), rows(self.own_kv, q_size + k_size)
        self.qkv = None if split else linear(q_size + kv_size, q, k, v)
        self.q = linear(q_size, q) if split else None
        self.kv = linear(kv_size, rows(self.own_kv, 0), rows(self.own_kv, k_size)) if split else None
        self.out = Linear(q_size, config.hidden_size, config.out_bias, ranks.split(config.hidden_size))
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.sinks else None  # of all ranks
        self.norms_whole = config.whole_qk_norm
        sizes = (q_size, kv_size // 2) if self.norms_whole else (self.head_dim, self.head_dim)
        self.q_norm = RMSNorm(sizes[0], config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(sizes[1], config.norm_eps) if config.qk_norm else None

    def project(self, residual: Residual, positions: Tensor, table: Tensor, live: LiveRows | None = None) -> QKV:
        """Queries, keys and values of the normed residual [N, in]; queries of the live rows alone, if given."""
        q_heads, kv_heads = self.num_heads, self.num_kv_heads
        queried, q_positions = (residual, positions) if live is None else (live.residual, live.positions)
        if self.qkv is not None:
            assert live is None, "this layer projects queries together with keys and values"
            heads = self.qkv.format.linear_normed(residual).view(-1, q_heads + 2 * kv_heads, self.head_dim)
            q, kv = torch.split_with_sizes(heads, (q_heads, 2 * kv_heads), 1)
        else:
            assert self.q is not None
            assert self.kv is not None
            heads = None
            kv = self.kv.format.linear_normed(residual).view(-1, 2 * kv_heads, self.head_dim)
            q = self.q.format.linear_normed(queried).view(-1, q_heads, self.head_dim)
        k, v = torch.split_with_sizes(kv, (kv_heads, kv_heads), 1)
        if self.out.packed is not None and triton_ready(q) and not self.norms_whole:
            return QKV(q, k, v, self._deferred_rope(q_positions, positions, table))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._norm_whole(q, k) if self.norms_whole else (self.q_norm(q), self.k_norm(k))
        elif heads is not None:  # adjacent: one call rotates both
            rotated = rope(heads[:, : q_heads + kv_heads], positions, table)
            q, k = torch.split_with_sizes(rotated, (q_heads, kv_heads), 1)
            return QKV(q, k, v)
        return QKV(rope(q, q_positions, table), rope(k, positions, table), v)

    def own_sinks(self) -> Tensor:
        """The sinks of this rank's heads, as attention reads them: [heads] f32."""
        assert self.sinks is not None
        return self.sinks.float()[self.own[0] : self.own[1]]

    def merge_heads(self, attended: Tensor) -> Tensor:
        """The result of attention as the output projection reads it, of all ranks: [N, Hq, D] -> [N, Hq * D]."""
        return self.ranks.gather(attended.flatten(1), self.head_widths)

    def _norm_whole(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's queries and keys [N, heads, D], normed over the heads of all ranks together."""
        normed = []
        for x, norm, (low, high), widths in (
            (q, self.q_norm, self.own, self.head_widths),
            (k, self.k_norm, self.own_kv, self.kv_widths),
        ):
            assert norm is not None
            size, dim = norm.weight.shape[0], self.head_dim
            heads = self.ranks.gather(x.flatten(1), widths).view(len(x), sum(widths) // dim, dim)
            copies = sum(widths) // size  # of a KV head, on several ranks
            normed.append(norm(heads[:, ::copies].flatten(1)).view(len(x), size // dim, dim)[:, low:high])
        return normed[0], normed[1]

    def _deferred_rope(self, q_positions: Tensor, positions: Tensor, table: Tensor) -> DeferredRope:
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None:
            return DeferredRope(q_positions, positions, table, None, None, 0.0)
        return DeferredRope(q_positions, positions, table, q_norm.weight, k_norm.weight, q_norm.eps)


class MLP(nn.Module):
    """The gated feed-forward part, with gate and up fused."""

    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.uses_gelu = config.activation == "gelu"
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(size, 2 * inner, bias, ranks.split(inner, parts=2))
        self.down = Linear(inner, size, bias, ranks.split(size))

    def forward(self, residual: Residual, next_norm: RMSNorm | None, out_norm: RMSNorm | None = None) -> Residual:
        """The residual plus the MLP of its norm, itself normed if the family says so, prepared for the next norm."""
        gate_up = self.gate_up.format
        inner = gelu_mul(gate_up.linear_normed(residual)) if self.uses_gelu else gate_up.gated(residual)
        return add_linear(self.down, inner, residual, out_norm, next_norm)


def add_linear(
    linear: Linear, x: Tensor, residual: Residual, out_norm: RMSNorm | None, next_norm: RMSNorm | None
) -> Residual:
    """The residual plus a linear of x [N, in], normed before it is added if there is a norm for that."""
    if out_norm is None:
        return linear.format.add(x, residual, next_norm)
    return add_to_residual(out_norm.forward(linear.forward(x)), residual, next_norm)


def pack_linears(module: nn.Module, shared: Linear | None = None, held: torch.dtype | None = None) -> None:
    """Pack every linear, for inference; the module can no longer be trained. `shared` keeps its plain weight."""
    module.requires_grad_(False)
    for part in module.modules():
        if isinstance(part, Packable) and part.packed is None:
            part.pack(keep_weight=part is shared, held=held)
    cache_attributes(module)


def cache_attributes(module: nn.Module) -> None:
    """Copy parts, parameters and buffers into each module's `__dict__`, where Python finds them directly.

    nn.Module keeps them in dictionaries of its own, which cost about a microsecond per access: Python calls
    `nn.Module.__getattr__` only after the ordinary lookup has failed. A layer makes dozens of such accesses. Later
    assignments would not be seen: only for modules that will not be moved, cast or trained any more.
    """
    for part in module.modules():
        part.__dict__.update(part._modules | part._parameters | part._buffers)


def allocate(module: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Give memory to parameters that were made on the meta device; `to_empty` would import sympy first, for 0.6 s."""
    for part in module.modules():
        for name, made in part.named_parameters(recurse=False):
            own = torch.empty(made.shape, dtype=dtype, device=device)
            part.register_parameter(name, nn.Parameter(own, made.requires_grad))


def draw_weights(module: nn.Module, generator: torch.Generator, scale: float = 0.02) -> None:
    """Fresh weights for training: normal with the given deviation, norms one, biases zero."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
