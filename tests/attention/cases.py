"""The backends that run on any machine, and a check of their outputs against float64."""

from collections.abc import Sequence

from peregrine.attention import AttentionBackend, LayerAttention
from peregrine.attention.conformance.paging import PLAIN, Layout, attend
from peregrine.attention.conformance.problem import Row, answer
from peregrine.attention.numba_backend import NumbaBackend
from peregrine.attention.torch_backend import TorchBackend

BACKENDS: list[AttentionBackend] = [b for b in (TorchBackend(), NumbaBackend()) if not b.missing()]


def check(backend: AttentionBackend, rows: Sequence[Row], layer: LayerAttention, layout: Layout = PLAIN) -> None:
    """Every output is within its bound of the float64 result."""
    for out, row in zip(attend(backend, rows, layer, layout), rows, strict=True):
        right = answer(row, layer, out.dtype)
        assert bool(((out.double() - right.out).abs() <= right.bound).all())
