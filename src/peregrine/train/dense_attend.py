"""Attention for training: whole rows side by side, causal, differentiable, without pages."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from peregrine.attention import Attend, Deferred, LayerAttention


def dense_attend(layers: Sequence[LayerAttention], rows: int) -> Attend:
    """`attend` for a forward over `rows` rows of equal length, flattened; every row starts at position 0."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Deferred | None = None) -> Tensor:
        assert turn is None, "training turns before it attends"
        group = q.shape[1] // k.shape[1]
        q, k, v = (_by_row(x, rows) for x in (q, k.to(q.dtype), v.to(q.dtype)))  # [rows, heads, S, D]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        out = _attend_layer(layers[layer], q, k, v)  # [rows, Hq, S, D]
        return out.transpose(1, 2).flatten(0, 1)

    return attend


def _by_row(x: Tensor, rows: int) -> Tensor:
    return x.reshape(rows, -1, *x.shape[1:]).transpose(1, 2)


def _attend_layer(layer: LayerAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if layer.window is None and layer.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale)
    length = q.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    if layer.window is not None:
        visible = visible.triu(1 - layer.window)
    if layer.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=layer.scale)
    scores = (q @ k.transpose(2, 3) * layer.scale).masked_fill(~visible, float("-inf"))  # [rows, Hq, S, S]
    sinks = layer.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], dim=3).softmax(dim=3)[..., :-1] @ v
