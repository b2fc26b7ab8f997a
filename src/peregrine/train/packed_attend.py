"""Attention for training on packed rows: plain for the target, unrolled for a draft head.

Unrolled, the entry of index p at step j lies at position p + j. It sees the entries that step 0 made of the
indices up to p, and its own entries of steps 1 to j: what a chain of drafts sees that starts at p.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from peregrine.attention import Attend, Deferred, LayerAttention
from peregrine.train.sample_rows import Rows


def packed_attend(layers: Sequence[LayerAttention], rows: Rows) -> Attend:
    """`attend` for a forward over whole rows: a token sees its own sample up to itself."""
    seen = visible(rows)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Deferred | None = None) -> Tensor:
        assert turn is None, "training turns before it attends"
        spec, count = layers[layer], len(rows.tokens)
        q, k, v = (_by_head(x, count) for x in (q, k.to(q.dtype), v.to(q.dtype)))
        near = seen if spec.window is None else seen & _near(rows, spec.window, 0)
        if spec.sinks is not None:
            out = _softmax_attention(spec, q, k, v, [], near)
        else:
            group = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=near, scale=spec.scale)
        return out.transpose(1, 2).flatten(0, 1)

    return attend


class UnrolledAttend:
    """Keys and values of every step so far, and the `attend` of each next step."""

    def __init__(self, layers: Sequence[LayerAttention], rows: Rows) -> None:
        self.layers, self.rows = layers, rows
        self.seen = visible(rows)  # [B, 1, S, S]
        self.steps = 0
        self._held: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> (k, v) [B, Hkv, S, D] by step

    def next_step(self) -> Attend:
        """The `attend` of the next step; the first call gives step 0."""
        step, self.steps = self.steps, self.steps + 1

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Deferred | None = None) -> Tensor:
            assert turn is None, "training turns before it attends"
            spec, count = self.layers[layer], len(self.rows.tokens)
            q, k, v = (_by_head(x, count) for x in (q, k.to(q.dtype), v.to(q.dtype)))
            held = self._held.setdefault(layer, [])
            assert len(held) == step, "each step runs every layer once"
            held.append((k, v))
            near = self.seen if spec.window is None else self.seen & _near(self.rows, spec.window, step)
            # An own entry of step i lies step - i back.
            first = 1 if spec.window is None else max(1, step - spec.window + 1)
            out = _softmax_attention(spec, q, *held[0], held[first : step + 1], near)
            return out.transpose(1, 2).flatten(0, 1)

        return attend


def visible(rows: Rows) -> Tensor:
    """Which places of its row each place sees: its own sample's, up to itself. [B, 1, S, S] bool"""
    same = rows.documents[:, :, None] == rows.documents[:, None, :]
    return same.tril()[:, None]


def _near(rows: Rows, window: int, step: int) -> Tensor:
    """Keys of step 0 within the window of a query that has gone `step` places on. [B, 1, S, S] bool"""
    positions = rows.positions
    return (positions[:, None, :] > positions[:, :, None] + step - window)[:, None]


def _by_head(x: Tensor, rows: int) -> Tensor:
    """[B * S, heads, D] -> [B, heads, S, D]"""
    return x.reshape(rows, -1, *x.shape[1:]).transpose(1, 2)


def _softmax_attention(
    spec: LayerAttention, q: Tensor, k: Tensor, v: Tensor, own: Sequence[tuple[Tensor, Tensor]], seen: Tensor
) -> Tensor:
    """One softmax over the keys k that are seen, the own entries of each query, and a sink. [B, Hq, S, D]"""
    batch, num_heads, length, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, length, head_dim)  # [B, Hkv, G, S, D]
    scores = grouped @ k[:, :, None].transpose(3, 4) * spec.scale  # [B, Hkv, G, S, S]
    # Finite, so that a place that sees nothing but itself through a narrow window has no NaN.
    columns = [scores.float().masked_fill(~seen[:, :, None], -1e30)]
    columns += [((grouped * key[:, :, None]).sum(4, keepdim=True) * spec.scale).float() for key, _ in own]
    if spec.sinks is not None:
        sinks = spec.sinks.float().view(1, k.shape[1], -1, 1, 1)
        columns.append(sinks.expand(batch, -1, -1, length, 1))
    weights = torch.cat(columns, dim=4).softmax(dim=4).to(q.dtype)
    out = weights[..., :length] @ v[:, :, None]  # [B, Hkv, G, S, D]
    for i, (_, value) in enumerate(own):
        out = out + weights[..., length + i, None] * value[:, :, None]
    return out.reshape(batch, num_heads, length, head_dim)
