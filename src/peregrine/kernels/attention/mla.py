"""Queries and keys of latent attention (MLA): one key for all heads, whose first part is its value.

A key is the normed latent beside a turned part: [kv_rank | rope_dim]. A query is its absorbed part beside its own
turned part, in the same order, so that scores are plain dot products.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.norm import rms_norm
from peregrine.kernels.rope import rope


@dataclass(frozen=True, slots=True)
class DeferredMLARope:
    """What is still to be done to latent queries and keys: the latent's norm, and the rotation of the rest."""

    q_rope: Tensor  # [R, h, rope_dim] the part of the queries that is still to be turned
    q_positions: Tensor  # [R] i64
    positions: Tensor  # [N] i64 of the keys
    table: Tensor  # [C, rope_dim]
    kv_norm: Tensor  # [kv_rank]
    eps: float


def latent_splits(num_keys: int) -> int:
    """How many splits a query has at most on a GPU that sees so many keys or fewer (latent_tiles_gpu.py)."""
    return min(132, -(-num_keys // 128))


def turn_latent(q: Tensor, k: Tensor, turn: DeferredMLARope) -> tuple[Tensor, Tensor]:
    """Queries [R, h, kv_rank + rope_dim] and keys [N, 1, kv_rank + rope_dim] as attention reads them.

    q begins with its absorbed part, and what comes after that is not read: it is made from turn.q_rope. k is the latent
    and the part to be turned, as they were projected. A GPU does this while it stores the keys.
    """
    rank = turn.kv_norm.shape[0]
    turned_q = rope(turn.q_rope, turn.q_positions, turn.table)
    turned_k = rope(k[..., rank:], turn.positions, turn.table)
    latent = rms_norm(k[..., :rank], turn.kv_norm, turn.eps)
    return torch.cat((q[..., :rank], turned_q), dim=2), torch.cat((latent, turned_k), dim=2)
