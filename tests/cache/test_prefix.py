"""The prefix tree: which pages are matched, which references are held, and which pages are evicted first."""

import pytest

from peregrine.cache.pages import PagePool
from peregrine.cache.prefix import PrefixTree
from peregrine.errors import ConfigError, EngineFault


def grown(tree, tokens):
    """Cache the whole pages of some tokens as a finished request would; returns their pages."""
    pages = tree.pool.allocate(tree.whole_pages(len(tokens)))
    tree.insert(tokens, pages)
    tree.pool.release(pages)
    return list(tree.match(tokens).pages)


@pytest.fixture
def pool():
    return PagePool(12)


@pytest.fixture
def tree(pool):
    return PrefixTree(pool, page_size=2, lookahead=0)


@pytest.fixture
def bigram_tree(pool):
    return PrefixTree(pool, page_size=2, lookahead=1)


def test_only_whole_pages_match(tree):
    pages = grown(tree, [1, 2, 3, 4, 5])
    assert len(pages) == 2
    match = tree.match([1, 2, 3, 4, 9, 9])
    assert (match.pages, match.num_tokens) == (tuple(pages), 4)
    match = tree.match([1, 2, 3])
    assert (match.pages, match.num_tokens) == (tuple(pages[:1]), 2)
    assert tree.match([2, 1, 3, 4]).num_tokens == 0
    assert tree.match([]).pages == ()


