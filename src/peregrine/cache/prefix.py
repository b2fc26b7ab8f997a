"""The prefix tree: full pages kept after their request has ended, for later prompts with the same prefix.

A trie with one page per node. A child's key is the tokens of its page plus `lookahead` tokens after it. A
draft head writes the entry of a position from that position's hidden state and the *next* token, so with a
head (lookahead 1) a page is reusable only where the token after it agrees too, and a page whose next token is
not known yet can neither be inserted nor matched.

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

`insert` takes one reference per page, so a request that goes on using its pages retains them first. Its end:

    |-- matched, locked --|-- full, its own --|-- partial --|-- reserved for drafts --|
     retain, insert; release what comes back
            unlock               release          release            release
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heappop, heappush

from peregrine.cache.pages import PagePool
from peregrine.errors import ConfigError, EngineFault

Key = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """One cached page; mutated by the tree alone."""

    page: int
    key: Key
    parent: "Node | None"
    serial: int  # order of creation
    last_used: int
    children: "dict[Key, Node]" = field(default_factory=dict)
    queued: bool = False  # has an entry in the eviction queue
    digest: bytes = b""  # of all tokens the page depends on; empty: not computed yet


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
    node: Node = field(repr=False, compare=False)  # the last page's node, the root if no page matched


class PrefixTree:
    """Cached pages by the tokens they hold; least recently used leaves are evicted first."""

    def __init__(self, pool: PagePool, page_size: int, lookahead: int) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size={page_size}: a page holds at least one token; use 16, 32 or 64")
        if lookahead not in (0, 1):
            raise ConfigError(f"lookahead={lookahead}: must be 1 with a draft head and 0 without")
        self.pool, self.page_size, self.lookahead = pool, page_size, lookahead
        self._root = Node(page=0, key=(), parent=None, serial=0, last_used=0)
        self._cached: set[int] = set()
        self._uses = 0  # stands in for a clock
        self._created = 0
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

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest cached prefix of `tokens` in whole pages; takes no reference and counts as no use."""
        path = self._walk(tokens, self.whole_pages(len(tokens)))
        return Match(
            pages=tuple(node.page for node in path),
            num_tokens=len(path) * self.page_size,
            node=path[-1] if path else self._root,
        )

    def lock(self, match: Match) -> None:
        """Take a reference to each matched page, so that none is evicted before `unlock`."""
        # An evicted node has no parent; if the last page is cached, so are all before it.
        if match.pages and match.node.parent is None:
            raise EngineFault(f"pages {match.pages} were evicted since; match again, then lock")
        self.pool.retain(match.pages)
        self._touch(match.node)

    def unlock(self, match: Match) -> None:
        """Undo one `lock`; the pages stay cached."""
        for page in match.pages:
            if self.pool.refs(page) < 2:
                raise EngineFault(f"page {page} is not locked; unlock a match as often as it was locked")
        self.pool.release(match.pages)
        self._touch(match.node)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Cache pages[i] as the i-th page of `tokens`; returns the duplicates, which the caller must release.

        Takes one of the caller's references to each page. It becomes the tree's if the page was not cached, and is
        released if this very page was cached already. If another page is cached for the same tokens, the caller's
        page is a duplicate: it is returned, with its reference.
        """
        path = self._walk(tokens, len(pages))
        self._check_insertable(tokens, pages, path)
        node = path[-1] if path else self._root
        for index in range(len(path), len(pages)):
            node = self._add_child(node, self._key(tokens, index), pages[index])
        self._touch(node)
        self._enqueue(node)
        known = [(page, kept.page) for page, kept in zip(pages, path, strict=False)]
        self.pool.release(page for page, kept in known if page == kept)
        return [page for page, kept in known if page != kept]

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages, least recently used unlocked leaves first; returns how many."""
        leaves = self._take_leaves(num_pages)
        self.pool.release(node.page for node in leaves)
        return len(leaves)

    def take(self, num_pages: int) -> list[Evicted]:
        """Take out the pages that `evict` would free; the tree's reference to each becomes the caller's."""
        return [Evicted(node.digest, node.page) for node in self._take_leaves(num_pages, digested=True)]

    def _take_leaves(self, num_pages: int, digested: bool = False) -> list[Node]:
        taken: list[Node] = []
        locked = []
        while len(taken) < num_pages and self._queue:
            last_used, _, node = heappop(self._queue)
            node.queued = False
            if node.children:
                continue  # queued again when its last child is evicted
            if last_used != node.last_used:
                self._enqueue(node)
            elif self.pool.refs(node.page) > 1:
                locked.append(node)  # at most one leaf per request
            else:
                if digested:
                    self._digest(node)
                self._remove_leaf(node)
                taken.append(node)
        for node in locked:
            self._enqueue(node)
        return taken

    def clear(self) -> int:
        """Free every page that is not locked; returns how many."""
        return self.evict(self.num_cached)

    def digests(self, tokens: Sequence[int], match: Match) -> Iterator[bytes]:
        """The digests of the whole pages of `tokens` that follow a match."""
        digest = self._digest(match.node)
        for index in range(len(match.pages), self.whole_pages(len(tokens))):
            digest = _chained(digest, self._key(tokens, index))
            yield digest

    def _digest(self, node: Node) -> bytes:
        """The node's digest, which is made from its parent's; computed once."""
        path: list[Node] = []
        step = node
        while not step.digest and step.parent is not None:
            path.append(step)
            step = step.parent
        digest = step.digest  # empty: the root's
        for step in reversed(path):
            digest = step.digest = _chained(digest, step.key)
        return digest

    def _key(self, tokens: Sequence[int], index: int) -> Key:
        start = index * self.page_size
        return tuple(tokens[start : start + self.page_size + self.lookahead])

    def _walk(self, tokens: Sequence[int], num_pages: int) -> list[Node]:
        path: list[Node] = []
        children = self._root.children
        for index in range(num_pages):
            node = children.get(self._key(tokens, index))
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def _check_insertable(self, tokens: Sequence[int], pages: Sequence[int], path: list[Node]) -> None:
        if len(pages) > self.whole_pages(len(tokens)):
            raise EngineFault(
                f"{len(pages)} pages for {len(tokens)} tokens: with page_size {self.page_size} and lookahead "
                f"{self.lookahead} only {self.whole_pages(len(tokens))} have a key; release the others"
            )
        if len(set(pages)) < len(pages):
            raise EngineFault(f"pages={list(pages)}: a page holds one run of tokens; insert each page once")
        ours = {page for page, node in zip(pages, path, strict=False) if page == node.page}
        for page in sorted(self._cached.intersection(pages) - ours):
            raise EngineFault(f"page {page} is cached for other tokens; insert pages of the caller's own")
        for page, refs in zip(pages, map(self.pool.refs, pages), strict=True):
            if refs < 2 and refs < 1 + (page in ours):
                raise EngineFault(f"page {page} is not the caller's to give; retain it before it is inserted")

    def _add_child(self, parent: Node, key: Key, page: int) -> Node:
        self._created += 1
        node = Node(page=page, key=key, parent=parent, serial=self._created, last_used=self._uses)
        parent.children[key] = node
        self._cached.add(page)
        return node

    def _remove_leaf(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        self._cached.remove(node.page)
        self._enqueue(node.parent)
        node.parent = None

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


def _chained(digest: bytes, key: Key) -> bytes:
    """The digest of a page, from that of the page before it (empty: there is none) and its own key."""
    return sha256(digest + array("q", key).tobytes()).digest()
