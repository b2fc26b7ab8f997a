"""Where one forward reads and writes, and what its layers add. Built once per forward; tensors stay on the device."""

from dataclasses import dataclass

from torch import Tensor

from peregrine.attention.window import Window


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which keys the queries of one forward see, and where its own keys go.

    Key s of row r is in slot page_table[r, s // page_size] * page_size + s % page_size. A causal query at position p
    sees keys [0, p]. With `ancestors`, a query sees the keys before past_len and key past_len + j for each set bit j of
    its word, in ascending order, so a tree path equals the chain of its tokens.
    """

    window: Window  # the query tokens of this forward
    positions: Tensor  # [N] i64
    q_starts: Tensor  # [R + 1] i64
    past_lens: Tensor  # [R] i64 tokens cached before this forward: their keys may be read before its own are written
    page_table: Tensor  # [R, P] i64 or i32; entries past the row's pages are scratch page 0
    page_size: int
    slots: Tensor  # [M] i64 where this forward's keys and values go; M >= N
    ancestors: Tensor | None  # [R, q_len] i64 words of a tree, [N] of ragged ones; None: causal by position


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What is particular to one layer's attention."""

    scale: float  # multiplies q . k
    window: int | None  # a query at position p sees keys above p - window; None: all
    sinks: Tensor | None  # [Hq] logits that join the softmax denominator only; None: no sinks
    cap: float | None = None  # scores become cap * tanh(score / cap); None: as they are
