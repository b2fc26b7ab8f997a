"""The prefix tree under any sequence of calls, against a plain dict of inserted prefixes."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from peregrine.cache.pages import PagePool
from peregrine.cache.prefix import Match, PrefixTree
from peregrine.errors import OutOfPages

NUM_PAGES = 11
PAGE_SIZE = 2
TOKENS = st.lists(st.integers(0, 1), max_size=7)  # two tokens: prefixes are shared all the time


@dataclass(eq=False)
class Holder:
    """A request: its tokens, the match it locked, and its own pages after that."""

    tokens: list[int]
    match: Match
    own: list[int]

    @property
    def pages(self):
        return [*self.match.pages, *self.own]


@dataclass
class Entry:
    page: int
    used: int


class PrefixMachine(RuleBasedStateMachine):
    """A naive model scans everything on every call; the tree must agree on matches, victims and counts."""

    @initialize(lookahead=st.integers(0, 1))
    def build(self, lookahead):
        self.pool = PagePool(NUM_PAGES)
        self.tree = PrefixTree(self.pool, PAGE_SIZE, lookahead)
        self.lookahead = lookahead
        self.model: dict[tuple[int, ...], Entry] = {}  # all tokens a page depends on -> the page
        self.holders: list[Holder] = []
        self.uses = 0

    # The naive model.

    def prefixes(self, tokens):
        ends = range(PAGE_SIZE + self.lookahead, len(tokens) + 1, PAGE_SIZE)
        return [tuple(tokens[:end]) for end in ends]

    def expected(self, tokens):
        pages = []
        for prefix in self.prefixes(tokens):
            if prefix not in self.model:
                break
            pages.append(self.model[prefix].page)
        return tuple(pages)

    def use(self, tokens, num_pages):
        self.uses += 1
        for prefix in self.prefixes(tokens)[:num_pages]:
            self.model[prefix].used = self.uses

    def held(self):
        return [page for holder in self.holders for page in holder.pages]

    def victim(self):
        """The least recently used prefix that is not held and has no longer prefix cached."""
        held = self.held()
        leaves = [
            prefix
            for prefix, entry in self.model.items()
            if entry.page not in held
            and not any(len(p) > len(prefix) and p[: len(prefix)] == prefix for p in self.model)
        ]
        return min(leaves, key=lambda prefix: self.model[prefix].used, default=None)

    def evict_both(self, num_pages):
        victims = []
        while len(victims) < num_pages and (prefix := self.victim()) is not None:
            victims.append(self.model.pop(prefix).page)
        assert self.tree.evict(num_pages) == len(victims)
        assert all(self.pool.refs(page) == 0 for page in victims)

    def insert_both(self, tokens, pages):
        self.tree.insert(tokens, pages)
        for prefix, page in zip(self.prefixes(tokens), pages, strict=False):
            self.model.setdefault(prefix, Entry(page, 0))
        self.use(tokens, len(pages))

    def drawn(self, data):
        return data.draw(st.sampled_from(self.holders))

    # Calls.

    @rule(tokens=TOKENS)
    def match(self, tokens):
        match = self.tree.match(tokens)
        assert match.pages == self.expected(tokens)
        assert match.num_tokens == PAGE_SIZE * len(match.pages)

    @rule(tokens=TOKENS, reserved=st.integers(0, 1))
    def join(self, tokens, reserved):
        self.start(tokens, reserved)

    def start(self, tokens, reserved):
        match = self.tree.match(tokens)
        assert match.pages == self.expected(tokens)
        self.tree.lock(match)
        self.use(tokens, len(match.pages))
        holder = Holder(tokens, match, [])
        self.holders.append(holder)
        missing = -(-len(tokens) // PAGE_SIZE) - len(match.pages) + reserved
        self.evict_both(max(0, missing - self.pool.num_free))
        try:
            holder.own = self.pool.allocate(missing)
        except OutOfPages:
            self.abort_holder(holder)
            return False
        return True

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data):
        """Insert full pages and go on holding them."""
        holder = self.drawn(data)
        pages = holder.pages[: self.tree.whole_pages(len(holder.tokens))]
        self.insert_both(holder.tokens, pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def finish(self, data):
        self.end(self.drawn(data))

    def end(self, holder):
        whole = self.tree.whole_pages(len(holder.tokens))
        pages = holder.pages[:whole]
        self.insert_both(holder.tokens, pages)
        self.abort_holder(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def abort(self, data):
        self.abort_holder(self.drawn(data))

    def abort_holder(self, holder):
        self.tree.unlock(holder.match)
        self.use(holder.tokens, len(holder.match.pages))
        self.pool.release(holder.own)
        self.holders.remove(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        """One more token, if it fits in the pages held."""
        holder = self.drawn(data)
        if len(holder.tokens) < len(holder.pages) * PAGE_SIZE:
            holder.tokens = [*holder.tokens, token]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def reuse(self, data):
        """A request whose pages are all cached."""
        tokens = data.draw(st.sampled_from(list(self.model)))
        match = self.tree.match(tokens)
        self.tree.lock(match)
        self.tree.unlock(match)
        self.use(tokens, len(match.pages))

    @rule(tokens=TOKENS)
    def serve(self, tokens):
        """A request's whole life."""
        if self.start(tokens, reserved=0):
            self.end(self.holders[-1])

    @rule(num_pages=st.integers(0, 3))
    def evict(self, num_pages):
        self.evict_both(num_pages)

    @precondition(lambda self: self.tree.num_cached > NUM_PAGES // 2)
    @rule()
    def clear(self):
        before = self.tree.num_cached
        while (prefix := self.victim()) is not None:
            self.model.pop(prefix)
        assert self.tree.clear() == before - len(self.model)

    # Invariants.

    @invariant()
    def every_page_is_accounted_for(self):
        cached = [entry.page for entry in self.model.values()]
        held = self.held()
        assert len(set(cached)) == len(cached)  # no page stands for two prefixes
        assert self.tree.num_cached == len(cached)
        for page in range(1, NUM_PAGES):
            assert self.pool.refs(page) == (page in cached) + held.count(page)
        outside = set(held) - set(cached)
        assert self.pool.num_free + self.tree.num_cached + len(outside) == NUM_PAGES - 1

    @invariant()
    def own_pages_have_one_holder(self):
        own = [page for holder in self.holders for page in holder.own]
        alone = [page for page in own if page not in {entry.page for entry in self.model.values()}]
        assert len(set(alone)) == len(alone)

    @invariant()
    def cached_prefixes_match(self):
        for prefix in self.model:
            assert self.tree.match(prefix).pages == self.expected(prefix)

    def teardown(self):
        while self.holders:
            self.abort_holder(self.holders[0])
        assert self.pool.num_free + self.tree.num_cached == NUM_PAGES - 1
        self.tree.clear()
        assert self.pool.num_free == NUM_PAGES - 1

    @invariant()
    def queue_does_not_grow_past_the_tree(self):
        assert len(self.tree._queue) <= self.tree.num_cached


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
