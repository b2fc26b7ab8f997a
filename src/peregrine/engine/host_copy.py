"""Copies between the device and the host that do not make the host wait."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.config import MAX_LAG

RING_SIZE = MAX_LAG + 2  # rounds in flight, the one being read, and one to spare
UPLOADS = 4  # copies to the device that may be queued before the host waits for the oldest


class Ring:
    """Pinned host buffers of one shape, used in turn."""

    def __init__(self, like: Tensor) -> None:
        pinned = like.is_cuda
        self._buffers = deque(torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned) for _ in range(RING_SIZE))

    def copy(self, value: Tensor) -> Tensor:
        """Queue a copy of `value` into the least recently used buffer; returns that buffer."""
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        return buffer.copy_(value, non_blocking=True)


class Rings:
    """A ring for each thing that a round copies to the host once: no copy is overwritten before it is read."""

    def __init__(self) -> None:
        self._rings: dict[tuple[str, tuple[int, ...]], Ring] = {}

    def copy(self, name: str, value: Tensor) -> Tensor:
        """Queue a copy into a pinned buffer; a value on the host is returned as it is."""
        if not value.is_cuda:
            return value
        key = name, tuple(value.shape)
        if key not in self._rings:
            self._rings[key] = Ring(value)
        return self._rings[key].copy(value)


class UploadRing:
    """Pinned host memory of int64 words, used in turn for copies to the device."""

    def __init__(self, words: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._buffers = deque(
            (torch.empty(words, dtype=torch.int64, pin_memory=pinned), torch.cuda.Event() if pinned else None)  # type: ignore[no-untyped-call]
            for _ in range(UPLOADS)
        )

    @contextmanager
    def next(self) -> Iterator[Tensor]:
        """The memory that was used longest ago, whose copy has ended; another copy of it is queued in the block."""
        buffer, copied = self._buffers[0]
        self._buffers.rotate(-1)
        if copied is not None:
            copied.synchronize()
        yield buffer
        if copied is not None:
            copied.record()


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Tensors being copied to host memory of their own, for values that must outlive a ring's buffers."""

    values: tuple[Tensor, ...]
    ready: torch.cuda.Event | None  # passed once the copies are done; None: the values were on the host already

    @staticmethod
    def of(*values: Tensor) -> "HostCopy":
        """Queue copies of the values; tensors on the host are kept as they are."""
        if not values[0].is_cuda:
            return HostCopy(values, None)
        copies = tuple(value.to("cpu", non_blocking=True) for value in values)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return HostCopy(copies, ready)

    def read(self) -> tuple[Tensor, ...]:
        """Wait for the copies and return them."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.values


def event_after(value: Tensor) -> torch.cuda.Event | None:
    """Passed once the work queued so far on the value's device is done; None on the host, which has done it."""
    if not value.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
