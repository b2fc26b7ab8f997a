"""Values on their way from the device to the host: copied without a wait, read once they have copied."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from peregrine.config import MAX_LAG

RING_SIZE = MAX_LAG + 2  # rounds in flight, the one being read, and one to spare


class Ring:
    """Pinned host buffers of one shape, used in turn."""

    def __init__(self, like: Tensor) -> None:
        pinned = like.is_cuda
        self._buffers = deque(torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned) for _ in range(RING_SIZE))

    def copy(self, value: Tensor) -> Tensor:
        """Queue a copy into the buffer that was used longest ago."""
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        return buffer.copy_(value, non_blocking=True)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Host copies of values that are kept for longer than a ring holds them."""

    values: tuple[Tensor, ...]
    ready: torch.cuda.Event | None  # None: there was nothing to copy

    @staticmethod
    def of(*values: Tensor) -> "HostCopy":
        """Queue the copies, into pinned memory of their own."""
        if not values[0].is_cuda:
            return HostCopy(values, None)
        copied = tuple(value.to("cpu", non_blocking=True) for value in values)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        return HostCopy(copied, ready)

    def read(self) -> tuple[Tensor, ...]:
        """The values, once they are there."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.values
