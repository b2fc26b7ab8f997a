"""Copies that end late, as on a GPU: each is made when its event is asked for the n-th time, in order."""

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from peregrine.cache.page_copies import Event, PageCopies
from peregrine.cache.store import KVStore


class LateEvent:
    """Ends when it has been asked often enough, and everything before it with it."""

    def __init__(self, queue: deque["LateEvent"], copy: Callable[[], object], patience: int) -> None:
        self.queue, self.copy, self.patience, self.done = queue, copy, patience, False

    def query(self) -> bool:
        self.patience -= 1
        if self.patience < 0:
            self.synchronize()
        return self.done

    def synchronize(self) -> None:
        while not self.done:
            first = self.queue.popleft()
            first.copy()
            first.done = True


class LateCopies(PageCopies):
    """Nothing is copied before its event ends, so whoever reuses or reads a page too early finds wrong numbers."""

    is_queued = True  # type: ignore[assignment]

    def __init__(self, stores: Sequence[KVStore], num_slots: int) -> None:
        super().__init__(stores, num_slots)
        self.queue: deque[LateEvent] = deque()
        self.random = Random(7)

    def out(self, pages: Sequence[int], slots: Sequence[int]) -> Event:
        return self.later(lambda: PageCopies.out(self, pages, slots))

    def back(self, slots: Sequence[int], pages: Sequence[int]) -> Event:
        return self.later(lambda: PageCopies.back(self, slots, pages))

    def later(self, copy: Callable[[], object]) -> Event:
        self.queue.append(LateEvent(self.queue, copy, self.random.randrange(6)))
        return self.queue[-1]
