"""The prefix tree: full pages kept after their request has ended, for later prompts with the same prefix.

A radix tree: a node is a run of pages that were inserted together, and is cut in two where another prefix branches
off or a shorter one is used. So a prompt of any length takes a few comparisons of runs, not one for every page. The key
of a page is its tokens plus `lookahead` tokens after it: a draft head writes the entry of a position from that
position's hidden state and the *next* token, so with a head (lookahead 1) a page is reusable only where the token after
it agrees too, and a page whose next token is not known yet can neither be inserted nor matched.

Ownership is counted in the page pool: the tree has one reference to each page it caches, each holder has one.

                 page 3   page 7   page 9   page 4   page 5
    tree            1        1        1        .        .      cached: 3, 7, 9
    request A       1        1        .        1        .      held outside the tree: 4
    request B       1        .        .        .        1      held outside the tree: 5
    references      3        2        1        1        1      evictable: 9, only the tree refers to it

         allocate        insert          lock                  unlock          evict
    free --------> held --------> cached ------> cached, locked ------> cached ------> free
    0 references     1               1              2 or more              1             0

A cached page is locked while it has references besides the tree's: there is no separate lock count. Only leaves
are evicted, so a page is never cached without the pages before it. Every page is free, cached, or held outside
the tree: free + cached + held = all.

`insert` takes references for the tree, so nothing changes for a request that goes on using its pages. Its end:

    |-- matched, locked --|-- full, its own --|-- partial --|-- reserved for drafts --|
                        insert
            unlock               release          release            release
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from peregrine.cache.pages import PagePool
from peregrine.errors import ConfigError, EngineFault

Tokens = Sequence[int] | npt.NDArray[np.int64]
Run = bytes  # the tokens of some pages and the lookahead of the last one: they are compared and hashed as one value
WORD = 8  # bytes of a token in it


@dataclass(slots=True, eq=False)
class Node:
    """A run of cached pages, used equally recently; mutated by the tree alone."""

    pages: list[int]
    run: Run
    parent: "Node | None"
    serial: int  # of the insertion that made its pages
    last_used: int
    children: "dict[Run, Node]" = field(default_factory=dict)  # by the key of their first page
    queued: bool = False  # has an entry in the eviction queue
    digests: list[bytes] = field(default_factory=list)  # by page, of all tokens it depends on; empty: not computed yet


@dataclass(frozen=True, slots=True)
class Evicted:
    """A page taken out of the tree, with the digest of all tokens it depends on."""

    digest: bytes
    page: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of some tokens, as whole pages."""

    pages: tuple[int, ...]
    num_tokens: int
    serial: int  # of the insertion that made the last page


