"""Which pages a request holds, from its match in the prefix tree until its last page is released.

|-- matched, locked --|-- own, full: also in the tree once read --|-- own, partial --|-- reserved for rounds --|
      unlock                        release                            release               release
"""

from peregrine.cache.pages import PagePool
from peregrine.cache.prefix import PrefixTree
from peregrine.engine.request import Request


class PageLedger:
    """The one place where requests take pages and give them back."""

    def __init__(self, pool: PagePool, tree: PrefixTree | None, page_size: int, lookahead: int) -> None:
        self.pool, self.tree, self.page_size, self.lookahead = pool, tree, page_size, lookahead
        self.version = 0  # changes whenever pages are released or shared: else no request fits that did not before

    def admit(self, request: Request, places: int) -> bool:
        """Match the request's cached prefix and reserve pages for `places`; False, and nothing held, if they lack."""
        self._match(request)
        if self.reserve(request, places):
            return True
        self.release(request)
        return False

    def _match(self, request: Request) -> None:
        """Lock the longest cached prefix of the tokens to be read; the newest token is never part of it."""
        assert not request.pages
        request.read_len = 0
        if request.wants_scores:  # every prompt token must be read to be scored
            request.forget_scores()
        elif self.tree is not None:
            match = self.tree.match(request.tokens[: request.num_tokens - 1 + self.lookahead])
            self.tree.lock(match)
            request.match, request.pages, request.read_len = match, list(match.pages), match.num_tokens

    def reserve(self, request: Request, places: int) -> bool:
        """Extend the request's pages to hold `places` places; False, and nothing taken, if pages lack."""
        missing = -(-places // self.page_size) - len(request.pages)
        if missing <= 0:
            return True
        if self.pool.num_free < missing and self.tree is not None:
            self.tree.evict(missing - self.pool.num_free)
        if self.pool.num_free < missing:
            return False
        request.pages.extend(self.pool.allocate(missing))
        return True

    def share(self, request: Request) -> None:
        """Insert the full pages read so far into the prefix tree; the request keeps holding them."""
        self.version += 1
        if self.tree is None:
            return
        tokens = request.tokens[: request.read_len + self.lookahead]
        pages = request.pages[: self.tree.whole_pages(len(tokens))]
        self.pool.retain(pages)  # a reference for the tree; the request keeps its own
        self.pool.release(self.tree.insert(tokens, pages))

    def release(self, request: Request) -> None:
        """Give back every page of the request; its full pages stay in the tree, evictable."""
        self.share(request)
        matched = 0
        if request.match is not None and self.tree is not None:
            matched = len(request.match.pages)
            self.tree.unlock(request.match)
        self.pool.release(request.pages[matched:])
        request.match, request.pages, request.read_len = None, [], 0

    def drop_cached(self) -> int:
        """Evict every cached page that no request holds; returns how many."""
        return 0 if self.tree is None else self.tree.clear()
