"""The parts of a dense decoder: linear, norm, attention, MLP, and the layer made of them.

Every part is a plain module with parameters, so the same code trains. A packed `Linear` runs the kernel whose
rows do not depend on their company; an unpacked one is `F.linear` and differentiable. The residual stream is
carried beside the update that has not been added yet, so that each addition is fused with the norm after it.
Parts call each other's `forward`, not the module: a call through it costs as much as a small kernel.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peregrine.attention import Attend
from peregrine.kernels.activation import silu_mul
from peregrine.kernels.linear import PackedWeight, linear, pack_weight
from peregrine.kernels.norm import add_rms_norm, rms_norm
from peregrine.kernels.rope import rope
from peregrine.models.config import ModelConfig


class Linear(nn.Module):
    """x @ weight.T + bias; after `pack` with the row-exact kernel and without the plain weight."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, in_size: int, out_size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None
        self.packed: PackedWeight | None = None

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


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] or [N, heads, D] -> the same shape."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, update: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum): the residual addition and the norm that follows it."""
        return add_rms_norm(update, stream, self.weight, self.eps)


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

    def forward(
        self, x: Tensor, positions: Tensor, table: Tensor, attend: Attend, live: Tensor | None
    ) -> Tensor:
        """[N, in] -> [N, H], or [R, H] for the live rows alone; keys and values are written for all N."""
        return self.merge(attend(self.layer, *self.project(x, positions, table, live)))

    def project(
        self, x: Tensor, positions: Tensor, table: Tensor, live: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values in heads, turned: [N, in] -> [N or R, Hq, D], [N, Hkv, D], [N, Hkv, D]."""
        if self.qkv is not None:
            assert live is None, "this layer projects queries with keys and values"
            return self._together(x, positions, table)
        return self._apart(x, positions, table, live)

    def merge(self, attended: Tensor) -> Tensor:
        """What attention found, back in the stream's size: [N, Hq, D] -> [N, H]."""
        return self.out.forward(attended.flatten(1))

    def _together(self, x: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self.qkv is not None
        qkv = self.qkv.forward(x)
        q_heads, kv_heads = self.num_heads, self.num_kv_heads
        heads = qkv.view(qkv.shape[0], q_heads + 2 * kv_heads, self.head_dim)
        if self.q_norm is None or self.k_norm is None:
            turning, v = torch.split_with_sizes(heads, (q_heads + kv_heads, kv_heads), 1)
            q, k = torch.split_with_sizes(rope(turning, positions, table), (q_heads, kv_heads), 1)
            return q, k, v
        q, k, v = torch.split_with_sizes(heads, (q_heads, kv_heads, kv_heads), 1)
        return rope(self.q_norm(q), positions, table), rope(self.k_norm(k), positions, table), v

    def _apart(
        self, x: Tensor, positions: Tensor, table: Tensor, live: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.q is not None
        assert self.kv is not None
        kv = self.kv.forward(x).view(x.shape[0], 2 * self.num_kv_heads, self.head_dim)
        k, v = torch.split_with_sizes(kv, (self.num_kv_heads, self.num_kv_heads), 1)
        q_positions = positions
        if live is not None:
            x, q_positions = x.index_select(0, live), positions.index_select(0, live)
        q = self.q.forward(x).view(x.shape[0], self.num_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rope(q, q_positions, table), rope(k, positions, table), v


class MLP(nn.Module):
    """The gated feed-forward part, gate and up fused."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[N, H] -> [N, H]."""
        return self.down.forward(silu_mul(self.gate_up.forward(x)))


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, split: bool, normed_input: bool = True) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps) if normed_input else None
        self.attention = Attention(config, layer, config.hidden_size, split)
        self.post_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def enter(self, update: Tensor | None, stream: Tensor) -> tuple[Tensor, Tensor]:
        """(normed input, the stream that enters this layer); no update stands before the first layer."""
        if self.input_norm is None:
            stream = stream if update is None else update + stream
            return stream, stream
        if update is None:
            return self.input_norm(stream), stream
        return self.input_norm.add(update, stream)

    def forward(
        self,
        normed: Tensor,
        stream: Tensor,
        positions: Tensor,
        table: Tensor,
        attend: Attend,
        live: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(update, stream) whose sum leaves the layer; [N, H] each, or [R, H] for the live rows."""
        attention = self.attention
        attended = attend(attention.layer, *attention.project(normed, positions, table, live))
        return self.leave(attended, stream if live is None else stream.index_select(0, live))

    def leave(self, attended: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """(update, stream) after attention has answered: the second half of the layer."""
        normed, stream = self.post_norm.add(self.attention.merge(attended), stream)
        return self.mlp.forward(normed), stream


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
