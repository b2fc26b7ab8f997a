"""Memory that CPU graphs share: what a recorded step computes on its way is needed only while it runs.

A tensor that is made while a step is recorded gets a block of the arena, and gives it back when nothing refers to it
any more, so that later tensors of the same step lie in the same place, as they would if the step were just run. All
steps of one arena use the same blocks, one after the other: so it is as large as the largest of them, whatever their
number, and stays in the processor's cache. A block that is still in use when a step was recorded, as its outputs are,
is no other step's.
"""

import weakref
from collections.abc import Iterable
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 1 << 18  # bytes that are added at a time, at least
ALIGNED = 64  # bytes: a line of the cache

Bytes = NDArray[np.uint8]
Block = tuple[int, int]  # the addresses of its first byte, and after its last


class Arena:
    """Blocks of memory, each for as long as its tensor lives."""

    def __init__(self) -> None:
        self._chunks: list[Bytes] = []
        self._blocks: dict[int, Block] = {}  # in use, by number
        self._numbers = count()

    @property
    def num_bytes(self) -> int:
        return sum(len(chunk) for chunk in self._chunks)

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape and type in the arena; the given one, if it is empty or not dense."""
        if not tensor.nbytes or not tensor.is_contiguous():
            return tensor
        memory = self._take(-(-tensor.nbytes // ALIGNED) * ALIGNED)
        return torch.from_numpy(memory)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Let other steps have the memory of these tensors, though they are still in use."""
        first_bytes = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._blocks = {number: block for number, block in self._blocks.items() if block[0] not in first_bytes}

    def _take(self, size: int) -> Bytes:
        for chunk in self._chunks:
            low = address(chunk)
            start, high = low, low + len(chunk)
            for used, end in sorted(block for block in self._blocks.values() if low <= block[0] < high):
                if used - start >= size:
                    break
                start = end
            if high - start >= size:
                return self._block(chunk[start - low : start - low + size])
        memory: Bytes = torch.empty(max(size, CHUNK) + ALIGNED, dtype=torch.uint8).numpy()
        skipped = -address(memory) % ALIGNED
        self._chunks.append(memory[skipped : skipped + max(size, CHUNK)])
        return self._block(self._chunks[-1][:size])

    def _block(self, memory: Bytes) -> Bytes:
        """Count these bytes as used until the array is gone, to which the storage of a tensor refers."""
        number, low = next(self._numbers), address(memory)
        self._blocks[number] = low, low + len(memory)
        weakref.finalize(memory, give_back, weakref.ref(self), number).atexit = False
        return memory


def give_back(arena: "weakref.ref[Arena]", number: int) -> None:
    """A block's tensor is gone."""
    if (alive := arena()) is not None:
        alive._blocks.pop(number, None)


def address(memory: Bytes) -> int:
    """Of the first byte."""
    return int(memory.__array_interface__["data"][0])
