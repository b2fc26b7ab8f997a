"""A check on every forward of a test: what it counts as cached before it, it does not write."""

from typing import Any

import pytest
import torch

from peregrine.attention.backend import Attend
from peregrine.attention.metadata import AttentionMetadata
from peregrine.spec.bound import Bound


def check_cached_keys(monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """From now on; returns, as they come, whether forwards have fewer queries than keys in their last layer."""
    bind, shapes = Bound.bind, set[bool]()

    def checked(self: Bound[Any], metadata: AttentionMetadata) -> Attend:
        written, size = set(metadata.slots.tolist()), metadata.page_size
        for past, pages in zip(metadata.past_lens.tolist(), metadata.page_table, strict=True):
            keys = torch.arange(past)
            cached = pages[keys // size].long() * size + keys % size
            both = written & set(cached[cached >= size].tolist())  # the scratch page is nobody's
            assert not both, f"{len(both)} of {past} keys that count as cached are written by this forward"
        shapes.add(len(metadata.positions) < len(metadata.slots))
        return bind(self, metadata)

    monkeypatch.setattr(Bound, "bind", checked)
    return shapes
