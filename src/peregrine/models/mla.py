"""MLAConfig attention (MLA): a token leaves one latent for all heads, and heads read it through weights of their own.

Attention itself is of one shared key whose first part is its value. The weights that would make keys and values of
every head out of a latent are applied to the queries (`w_uk`) and to the answers (`w_uv`) instead, for one token and
for a thousand: what a token reads has the same bits whether it was part of a prompt, cached or generated.
"""

import torch
from torch import Tensor, nn

from peregrine.kernels.attention import DeferredMLARope, turn_latent
from peregrine.kernels.linear import PackedPerHead, pack_per_head, per_head_linear
from peregrine.kernels.residual import Residual
from peregrine.kernels.runtime.gpu import triton_ready
from peregrine.models.config import MLAConfig, ModelConfig
from peregrine.models.layers import QKV, Linear, LiveRows, Packable, RMSNorm

NORM_EPS = 1e-6  # of the norms inside the attention, whatever rms_norm_eps says


class PerHeadLinear(Packable):
    """One linear per head; after `pack` with the row-exact kernel and without the plain weight."""

    weight: nn.Parameter | None
    packed: PackedPerHead | None

    def __init__(self, num_heads: int, in_size: int, out_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, out_size, in_size))
        self.packed = None

    def pack(self, keep_weight: bool = False) -> None:
        """Switch to the kernel's own layout; the plain weight goes, unless another module shares it."""
        if self.weight is None:
            raise RuntimeError("these linears are packed already")
        self.packed = pack_per_head(self.weight)
        if not keep_weight:
            self.weight = None

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, heads, in] -> [N, heads, out], written to `out` if that is given."""
        if self.packed is not None:
            return per_head_linear(x, self.packed, out)
        assert self.weight is not None
        y = torch.einsum("nhk,hok->nho", x, self.weight)
        return y if out is None else out.copy_(y)


class MLAAttention(nn.Module):
    """Projections, norms and rotation around `attend`, as `Attention` has them.

    What is read from the stream is one linear, or two if queries may be fewer: see `Attention`. For queries it is the
    queries themselves or, where they have a rank of their own, a few numbers that they are made of.
    """

    def __init__(self, config: ModelConfig, latent: MLAConfig, layer: int, split: bool) -> None:
        super().__init__()
        self.layer, self.latent = layer, latent
        self.num_heads = config.num_heads
        hidden, bias = config.hidden_size, config.qkv_bias
        heads_size = self.num_heads * latent.q_dim
        self.q_size = heads_size if latent.q_rank is None else latent.q_rank
        self.qkv = None if split else Linear(hidden, self.q_size + latent.key_dim, bias)
        self.q = Linear(hidden, self.q_size, bias) if split else None
        self.kv = Linear(hidden, latent.key_dim, bias) if split else None
        self.q_norm = None if latent.q_rank is None else RMSNorm(latent.q_rank, NORM_EPS)
        self.q_up = None if latent.q_rank is None else Linear(latent.q_rank, heads_size)
        self.kv_norm = RMSNorm(latent.kv_rank, NORM_EPS)
        self.w_uk = PerHeadLinear(self.num_heads, latent.nope_dim, latent.kv_rank)
        self.w_uv = PerHeadLinear(self.num_heads, latent.kv_rank, latent.value_dim)
        self.out = Linear(self.num_heads * latent.value_dim, hidden, config.out_bias)

    def project(self, stream: Residual, positions: Tensor, table: Tensor, live_rows: LiveRows | None = None) -> QKV:
        """Queries and keys of the normed stream [N, in]; queries of the live_rows rows, if not all ask."""
        q, kv = self._read(stream, live_rows)
        nope, q_rope = torch.split_with_sizes(q, (self.latent.nope_dim, self.latent.rope_dim), 2)
        q_positions = positions if live_rows is None else live_rows.positions
        turn = DeferredMLARope(q_rope, q_positions, positions, table, self.kv_norm.weight, self.kv_norm.eps)
        k = kv[:, None]
        if self.out.packed is not None and triton_ready(q):
            absorbed = q.new_empty(q.shape[0], self.num_heads, self.latent.key_dim)
            self.w_uk.forward(nope, out=absorbed[..., : self.latent.kv_rank])
            return QKV(absorbed, k, k[..., : self.latent.kv_rank], turn)
        q, k = turn_latent(self.w_uk.forward(nope), k, turn)
        return QKV(q, k, k[..., : self.latent.kv_rank])

    def _read(self, stream: Residual, live_rows: LiveRows | None) -> tuple[Tensor, Tensor]:
        """The linears before the rotation: queries [R, heads, nope + rope] and keys [N, key_dim], not normed."""
        if self.qkv is not None:
            assert live_rows is None, "this layer projects queries with keys"
            q, kv = torch.split_with_sizes(self.qkv.of(stream), (self.q_size, self.latent.key_dim), 1)
        else:
            assert self.q is not None
            assert self.kv is not None
            kv = self.kv.of(stream)
            q = self.q.of(stream if live_rows is None else live_rows.residual)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up.forward(self.q_norm.forward(q))
        return q.view(q.shape[0], self.num_heads, self.latent.q_dim), kv

    def merge_heads(self, attended: Tensor) -> Tensor:
        """What the queries found among latents [N, heads, kv_rank], as `out` reads it. -> [N, heads * value_dim]"""
        return self.w_uv.forward(attended).flatten(1)
