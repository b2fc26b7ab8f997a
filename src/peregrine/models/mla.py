"""Multi-head latent attention (MLA): a token caches one latent for all heads, which read it through their own weights.

Attention itself has one shared KV head, and the first part of its key is its value. The weights that would expand a
latent to the keys and values of every head are applied to the queries (`w_uk`) and to the results (`w_uv`) instead, for
one token as for a thousand: what a token reads has the same bits whether it was part of a prompt, cached or generated.
"""

import torch
from torch import Tensor, nn

from peregrine.kernels.attention import DeferredMLARope, mla_rope
from peregrine.kernels.linear import PerHeadFormat, PlainPerHead, pack_per_head
from peregrine.kernels.residual import Residual
from peregrine.kernels.runtime.gpu import triton_ready
from peregrine.models.config import MLAConfig, ModelConfig
from peregrine.models.layers import QKV, Linear, LiveRows, Packable, RMSNorm
from peregrine.models.parallel import ALONE, Ranks, Shard

NORM_EPS = 1e-6  # of the norms inside the attention, whatever rms_norm_eps says


class PerHeadLinear(Packable[PerHeadFormat]):
    """One linear layer per head."""

    def __init__(self, num_heads: int, in_size: int, out_size: int, shard: Shard | None = None) -> None:
        super().__init__(torch.empty(num_heads, out_size, in_size))
        self.shard = shard

    def _pack(self, train: bool) -> PerHeadFormat:
        assert self.weight is not None
        return PlainPerHead(self.weight) if train else pack_per_head(self.weight)

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, heads, in] -> [N, heads, out], written to `out` if that is given."""
        return self.format.linear(x, out)


class MLAAttention(nn.Module):
    """Projections, norms and rotation around `attend`, as in `Attention`.

    `q` projects to the queries themselves or, if the model has a query rank, to a vector of that rank. Of several ranks
    each has its own heads and every latent.
    """

    def __init__(self, config: ModelConfig, latent: MLAConfig, layer: int, split: bool, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.layer, self.latent, self.ranks = layer, latent, ranks
        own, count = ranks.span(config.num_heads), config.num_heads
        self.num_heads = own[1] - own[0]
        hidden, bias, key_dim, ranked = config.hidden_size, config.qkv_bias, latent.key_dim, latent.q_rank is not None
        heads_size, rows = count * latent.q_dim, (own[0] * latent.q_dim, own[1] * latent.q_dim)
        q_size = latent.q_rank or heads_size  # of all ranks
        self.q_size = latent.q_rank or self.num_heads * latent.q_dim
        both = None if ranked else ranks.keep(q_size + key_dim, rows, (q_size, q_size + key_dim))
        self.qkv = None if split else Linear(hidden, q_size + key_dim, bias, both)
        self.q = Linear(hidden, q_size, bias, None if ranked else ranks.keep(q_size, rows)) if split else None
        self.kv = Linear(hidden, key_dim, bias) if split else None
        self.q_norm = None if latent.q_rank is None else RMSNorm(latent.q_rank, NORM_EPS)
        self.q_up = None
        if latent.q_rank is not None:
            self.q_up = Linear(latent.q_rank, heads_size, shard=ranks.keep(heads_size, rows))
        self.kv_norm = RMSNorm(latent.kv_rank, NORM_EPS)
        heads = ranks.keep(count, own)
        self.w_uk = PerHeadLinear(self.num_heads, latent.nope_dim, latent.kv_rank, heads)
        self.w_uv = PerHeadLinear(self.num_heads, latent.kv_rank, latent.value_dim, heads)
        self.head_widths, _ = ranks.head_widths(count, 1, latent.value_dim)
        self.out = Linear(count * latent.value_dim, hidden, config.out_bias, ranks.split(hidden))

    def project(self, residual: Residual, positions: Tensor, table: Tensor, live: LiveRows | None = None) -> QKV:
        """Queries and keys of the normed residual [N, in]; queries of the live rows alone, if given."""
        q, kv = self._linears(residual, live)
        nope, q_rope = torch.split_with_sizes(q, (self.latent.nope_dim, self.latent.rope_dim), 2)
        q_positions = positions if live is None else live.positions
        deferred = DeferredMLARope(q_rope, q_positions, positions, table, self.kv_norm.weight, self.kv_norm.eps)
        k = kv[:, None]
        if self.out.packed is not None and triton_ready(q):
            absorbed = q.new_empty(q.shape[0], self.num_heads, self.latent.key_dim)
            self.w_uk.forward(nope, out=absorbed[..., : self.latent.kv_rank])
            return QKV(absorbed, k, k[..., : self.latent.kv_rank], deferred)
        q, k = mla_rope(self.w_uk.forward(nope), k, deferred)
        return QKV(q, k, k[..., : self.latent.kv_rank])

    def _linears(self, residual: Residual, live: LiveRows | None) -> tuple[Tensor, Tensor]:
        """Queries [R, heads, nope + rope] and keys [N, key_dim] before norm and rotation."""
        if self.qkv is not None:
            assert live is None, "this layer projects queries together with keys"
            both = self.qkv.format.linear_normed(residual)
            q, kv = torch.split_with_sizes(both, (self.q_size, self.latent.key_dim), 1)
        else:
            assert self.q is not None
            assert self.kv is not None
            kv = self.kv.format.linear_normed(residual)
            q = self.q.format.linear_normed(residual if live is None else live.residual)
        if self.q_norm is not None and self.q_up is not None:
            q = self.q_up.forward(self.q_norm.forward(q))
        return q.view(q.shape[0], self.num_heads, self.latent.q_dim), kv

    def merge_heads(self, attended: Tensor) -> Tensor:
        """The result of attention as the output projection reads it, of all ranks: -> [N, heads * value_dim]."""
        return self.ranks.gather(self.w_uv.forward(attended).flatten(1), self.head_widths)