class PrefixTree:
    """Cached pages by the tokens they hold; least recently used leaves are evicted first."""

    def __init__(self, pool: PagePool, page_size: int, lookahead: int) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size={page_size}: a page holds at least one token; use 16, 32 or 64")
        if lookahead not in (0, 1):
            raise ConfigError(f"lookahead={lookahead}: must be 1 with a draft head and 0 without")
        self.pool, self.page_size, self.lookahead = pool, page_size, lookahead
        self._root = Node(pages=[], run=b"", parent=None, serial=0, last_used=0)
        self._cached: dict[int, Node] = {}  # by page
        self._uses = 0  # stands in for a clock
        self._inserted = 0
        # Each leaf has one entry (last_used, serial, node), possibly out of date: when an entry comes to the top,
        # a leaf used since then is queued again, and a node that has children now is dropped.
        self._queue: list[tuple[int, int, Node]] = []

    @property
    def num_cached(self) -> int:
        """Pages in the tree, locked ones included."""
        return len(self._cached)

    def whole_pages(self, num_tokens: int) -> int:
        """How many leading pages of `num_tokens` tokens have a key: full, with the lookahead token known."""
        return max(0, num_tokens - self.lookahead) // self.page_size

    def match(self, tokens: Tokens) -> Match:
        """The longest cached prefix of `tokens` in whole pages; takes no reference and counts as no use."""
        pages, node = self._walk(run_of(tokens), self.whole_pages(len(tokens)))
        return Match(tuple(pages), len(pages) * self.page_size, node.serial)

    def lock(self, match: Match) -> None:
        """Take a reference to each matched page, so that none is evicted before `unlock`."""
        # If the last page is cached, so are all before it. One that was evicted and cached again has another serial.
        node = self._cached.get(match.pages[-1]) if match.pages else self._root
        if node is None or node.serial != match.serial:
            raise EngineFault(f"pages {match.pages} were evicted since; match again, then lock")
        self.pool.retain(match.pages)
        self._touch(self._end_at(list(match.pages)))

    def unlock(self, match: Match) -> None:
        """Undo one `lock`; the pages stay cached."""
        for page in match.pages:
            if self.pool.refs(page) < 2:
                raise EngineFault(f"page {page} is not locked; unlock a match as often as it was locked")
        self.pool.release(match.pages)
        self._touch(self._end_at(list(match.pages)))

    def insert(self, tokens: Tokens, pages: Sequence[int]) -> None:
        """Cache pages[i] as the i-th page of `tokens`, unless one is cached for it already.

        The tree takes a reference to each page that it did not hold; the caller's own stay the caller's.
        """
        run = run_of(tokens)
        found, _ = self._walk(run, len(pages))
        new = list(pages[len(found) :])
        self._check_insertable(len(tokens), pages, new)
        self.pool.retain(new)
        node = self._end_at(found)
        if new:
            node = self._add_child(node, self._part(run, len(found), len(pages)), new)
        self._touch(node)
        self._enqueue(node)

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages, least recently used unlocked leaves first; returns how many."""
        pages, _ = self._take_pages(num_pages)
        self.pool.release(pages)
        return len(pages)

    def take(self, num_pages: int) -> list[Evicted]:
        """Take out the pages that `evict` would free; the tree's reference to each becomes the caller's."""
        pages, digests = self._take_pages(num_pages, digested=True)
        return list(map(Evicted, digests, pages))

    def _take_pages(self, num_pages: int, digested: bool = False) -> tuple[list[int], list[bytes]]:
        """Pages from the ends of unlocked leaves, with their digests if wanted."""
        pages: list[int] = []
        digests: list[bytes] = []
        locked = []
        while len(pages) < num_pages and self._queue:
            last_used, _, node = heappop(self._queue)
            node.queued = False
            if node.children:
                continue  # queued again when its last child is evicted
            if last_used != node.last_used:
                self._enqueue(node)
                continue
            keep, least = len(node.pages), max(0, len(node.pages) - (num_pages - len(pages)))
            while keep > least and self.pool.refs(node.pages[keep - 1]) == 1:
                keep -= 1
            if digested:
                digests += reversed(self._digests(node)[keep:])
            pages += reversed(node.pages[keep:])
            self._shorten(node, keep)
            if keep > least:
                locked.append(node)  # at most one leaf per request
            else:
                self._enqueue(node)
        for node in locked:
            self._enqueue(node)
        return pages, digests

    def clear(self) -> int:
        """Free every page that is not locked; returns how many."""
        return self.evict(self.num_cached)

    def digests(self, tokens: Tokens, match: Match) -> Iterator[bytes]:
        """The digests of the whole pages of `tokens` that follow a match."""
        digest, count = b"", len(match.pages)
        if count:
            node = self._cached[match.pages[-1]]
            digest = self._digests(node)[node.pages.index(match.pages[-1])]
        yield from self._chain(digest, self._part(run_of(tokens), count, self.whole_pages(len(tokens))))

    def _digests(self, node: Node) -> list[bytes]:
        """The digests of the node's pages, which follow from those before it; computed once."""
        path: list[Node] = []
        step: Node | None = node
        while step is not None and not step.digests:
            path.append(step)
            step = step.parent
        digest = b"" if step is None else step.digests[-1]
        for step in reversed(path):
            step.digests = list(self._chain(digest, step.run))
            digest = step.digests[-1] if step.digests else b""  # the root has none
        return node.digests

    def _chain(self, digest: bytes, run: Run) -> Iterator[bytes]:
        """The digests of a run's pages, from that of the page before it (empty: there is none)."""
        for index in range(self.whole_pages(len(run) // WORD)):
            digest = sha256(digest + self._part(run, index, index + 1)).digest()
            yield digest

    def _part(self, run: Run, first: int, end: int) -> Run:
        """Pages [first, end) of a run; of a single page it is the key."""
        return run[first * self.page_size * WORD : (end * self.page_size + self.lookahead) * WORD]

    def _walk(self, run: Run, num_pages: int) -> tuple[list[int], Node]:
        """The cached pages among the first `num_pages` of a run, and the node that has the last of them."""
        pages: list[int] = []
        node, ends = self._root, True
        while ends and len(pages) < num_pages:
            child = node.children.get(self._part(run, len(pages), len(pages) + 1))
            if child is None:
                break
            count = self._num_equal(child, self._part(run, len(pages), num_pages), num_pages - len(pages))
            node, ends = child, count == len(child.pages)
            pages += child.pages[:count]
        return pages, node

    def _num_equal(self, node: Node, run: Run, num_pages: int) -> int:
        """How many of the first `num_pages` pages of a run the node has."""
        most = min(len(node.pages), num_pages)
        if self._part(node.run, 0, most) == self._part(run, 0, most):
            return most
        pairs = ((self._part(node.run, i, i + 1), self._part(run, i, i + 1)) for i in range(most))
        return next(index for index, (ours, given) in enumerate(pairs) if ours != given)

    def _end_at(self, pages: list[int]) -> Node:
        """The node that ends with the last of these cached pages of one prefix; the root for none."""
        node = self._cached[pages[-1]] if pages else self._root
        return node if pages[-1:] == node.pages[-1:] else self._cut(node, node.pages.index(pages[-1]) + 1)

    def _cut(self, node: Node, count: int) -> Node:
        """Cut a run after `count` pages; returns the node of the first ones, the others stay this node's."""
        assert node.parent is not None
        upper = Node(node.pages[:count], self._part(node.run, 0, count), node.parent, node.serial, node.last_used)
        upper.digests, node.digests = node.digests[:count], node.digests[count:]
        node.parent.children[self._part(node.run, 0, 1)] = upper
        node.pages, node.run, node.parent = node.pages[count:], node.run[count * self.page_size * WORD :], upper
        upper.children[self._part(node.run, 0, 1)] = node
        self._cached.update(dict.fromkeys(upper.pages, upper))
        return upper

    def _check_insertable(self, num_tokens: int, pages: Sequence[int], new: list[int]) -> None:
        if len(pages) > (most := self.whole_pages(num_tokens)):
            raise EngineFault(f"{len(pages)} pages for {num_tokens} tokens: only {most} have a key; release the others")
        if len(set(new)) < len(new):
            raise EngineFault(f"pages={list(pages)}: a page holds one run of tokens; insert each page once")
        for page in sorted(self._cached.keys() & new):
            raise EngineFault(f"page {page} is cached for other tokens; insert pages of the caller's own")
        if not self.pool.are_held(new):
            page = next(page for page in new if not self.pool.refs(page))
            raise EngineFault(f"page {page} is free, so not the caller's to give; allocate it first")

    def _add_child(self, parent: Node, run: Run, pages: list[int]) -> Node:
        self._inserted += 1
        node = Node(pages, run, parent, self._inserted, self._uses)
        parent.children[self._part(run, 0, 1)] = node
        self._cached.update(dict.fromkeys(pages, node))
        return node

    def _shorten(self, node: Node, keep: int) -> None:
        """Take all but the first `keep` pages out of a leaf; if none is left, it goes, and its parent may be a leaf."""
        assert node.parent is not None
        for page in node.pages[keep:]:
            del self._cached[page]
        if not keep:
            del node.parent.children[self._part(node.run, 0, 1)]
            self._enqueue(node.parent)
            node.parent = None
        del node.pages[keep:], node.digests[keep:]
        node.run = self._part(node.run, 0, keep)

    def _touch(self, node: Node) -> None:
        """Mark the whole path as used, so that no page is older than a page after it."""
        self._uses += 1
        step: Node | None = node
        while step is not None:
            step.last_used = self._uses
            step = step.parent

    def _enqueue(self, node: Node) -> None:
        if node.parent is not None and not node.children and not node.queued:
            node.queued = True
            heappush(self._queue, (node.last_used, node.serial, node))


def run_of(tokens: Tokens) -> Run:
    """Tokens as bytes."""
    return np.asarray(tokens, dtype=np.int64).tobytes()
