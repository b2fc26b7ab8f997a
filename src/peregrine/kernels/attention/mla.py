"""Queries and keys of multi-head latent attention (MLA): one key for all heads, whose first part is its value.

A key is [normed latent | rotated part], kv_rank + rope_dim entries. A query is [q_nope @ w_uk | rotated part] in the
same order, so scores are plain dot products.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.kernels.norm import rms_norm
from peregrine.kernels.rope import rope


@dataclass(frozen=True, slots=True)
class DeferredMLARope:
    """What is still to be done to MLA queries and keys: the latent's norm, and the rotation of the other part."""

    q_rope: Tensor  # [R, h, rope_dim] the part of the queries to rotate
    q_positions: Tensor  # [R] i64
    positions: Tensor  # [N] i64 of the keys
    table: Tensor  # [C, rope_dim]
    kv_norm: Tensor  # [kv_rank]
    eps: float


def mla_rope(q: Tensor, k: Tensor, deferred: DeferredMLARope) -> tuple[Tensor, Tensor]:
    """Queries [R, h, kv_rank + rope_dim] and keys [N, 1, kv_rank + rope_dim], normed and rotated.

    Only the first kv_rank entries of q are read; the others are made from deferred.q_rope. k is as it was projected:
    the latent and the part to rotate. A GPU does this in the launch that stores the keys.
    """
    rank = deferred.kv_norm.shape[0]
    q_rotated = rope(deferred.q_rope, deferred.q_positions, deferred.table)
    k_rotated = rope(k[..., rank:], deferred.positions, deferred.table)
    latent = rms_norm(k[..., :rank], deferred.kv_norm, deferred.eps)
    return torch.cat((q[..., :rank], q_rotated), dim=2), torch.cat((latent, k_rotated), dim=2)
