"""Times on a CUDA device, and the peaks that they are compared with."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from peregrine.engine.graphs import Graphs

COPY_BYTES, MATRIX_SIZE, PEAK_REPEATS = 2**31, 8192, 10
KEPT_REPEATS = 800  # of the matrix product: about 1.3 s on an H200, which meets its power limit within half a second
GRAPH_REPEATS = 20
COLD_BYTES = 2**28  # several times a device's cache


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the device reaches in one large operation."""

    bytes_per_s: float  # of a copy, read and written bytes counted
    operations_per_s: float  # of a matrix product, in the model's dtype
    kept_operations_per_s: float  # of the same product repeated, when the device has come to its power limit


def measure_peaks(dtype: torch.dtype) -> Peaks:
    """Both peaks of the current device."""
    bandwidth = copy_bandwidth()
    a, b = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE, device="cuda", dtype=dtype)
    operations = 2 * MATRIX_SIZE**3
    first_ms = sum(call_times_ms(lambda: a @ b, PEAK_REPEATS)) / PEAK_REPEATS
    kept_ms = sum(call_times_ms(lambda: a @ b, KEPT_REPEATS)[KEPT_REPEATS // 2 :]) / (KEPT_REPEATS - KEPT_REPEATS // 2)
    return Peaks(bandwidth, operations / first_ms * 1e3, operations / kept_ms * 1e3)


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read and written bytes counted."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = sum(call_times_ms(lambda: target.copy_(source), PEAK_REPEATS)) / PEAK_REPEATS
    return 2 * COPY_BYTES / copy_ms * 1e3


def graph_ms(call: Callable[[], list[torch.Tensor]], device: torch.device) -> float:
    """Median milliseconds of a call that is recorded as a CUDA graph."""
    graphs: Graphs[list[torch.Tensor]] = Graphs(device)
    graphs.record("call", call)
    return sorted(call_times_ms(lambda: graphs.replay("call"), GRAPH_REPEATS))[GRAPH_REPEATS // 2]


def call_times_ms(call: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each call on the device, after one that is not timed; the calls are queued without a wait."""
    events = [new_event() for _ in range(repeats + 1)]
    call()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return [float(first.elapsed_time(last)) for first, last in itertools.pairwise(events)]


def new_event() -> torch.cuda.Event:
    """An event that takes the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
