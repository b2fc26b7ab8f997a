"""The host tier of the prefix cache: pages evicted from the device, kept in host memory until others need the room.

A page is found by the digest of every token it depends on, whether the pages before it are cached on the device or
here. The least recently used page is replaced first. A page that was copied back to the device stays here as the
next to be replaced; if the device evicts it before that, it need not be copied again.

While a copy is under way the tier holds a reference to its device pages, so that nobody else is given them.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from peregrine.cache.page_copies import Event, PageCopies
from peregrine.cache.pages import PagePool
from peregrine.cache.prefix import Evicted


@dataclass(frozen=True, slots=True)
class Transfer:
    """Device pages that are being copied to or from the host."""

    pages: tuple[int, ...]
    ready: Event | None  # None: the copy is done
    leaves: bool  # the pages are free afterwards

    @property
    def is_done(self) -> bool:
        """Whether the copy has ended."""
        return self.ready is None or self.ready.query()


class HostTier:
    """Evicted pages in host memory, by digest. `spare` device pages are kept free by copying pages out ahead."""

    def __init__(self, pool: PagePool, copies: PageCopies, spare: int = 0) -> None:
        self.pool, self.copies, self.spare = pool, copies, spare
        self.moving: deque[Transfer] = deque()  # in the order in which they end
        self.pages_out = self.pages_in = 0  # copied so far
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # the next to be replaced first
        self._free = list(range(copies.num_slots - 1, -1, -1))

    @property
    def num_pages(self) -> int:
        """Pages that can be found here."""
        return len(self._slots)

    @property
    def num_leaving(self) -> int:
        """Device pages that will be free when their copies have ended."""
        return sum(len(transfer.pages) for transfer in self.moving if transfer.leaves)

    def save(self, evicted: Sequence[Evicted]) -> None:
        """Copy pages to the host; takes over a reference to each, and gives it back once it is copied."""
        copied: list[tuple[int, int]] = []
        for page in evicted:
            if page.digest in self._slots:
                self._slots.move_to_end(page.digest)
                self.pool.release([page.page])
                continue
            slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            self._slots[page.digest] = slot
            copied.append((page.page, slot))
        if copied:
            pages, slots = zip(*copied, strict=True)
            self.pages_out += len(pages)
            self.moving.append(Transfer(pages, self.copies.out(pages, slots), leaves=True))

    def find(self, digests: Iterable[bytes]) -> list[bytes]:
        """The leading digests that are here, as far as there is no gap; they are replaced last."""
        found = list(takewhile(self._slots.__contains__, digests))
        for digest in reversed(found):  # of one prefix, the last page is replaced first
            self._slots.move_to_end(digest)
        return found

    def load(self, digests: Sequence[bytes], pages: Sequence[int]) -> Transfer:
        """Copy pages that `find` returned into device pages of the caller's."""
        self.pool.retain(pages)
        transfer = Transfer(
            tuple(pages), self.copies.back([self._slots[digest] for digest in digests], pages), leaves=False
        )
        for digest in digests:
            self._slots.move_to_end(digest, last=False)
        self.pages_in += len(pages)
        self.moving.append(transfer)
        return transfer

    def collect(self) -> int:
        """Give back the device pages of copies that have ended; returns how many copies that were."""
        count = 0
        while self.moving and self.moving[0].is_done:
            self.pool.release(self.moving.popleft().pages)
            count += 1
        return count

    def clear(self) -> None:
        """Forget every page."""
        self._free += self._slots.values()
        self._slots.clear()
