"""Which recorded round serves a batch, and how results reach the host."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peregrine.config import MAX_LAG
from peregrine.engine.graphs import Graphs
from peregrine.engine.host_copy import RING_SIZE, HostCopy, Ring
from peregrine.engine.output import RoundDrafts
from peregrine.engine.round_result import offered_drafts
from peregrine.engine.runner import VARIANTS, Runner
from peregrine.kernels.sampling.reference import Features
from peregrine.sampling import MAX_LOGPROBS
from peregrine.spec.state import MAX_VIEWS, Rows
from spec.harness import build

PARTS = ("sampled", "filtered", "penalised", "biased", "min_len")
features = st.builds(Features, *(st.booleans() for _ in PARTS), st.none() | st.integers(0, MAX_LOGPROBS))


def parts_of(asked: Features) -> set[str]:
    return {name for name in PARTS if getattr(asked, name)}


@given(features, features)
def test_a_variant_covers_a_batch_if_it_does_all_that_is_needed(one: Features, other: Features) -> None:
    enough = parts_of(one) >= parts_of(other)
    if other.logprobs is not None:
        enough = enough and one.logprobs is not None and one.logprobs >= other.logprobs
    assert one.covers(other) == enough


def replayed(asked: Features, rows: Rows) -> tuple[Rows, Features]:
    """The key of the recording that serves a batch."""
    keys: list[tuple[Rows, Features]] = []

    class FakeGraphs(Graphs[object]):
        def __init__(self) -> None:
            pass

        def replay(self, key: tuple[Rows, Features]) -> object:  # type: ignore[override]
            keys.append(key)
            return None

    runner = Runner.__new__(Runner)
    runner.graphs = FakeGraphs()  # type: ignore[assignment]
    runner._replay(rows, asked)
    return keys[0]


@given(features)
def test_the_cheapest_recording_that_covers_a_batch_serves_it(asked: Features) -> None:
    rows, variant = replayed(asked, Rows(4, 128))
    assert rows == Rows(4, 128)
    assert variant.covers(asked)
    assert not any(cheaper.covers(asked) for cheaper in VARIANTS[: VARIANTS.index(variant)])


def test_each_variant_covers_those_before_it() -> None:
    """Cheapest first: each does all that those before it do."""
    assert VARIANTS[0] == Features()
    for one, other in pairwise(VARIANTS):
        assert other.covers(one)
        assert not one.covers(other)
    assert VARIANTS[-1].covers(Features(True, True, True, True, True, MAX_LOGPROBS))


def test_recorded_rounds_use_every_place_and_eager_ones_only_those_needed() -> None:
    runner = build(max_len=700).engine.runner
    assert runner.rows(3, lambda: 100) == Rows(3, 128)
    runner.graphs = Graphs.__new__(Graphs)
    assert runner.rows(3, lambda: 100) == Rows(3, runner.seats.max_places)


def test_a_ring_keeps_what_rounds_in_flight_have_not_read() -> None:
    ring = Ring(torch.zeros(2, dtype=torch.int64))
    copied = [ring.copy(torch.tensor([i, i])) for i in range(RING_SIZE)]
    assert [int(buffer[0]) for buffer in copied] == list(range(RING_SIZE))
    again = ring.copy(torch.tensor([99, 99]))
    assert again.data_ptr() == copied[0].data_ptr()  # the one used longest ago
    assert int(copied[1][0]) == 1
    # As many as may be queued, the one that is being read, and one to spare.
    assert RING_SIZE >= MAX_LAG + 2


def test_a_host_copy_holds_its_values() -> None:
    values = torch.arange(3), torch.ones(2)
    assert all(a is b for a, b in zip(HostCopy.of(*values).read(), values, strict=True))


def test_a_host_copy_waits_for_its_event() -> None:
    class Event:
        waited = 0

        def synchronize(self) -> None:
            self.waited += 1

    event = Event()
    copies = replace(HostCopy.of(torch.ones(1)), ready=event)  # type: ignore[arg-type]
    copies.read()
    assert event.waited == 1


@pytest.mark.parametrize(("count", "tokens"), [(0, []), (2, [11, 12])])
def test_offered_drafts_are_the_first_nodes_after_the_root(count: int, tokens: list[int]) -> None:
    offered = [0] + [1] * count + [0] * (3 - count)
    window = torch.tensor([[10, 11, 12, 13], [0, 0, 1, 2], offered])
    assert offered_drafts(window, [1]) == RoundDrafts(tokens, [0, 1][:count], [1])


def test_the_views_of_batch_shapes_are_bounded() -> None:
    seats = build().engine.runner.seats
    first = seats.view(Rows(1, 64))
    assert seats.view(Rows(1, 64)) is first  # kept while there is room
    for places in range(64, 64 * (MAX_VIEWS + 40), 64):
        seats.view(Rows(1, places))
    assert len(seats._views) <= MAX_VIEWS
