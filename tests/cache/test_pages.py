"""The page pool: counts, order, and refusals that leave it as it was."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from peregrine.cache.pages import SCRATCH_PAGE, PagePool
from peregrine.errors import ConfigError, EngineFault, OutOfPages


def test_scratch_is_never_handed_out():
    pool = PagePool(5)
    pages = pool.allocate(4)
    assert pages == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.refs(SCRATCH_PAGE) == 0


def test_allocating_too_many_takes_none():
    pool = PagePool(4)
    with pytest.raises(OutOfPages, match="4 pages wanted, 3 of 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3
    assert pool.allocate(3) == [1, 2, 3]


def test_page_is_free_when_its_last_reference_goes():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.retain(pages)
    pool.release(pages)
    assert [pool.refs(page) for page in pages] == [1, 1]
    assert pool.num_free == 1
    pool.release(pages)
    assert [pool.refs(page) for page in pages] == [0, 0]
    assert pool.num_free == 3


def test_allocating_nothing_is_allowed_when_nothing_is_free():
    pool = PagePool(2)
    pool.allocate(1)
    assert pool.allocate(0) == []


@pytest.mark.parametrize("page", [0, 1, 4, -1])
def test_pages_without_an_owner_are_refused(page):
    pool = PagePool(4)
    with pytest.raises(EngineFault, match=f"page {page} "):
        pool.retain([page])
    with pytest.raises(EngineFault, match=f"page {page} "):
        pool.release([page])
    assert pool.num_free == 3


def test_negative_count_is_refused():
    with pytest.raises(EngineFault, match="num_pages=-1"):
        PagePool(4).allocate(-1)


def test_pool_needs_a_page_beside_scratch():
    with pytest.raises(ConfigError, match="num_pages=1"):
        PagePool(1)


class PoolMachine(RuleBasedStateMachine):
    """Random calls, checked against a plain count per page."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(8)
        self.counts = dict.fromkeys(range(1, 8), 0)

    def owned(self):
        return [page for page, count in self.counts.items() if count]

    @rule(num_pages=st.integers(0, 9))
    def allocate(self, num_pages):
        free = [page for page, count in self.counts.items() if not count]
        if num_pages > len(free):
            with pytest.raises(OutOfPages):
                self.pool.allocate(num_pages)
            return
        pages = self.pool.allocate(num_pages)
        assert len(set(pages)) == num_pages
        assert set(pages) <= set(free)
        self.counts.update(dict.fromkeys(pages, 1))

    @precondition(lambda self: self.owned())
    @rule(data=st.data())
    def retain(self, data):
        page = data.draw(st.sampled_from(self.owned()))
        self.pool.retain([page])
        self.counts[page] += 1

    @precondition(lambda self: self.owned())
    @rule(data=st.data())
    def release(self, data):
        page = data.draw(st.sampled_from(self.owned()))
        self.pool.release([page])
        self.counts[page] -= 1

    @invariant()
    def counts_agree(self):
        assert {page: self.pool.refs(page) for page in self.counts} == self.counts
        assert self.pool.num_free + len(self.owned()) == self.pool.num_pages - 1


TestPoolMachine = PoolMachine.TestCase
