"""Copies of whole pages between the KV stores and host memory, beside the device's other work.

On CUDA the host memory is pinned and copies run on a stream of their own, in the order they were asked for. A copy
begins when the work queued before it on the current stream is done, and nothing waits for it: its event says when it
has ended, and until then neither its device pages may be reused nor what it brings be read. On a CPU a copy is done
when the call returns.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from peregrine.cache.store import KVStore
from peregrine.hardware import upload

STAGED_BYTES = 2**25  # gathered on the device at a time, between the stores and host memory
BLOCK_BYTES = 2**30  # host memory is taken in blocks: torch rounds pinned allocations up to powers of two


class Event(Protocol):
    """What says that a copy has ended, such as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether it has."""

    def synchronize(self) -> None:
        """Wait until it has."""


class PageCopies:
    """Host memory for `num_slots` pages, each with its bytes of all stores together, and copies to and from it."""

    def __init__(self, stores: Sequence[KVStore], num_slots: int) -> None:
        device = stores[0].keys.device
        on_cuda = device.type == "cuda"
        self.num_slots, self.device = num_slots, device
        pages = [part.view(part.shape[0], store.num_pages, -1) for store in stores for part in store.parts]
        sizes = [part.shape[2] * part.element_size() for part in pages]  # bytes of one page in one layer
        word = torch.int64 if all(size % 8 == 0 for size in sizes) else torch.uint8
        self._parts = [part.view(word) for part in pages]  # each [L, pages, words]
        self._words = [part.shape[0] * part.shape[2] for part in self._parts]  # of one page
        self.page_bytes = sum(self._words) * word.itemsize
        self._per_block = min(num_slots, max(1, BLOCK_BYTES // self.page_bytes))
        self._blocks = [
            torch.empty((min(self._per_block, num_slots - first), sum(self._words)), dtype=word, pin_memory=on_cuda)
            for first in range(0, num_slots, self._per_block)
        ]
        self._stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]

    @property
    def is_queued(self) -> bool:
        """Whether copies go on after the call that asks for them."""
        return self._stream is not None

    def out(self, pages: Sequence[int], slots: Sequence[int]) -> Event | None:
        """Copy device pages to host slots; if a slot occurs twice, the last copy counts."""
        self._follow()
        with torch.cuda.stream(self._stream):  # None: no other stream
            for some, into in self._groups(pages, slots):
                index = upload(some, self.device)
                rows = torch.empty((len(some), sum(self._words)), dtype=self._parts[0].dtype, device=self.device)
                for part, piece in self._pieces(rows):
                    piece.copy_(part.index_select(1, index).transpose(0, 1))
                for row, slot in zip(rows, into, strict=True):
                    self._slot(slot).copy_(row, non_blocking=True)
            return self._event()

    def back(self, slots: Sequence[int], pages: Sequence[int]) -> Event | None:
        """Copy host slots to device pages."""
        self._follow()
        with torch.cuda.stream(self._stream):
            for some, into in self._groups(slots, pages):
                index = upload(into, self.device)
                rows = torch.empty((len(some), sum(self._words)), dtype=self._parts[0].dtype, device=self.device)
                for row, slot in zip(rows, some, strict=True):
                    row.copy_(self._slot(slot), non_blocking=True)
                for part, piece in self._pieces(rows):
                    part.index_copy_(1, index, piece.transpose(0, 1))
            return self._event()

    def join(self) -> None:
        """Let what is queued from now on wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def _pieces(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part of the stores, and the part's share of gathered pages as [n, L, words]."""
        for part, piece in zip(self._parts, torch.split(rows, self._words, dim=1), strict=True):
            yield part, piece.view(len(rows), part.shape[0], part.shape[2])

    def _groups(self, sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """The pairs in groups whose bytes are gathered at a time."""
        count = max(1, STAGED_BYTES // self.page_bytes)
        for first in range(0, len(sources), count):
            yield sources[first : first + count], targets[first : first + count]

    def _slot(self, slot: int) -> Tensor:
        block, index = divmod(slot, self._per_block)
        return self._blocks[block][index]

    def _follow(self) -> None:
        """Copies wait for what is queued: rounds in flight may still write past the end of requests that ended."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _event(self) -> Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event
