"""Memory that CPU graphs share: what a recorded step computes on its way is needed only while it runs.

A tensor that is made while a step is recorded gets a block of the arena, and gives it back when nothing refers to it
any more, so that later tensors of the same step lie in the same place, as they would if the step were just run. All
steps of one arena use the same blocks, one after the other: so it is as large as the largest of them, whatever their
number, and stays in the processor's cache. A block that is still in use when a step was recorded, as its outputs are,
is no other step's.
"""

import weakref
from bisect import bisect, insort
from collections.abc import Iterable
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 1 << 18  # bytes that are added at a time, at least
ALIGNED = 64  # bytes: a line of the cache

Bytes = NDArray[np.uint8]


class Arena:
    """Blocks of memory, each for as long as its tensor lives; they are known by the address of their first byte."""

    def __init__(self) -> None:
        self._chunks: list[tuple[int, Bytes]] = []  # by address
        self._gaps: list[tuple[int, int]] = []  # free memory: (first, end), ascending and never adjacent
        self._blocks: dict[int, tuple[int, int]] = {}  # in use: first -> (end, number)
        self._numbers = count()

    @property
    def num_bytes(self) -> int:
        return sum(len(chunk) for _, chunk in self._chunks)

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape, strides and type in the arena; the given one, if it has no memory."""
        size = tensor.untyped_storage().nbytes()
        if not size:
            return tensor
        whole, number = -(-size // ALIGNED) * ALIGNED, next(self._numbers)
        first = self._take(whole)
        low, chunk = self._chunks[bisect(self._chunks, first, key=lambda held: held[0]) - 1]
        memory = chunk[first - low : first - low + size]
        self._blocks[first] = first + whole, number
        weakref.finalize(memory, give_back, weakref.ref(self), first, number).atexit = False
        held = torch.from_numpy(memory).view(tensor.dtype)  # its storage refers to the array
        return held.as_strided(tensor.shape, tensor.stride())

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Let other steps have the memory of these tensors, though they are still in use."""
        for first in {tensor.untyped_storage().data_ptr() for tensor in tensors}:
            if first in self._blocks:
                self.free(first, self._blocks[first][1])

    def free(self, first: int, number: int) -> None:
        """Add a block to the gaps, unless it was freed before: then another may be in its place."""
        end, current = self._blocks.get(first, (0, None))
        if current != number:
            return
        del self._blocks[first]
        place = bisect(self._gaps, (first, end))
        if place < len(self._gaps) and self._gaps[place][0] == end:
            end = self._gaps.pop(place)[1]
        if place and self._gaps[place - 1][1] == first:
            first = self._gaps.pop(place - 1)[0]
        insort(self._gaps, (first, end))

    def _take(self, size: int) -> int:
        """The first byte of the first gap that has so many, without them from now on."""
        for place, (first, end) in enumerate(self._gaps):
            if end - first >= size:
                self._gaps[place : place + 1] = [(first + size, end)] if end - first > size else []
                return first
        memory: Bytes = torch.empty(max(size, CHUNK) + 2 * ALIGNED, dtype=torch.uint8).numpy()
        skipped = ALIGNED - address(memory) % ALIGNED  # and the rest is left at the end: chunks are never adjacent
        chunk = memory[skipped : skipped + max(size, CHUNK)]
        insort(self._chunks, (address(chunk), chunk), key=lambda held: held[0])
        insort(self._gaps, (address(chunk), address(chunk) + len(chunk)))
        return self._take(size)


def give_back(arena: "weakref.ref[Arena]", first: int, number: int) -> None:
    """A block's tensor is gone."""
    if (alive := arena()) is not None:
        alive.free(first, number)


def address(memory: Bytes) -> int:
    """Of the first byte."""
    return int(memory.ctypes.data)
