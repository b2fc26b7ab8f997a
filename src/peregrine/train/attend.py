"""Attention for training: differentiable, without pages. Rows of equal length are flattened into one sequence.

`dense_attend` is for rows that are one sequence each, `packed_attend` for rows of several documents, `UnrolledAttend`
for a draft head: at step j, index p stands at position p + j and sees the keys that step 0 made of indices up to p,
and its own keys of steps 1 to j. That is what a chain of drafts that starts at p sees.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from peregrine.attention import Attend, Deferred, LayerAttention
from peregrine.train.rows import Rows

RowAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v), each [B, heads, S, D]


def dense_attend(layers: Sequence[LayerAttention], num_rows: int) -> Attend:
    """Causal attention within each of `num_rows` rows."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec, length = layers[layer], q.shape[2]
        if spec.window is None and spec.sinks is None:
            return _attention(spec, q, k, v, None)
        seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=q.device).tril()
        return _attention(spec, q, k, v, seen if spec.window is None else seen.triu(1 - spec.window))

    return _by_row(attend, num_rows)


def packed_attend(layers: Sequence[LayerAttention], rows: Rows) -> Attend:
    """Causal attention within each document of the rows."""
    seen = _same_document(rows)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _attention(layers[layer], q, k, v, _in_window(seen, rows, layers[layer].window, 0))

    return _by_row(attend, len(rows.tokens))


class UnrolledAttend:
    """The `attend` of each unrolled step of a draft head, over the keys and values of all steps so far."""

    def __init__(self, layers: Sequence[LayerAttention], rows: Rows) -> None:
        self.layers, self.rows = layers, rows
        self.seen = _same_document(rows)
        self.num_steps = 0
        self._steps: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> (k, v) of each step

    def next_step(self) -> Attend:
        """The `attend` of the next step; the first call gives step 0."""
        step, self.num_steps = self.num_steps, self.num_steps + 1

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            spec, steps = self.layers[layer], self._steps.setdefault(layer, [])
            assert len(steps) == step, "each step runs every layer once"
            steps.append((k, v))
            seen = _in_window(self.seen, self.rows, spec.window, step)
            first = 1 if spec.window is None else max(1, step - spec.window + 1)  # step i stands step - i back
            return _softmax_attention(spec, q, *steps[0], seen, steps[first : step + 1])

        return _by_row(attend, len(self.rows.tokens))


def _by_row(attend: RowAttend, num_rows: int) -> Attend:
    """An `attend` over flattened rows [B * S, heads, D] from one over [B, heads, S, D]."""

    def flat(layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Deferred | None = None) -> Tensor:
        assert rope is None, "training rotates before it attends"
        heads = (x.to(q.dtype).reshape(num_rows, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return attend(layer, *heads).transpose(1, 2).flatten(0, 1)

    return flat


def _same_document(rows: Rows) -> Tensor:
    """Whether place i sees place j: j <= i in the same document. [B, 1, S, S] bool"""
    return (rows.documents[:, :, None] == rows.documents[:, None, :]).tril()[:, None]


def _in_window(seen: Tensor, rows: Rows, window: int | None, step: int) -> Tensor:
    """The keys of `seen` that lie within the window of a query which stands `step` places further on."""
    if window is None:
        return seen
    return seen & (rows.positions[:, None, :] > rows.positions[:, :, None] + step - window)[:, None]


def _attention(spec: LayerAttention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """Attention over the keys in `seen`, or causal without it. [B, Hq, S, D]"""
    if spec.sinks is not None:
        assert seen is not None
        return _softmax_attention(spec, q, k, v, seen, [])
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, scale=spec.scale)


def _softmax_attention(
    spec: LayerAttention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """One softmax over the keys in `seen`, each query's own keys and values, and a sink. [B, Hq, S, D]"""
    batch, num_heads, length, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, length, head_dim)  # [B, Hkv, G, S, D]
    scores = grouped @ k[:, :, None].transpose(3, 4) * spec.scale  # [B, Hkv, G, S, S]
    # A finite fill: a query that sees only its own keys through a narrow window must not give NaN.
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