@pytest.mark.parametrize(("num_tokens", "whole"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_lookahead_needs_the_next_token(bigram_tree, num_tokens, whole):
    assert bigram_tree.whole_pages(num_tokens) == whole


def test_bigram_key_holds_the_next_token(bigram_tree):
    pages = grown(bigram_tree, [1, 2, 3, 4, 5])
    assert bigram_tree.match([1, 2]).pages == ()  # the token after the page is not known
    assert bigram_tree.match([1, 2, 3]).pages == tuple(pages[:1])
    assert bigram_tree.match([1, 2, 7]).pages == ()  # with another next token the draft entry differs
    assert bigram_tree.match([1, 2, 3, 4, 6]).pages == tuple(pages[:1])
    other = grown(bigram_tree, [1, 2, 7])
    assert other != pages[:1]
    assert bigram_tree.match([1, 2, 7]).pages == tuple(other)


def test_insert_takes_a_reference_to_each_page_that_was_not_cached(tree, pool):
    first = pool.allocate(2)
    tree.insert([1, 2, 3, 4], first)
    assert [pool.refs(page) for page in first] == [2, 2]
    tree.insert([1, 2, 3, 4], first)  # the tree's own
    assert [pool.refs(page) for page in first] == [2, 2]
    second = pool.allocate(3)
    tree.insert([1, 2, 3, 4, 5, 6], second)  # two of them hold what others hold already
    assert [pool.refs(page) for page in second] == [1, 1, 2]
    pool.release([*first, *second])
    assert tree.match([1, 2, 3, 4, 5, 6]).pages == (*first, second[2])
    assert pool.num_free + tree.num_cached == pool.num_pages - 1


def test_runs_are_cut_where_prefixes_part_or_end(tree, pool):
    """What is cached, in which order it is evicted, and under which digests does not depend on how runs were cut."""
    long, other = [1, 1, 2, 2, 3, 3, 4, 4], [1, 1, 2, 2, 7, 7]
    names = list(tree.digests(long, tree.match([])))
    pages = grown(tree, long)
    branch = grown(tree, other)
    assert branch[:2] == pages[:2]
    used = tree.match(long[:6])
    tree.lock(used)  # ends in the middle of a run, whose rest is now the oldest
    assert [(e.page, e.digest) for e in tree.take(1)] == [(pages[3], names[3])]
    tree.unlock(used)
    assert list(tree.digests(long, tree.match(long))) == names[3:]
    assert [e.page for e in tree.take(9)] == [branch[2], *reversed(pages[:3])]
    assert tree.num_cached == 0


def test_match_retains_nothing_and_lock_does(tree, pool):
    pages = grown(tree, [1, 2])
    match = tree.match([1, 2])
    assert pool.refs(pages[0]) == 1
    tree.lock(match)
    tree.lock(match)
    assert pool.refs(pages[0]) == 3
    assert tree.evict(9) == 0
    tree.unlock(match)
    assert tree.evict(9) == 0
    tree.unlock(match)
    assert tree.evict(9) == 1
    assert pool.num_free == pool.num_pages - 1


def test_a_page_held_without_a_lock_is_not_evicted(tree, pool):
    pages = pool.allocate(1)
    tree.insert([1, 2], pages)
    assert tree.evict(1) == 0
    pool.release(pages)
    assert tree.evict(1) == 1


def test_least_recently_used_leaf_is_evicted_first(tree):
    grown(tree, [1, 1])
    grown(tree, [2, 2])
    grown(tree, [3, 3])
    used = tree.match([1, 1])
    tree.lock(used)
    tree.unlock(used)
    assert tree.evict(1) == 1
    assert tree.match([2, 2]).num_tokens == 0
    assert tree.evict(1) == 1
    assert tree.match([3, 3]).num_tokens == 0
    assert tree.match([1, 1]).num_tokens == 2


def test_match_alone_is_not_a_use(tree):
    grown(tree, [1, 1])
    grown(tree, [2, 2])
    tree.match([1, 1])
    tree.evict(1)
    assert tree.match([1, 1]).num_tokens == 0


def test_leaves_are_evicted_before_their_parents(tree):
    grown(tree, [1, 1, 2, 2, 3, 3])
    grown(tree, [1, 1, 4, 4])
    for cached in (3, 2, 1, 0):
        assert tree.evict(1) == 1
        assert tree.num_cached == cached
        assert (tree.match([1, 1]).num_tokens == 2) == (cached > 0)
    assert tree.evict(1) == 0


def test_eviction_does_not_look_at_the_whole_tree(tree, pool):
    """One eviction from a tree with many old leaves looks at one entry, not at all of them."""
    for token in range(10):
        grown(tree, [token, token])
    looked_at = []
    refs = pool.refs
    pool.refs = lambda page: looked_at.append(page) or refs(page)
    tree.evict(1)
    assert len(looked_at) == 1


def test_clear_keeps_what_is_in_use(tree, pool):
    grown(tree, [1, 1, 2, 2])
    grown(tree, [3, 3])
    match = tree.match([1, 1])
    tree.lock(match)
    assert tree.clear() == 2
    assert tree.match([1, 1, 2, 2]).num_tokens == 2
    tree.unlock(match)
    assert tree.clear() == 1
    assert (tree.num_cached, pool.num_free) == (0, pool.num_pages - 1)


def test_lock_refuses_a_match_that_was_evicted(tree):
    pages = grown(tree, [1, 1])
    match = tree.match([1, 1])
    tree.evict(1)
    with pytest.raises(EngineFault, match="match again"):
        tree.lock(match)
    assert grown(tree, [2, 2]) == pages  # the page was allocated again since
    with pytest.raises(EngineFault, match="match again"):
        tree.lock(match)


def test_unlock_refuses_what_is_not_locked(tree, pool):
    pages = grown(tree, [1, 1])
    with pytest.raises(EngineFault, match="not locked"):
        tree.unlock(tree.match([1, 1]))
    assert pool.refs(pages[0]) == 1


def test_insert_refuses_before_it_changes_anything(tree, bigram_tree, pool):
    cached = grown(tree, [1, 1])
    own = pool.allocate(2)
    before = pool.num_free, tree.num_cached
    with pytest.raises(EngineFault, match="only 1 have a key"):
        tree.insert([5, 5, 6], own)
    with pytest.raises(EngineFault, match="only 0 have a key"):
        bigram_tree.insert([5, 5], own[:1])
    with pytest.raises(EngineFault, match="insert each page once"):
        tree.insert([5, 5, 5, 5], [own[0], own[0]])
    with pytest.raises(EngineFault, match=f"page {cached[0]} is cached for other tokens"):
        tree.insert([5, 5, 6, 6], [own[0], cached[0]])
    free = next(page for page in range(1, pool.num_pages) if not pool.refs(page))
    with pytest.raises(EngineFault, match="not the caller's to give"):
        tree.insert([5, 5, 6, 6], [own[0], free])
    assert (pool.num_free, tree.num_cached) == before
    assert tree.match([5, 5]).num_tokens == 0


def test_options_are_checked(pool):
    with pytest.raises(ConfigError, match="lookahead=2"):
        PrefixTree(pool, page_size=16, lookahead=2)
    with pytest.raises(ConfigError, match="page_size=0"):
        PrefixTree(pool, page_size=0, lookahead=0)
