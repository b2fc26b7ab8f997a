"""Which pages a request holds, from its first match in the prefix tree to its last page given back.

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

    def match(self, request: Request) -> None:
        """Take the longest cached prefix of what the request must read; its newest token is never part of it."""
        assert not request.pages
        request.read_len = 0
        if request.wants_scores:  # every place must be read
            request.forget_scores()
            return
        if self.tree is None:
            return
        readable = request.num_tokens - 1 + self.lookahead
        match = self.tree.match(request.tokens[:readable])
        self.tree.lock(match)
        request.match, request.pages, request.read_len = match, list(match.pages), match.num_tokens

    def reserve(self, request: Request, places: int) -> bool:
        """Pages for the request's first `places` places; False, and nothing taken, if there are too few."""
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
        """Let other requests find the full pages read so far; the request goes on holding them."""
        if self.tree is None:
            return
        tokens = request.tokens[: request.read_len + self.lookahead]
        pages = request.pages[: self.tree.whole_pages(len(tokens))]
        self.pool.retain(pages)  # a reference for the tree; the request keeps its own
        self.pool.release(self.tree.insert(tokens, pages))

    def release(self, request: Request) -> None:
        """Give back everything; full pages stay in the tree, evictable."""
        self.share(request)
        matched = 0
        if request.match is not None and self.tree is not None:
            matched = len(request.match.pages)
            self.tree.unlock(request.match)
        self.pool.release(request.pages[matched:])
        request.match, request.pages, request.read_len = None, [], 0

    def drop_cached(self) -> int:
        """Forget every cached page that nobody holds; returns how many."""
        return 0 if self.tree is None else self.tree.clear()

    def pages_for(self, places: int) -> int:
        """Pages that hold this many places."""
        return -(-places // self.page_size)
