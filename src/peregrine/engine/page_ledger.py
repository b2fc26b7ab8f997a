"""Which pages a request holds, from its match in the prefix tree until its last page is released.

|-- matched, locked --|-- own, full: also in the tree once read --|-- own, partial --|-- reserved for rounds --|
      unlock                        release                            release               release

With a host tier, pages that others need are copied to the host before they are free, and the pages of a new request
that lie there are copied into pages of its own. Both take a while on CUDA, and nothing waits for them:

- a request whose pages arrive is read on when they are here; rounds go on meanwhile;
- a request to be admitted waits until enough pages have left;
- a running request takes a spare page. If there is none, cached pages are dropped without a copy.
"""

from array import array
from collections.abc import Sequence

from peregrine.cache.host_tier import HostTier
from peregrine.cache.pages import PagePool
from peregrine.cache.prefix import PrefixTree
from peregrine.engine.request import Request

GROWN, PLENTY = 8, 0.25  # pages that a running request takes at a time, while this share of all is free


class PageLedger:
    """The one place where requests take pages and give them back."""

    def __init__(
        self, pool: PagePool, tree: PrefixTree | None, page_size: int, lookahead: int, tier: HostTier | None = None
    ) -> None:
        self.pool, self.tree, self.tier, self.page_size, self.lookahead = pool, tree, tier, page_size, lookahead
        self.version = 0  # changes whenever pages are released or shared: else no request fits that did not before
        self.missed = set[int]()  # of the pages in the tree, those that the drafter has not absorbed

    def admit(self, request: Request, places: int) -> bool:
        """Match the request's cached prefix and reserve pages for `places`; False, and nothing held, if they lack."""
        self._match(request)
        found = self._find_on_host(request)
        if not self.reserve(request, places, patient=True):
            self.release(request)
            return False
        if self.tier is not None and (found := self.tier.find(found)):  # room for others may have replaced some
            first = request.read_len // self.page_size
            request.arriving = self.tier.load(found, request.pages[first : first + len(found)])
        return True

    def _match(self, request: Request) -> None:
        """Lock the longest cached prefix of the tokens to be read; the newest token is never part of it."""
        assert not request.pages
        request.read_len = 0
        if request.wants_scores:  # every prompt token must be read to be scored
            request.forget_scores()
        elif self.tree is not None:
            match = self.tree.match(request.ids(0, request.num_tokens - 1 + self.lookahead))
            self.tree.lock(match)
            request.match, request.pages, request.read_len = match, array("q", match.pages), match.num_tokens
            late = (number for number, page in enumerate(match.pages) if page in self.missed)
            request.missed = next((number * self.page_size for number in late), None)

    def _find_on_host(self, request: Request) -> list[bytes]:
        """The pages after the request's match that lie on the host."""
        if self.tier is None or self.tree is None or request.match is None:
            return []
        tokens = request.ids(0, request.num_tokens - 1 + self.lookahead)
        return self.tier.find(self.tree.digests(tokens, request.match))

    def reserve(self, request: Request, places: int, patient: bool = False) -> bool:
        """Extend the request's pages to hold `places` places; False, and nothing taken, if pages lack.

        A running request takes a few at a time, which saves the host time. A patient caller asks again when pages that
        are being copied to the host have left.
        """
        missing = -(-places // self.page_size) - len(request.pages)
        if missing <= 0:
            return True
        if self.pool.num_free < missing:
            self._make_free(missing, patient)
        if self.pool.num_free < missing:
            return False
        if request.seat is not None and self.pool.num_free >= PLENTY * self.pool.num_pages + GROWN:
            missing = max(missing, min(GROWN, -(-request.limit // self.page_size) - len(request.pages)))
        request.pages.extend(self.pool.allocate(missing))
        return True

    def _make_free(self, num_pages: int, patient: bool) -> None:
        """Evict cached pages until `num_pages` are free, or will be."""
        if self.tree is None:
            return
        if self.tier is None or (self.tier.copies.is_queued and not patient):
            self.tree.evict(num_pages - self.pool.num_free)
        else:
            self._copy_out(num_pages)
        while self.tier is not None and self.tier.moving and not patient and self.pool.num_free < num_pages:
            self._collect(wait=True)  # rather than preempt a request: all that can be dropped has been

    def _copy_out(self, num_pages: int) -> None:
        """Copy cached pages to the host until `num_pages` are free or about to be."""
        if self.tier is not None and self.tree is not None:
            self.tier.save(self.tree.take(num_pages - self.pool.num_free - self.tier.num_leaving))
            self._collect(wait=False)

    def _collect(self, wait: bool) -> None:
        """Take back the pages of copies that have ended; `wait`: for the oldest one."""
        assert self.tier is not None
        if wait and self.tier.moving and (ready := self.tier.moving[0].ready) is not None:
            ready.synchronize()
        self.version += self.tier.collect()

    def settle(self, reading: Sequence[Request], idle: bool) -> None:
        """Let requests whose pages have arrived from the host be read on, and keep spare pages free.

        `idle`: no round can be run; if no prompt can be read either, wait for the oldest copy.
        """
        if self.tier is None:
            return
        self._collect(wait=idle and all(request.arriving is not None for request in reading))
        for request in reading:
            if request.arriving is not None and request.arriving.is_done:
                request.arrive(len(request.arriving.pages) * self.page_size)
                self.share(request)
        if self.tier.spare:
            self._copy_out(self.tier.spare)

    def share(self, request: Request) -> None:
        """Insert the full pages read so far into the prefix tree; the request keeps holding them."""
        self.version += 1
        if self.tree is None:
            return
        tokens = request.ids(0, min(request.read_len + self.lookahead, request.num_tokens))
        pages = request.pages[: self.tree.whole_pages(len(tokens))]
        self.tree.insert(tokens, pages)
        absorbed = len(pages) if request.missed is None else request.missed // self.page_size
        self.missed.difference_update(pages[:absorbed])
        self.missed.update(pages[absorbed:])

    def release(self, request: Request) -> None:
        """Give back every page of the request; its full pages stay in the tree, evictable."""
        self.share(request)
        matched = 0
        if request.match is not None and self.tree is not None:
            matched = len(request.match.pages)
            self.tree.unlock(request.match)
        self.pool.release(request.pages[matched:])
        request.match, request.arriving, request.pages, request.read_len = None, None, array("q"), 0
        request.missed = None

    def drop_cached(self) -> int:
        """Evict every cached page that no request holds, and forget the host's; returns how many left the device."""
        if self.tier is not None:
            self.tier.clear()
        return 0 if self.tree is None else self.tree.clear()
