"""Evicted pages go to host memory and come back with the same bytes; what is found, replaced and held meanwhile."""

import pytest
import torch

from cache.late_copies import LateCopies
from peregrine.cache import page_copies
from peregrine.cache.host_tier import HostTier
from peregrine.cache.page_copies import PageCopies
from peregrine.cache.pages import PagePool
from peregrine.cache.prefix import Evicted, PrefixTree
from peregrine.cache.store import KVShape, KVStore

HEADS, LATENTS = KVShape.of_heads(2, 8), KVShape(1, 24, 16, shared=True)
NUM_PAGES = 9


def filled(num_layers: int, shape: KVShape, dtype: torch.dtype, page_size: int = 4) -> KVStore:
    """A store of random bytes."""
    store = KVStore(num_layers, NUM_PAGES, page_size, shape, dtype, "cpu")
    for part in store.parts:
        part.view(torch.uint8).random_(0, 255)
    return store


@pytest.mark.parametrize(
    "stores",
    [
        [filled(3, HEADS, torch.float32)],
        [filled(3, HEADS, torch.bfloat16), filled(1, KVShape.of_heads(3, 4), torch.bfloat16)],
        [filled(2, HEADS, torch.float8_e4m3fn)],
        [filled(2, LATENTS, torch.bfloat16)],
        [filled(1, KVShape.of_heads(1, 3), torch.float8_e4m3fn, page_size=1)],  # no whole words
    ],
    ids=["float32", "with a drafter's store", "float8", "MLA", "odd"],
)
@pytest.mark.parametrize("cut", [False, True], ids=["at once", "in groups and blocks"])
def test_pages_come_back_with_their_bytes(stores: list[KVStore], cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(store.num_bytes for store in stores) // NUM_PAGES
    if cut:
        monkeypatch.setattr(page_copies, "STAGED_BYTES", 2 * size)
        monkeypatch.setattr(page_copies, "BLOCK_BYTES", 2 * size + 1)
    copies = PageCopies(stores, 5)
    assert copies.page_bytes == size
    parts = [part.view(torch.uint8) for store in stores for part in store.parts]
    before = [part.clone() for part in parts]
    assert copies.out([7, 2, 5], [4, 0, 3]) is None  # done when it returns
    for part in parts:
        part.zero_()
    copies.back([3, 4, 0], [1, 7, 2])
    for part, old in zip(parts, before, strict=True):
        new, old = (x.view(x.shape[0], NUM_PAGES, -1) for x in (part, old))
        assert torch.equal(new[:, [1, 7, 2]], old[:, [5, 7, 2]])
        assert not new[:, [0, 3, 4, 5, 6, 8]].any()


def make_tier(num_slots: int = 3, late: bool = False) -> HostTier:
    stores = [filled(1, HEADS, torch.float32)]
    return HostTier(PagePool(NUM_PAGES), (LateCopies if late else PageCopies)(stores, num_slots))


def save(tier: HostTier, names: str) -> list[int]:
    """Save a page of its own for every letter; returns the pages."""
    pages = tier.pool.allocate(len(names))
    tier.save([Evicted(name.encode(), page) for name, page in zip(names, pages, strict=True)])
    return pages


def found(tier: HostTier, names: str) -> str:
    """The leading letters that are here."""
    return b"".join(tier.find(name.encode() for name in names)).decode()


def test_the_oldest_page_is_replaced_first_and_a_gap_ends_a_prefix() -> None:
    tier = make_tier(3)
    save(tier, "cba")  # as evicted: the last page of a prefix first
    tier.collect()
    assert found(tier, "abcd") == "abc"
    save(tier, "x")  # takes the place of c, the last page
    assert found(tier, "abc") == "ab"
    save(tier, "y")
    assert (found(tier, "y"), found(tier, "x"), found(tier, "ab")) == ("y", "", "ab")
    save(tier, "zw")
    assert tier.num_pages == 3
    assert found(tier, "ab") == "a"


def test_a_page_that_went_back_is_the_next_to_be_replaced_but_need_not_be_copied_again() -> None:
    tier = make_tier(3)
    save(tier, "cba")
    tier.collect()
    own = tier.pool.allocate(2)
    tier.load(tier.find([b"a", b"b"]), own)
    tier.collect()
    assert (tier.pages_out, tier.pages_in) == (3, 2)
    tier.save([Evicted(b"a", own[0])])  # the device evicts it again
    assert (tier.pages_out, tier.pool.refs(own[0])) == (3, 0)
    save(tier, "x")
    assert (found(tier, "b"), found(tier, "a"), found(tier, "c")) == ("", "a", "c")


def test_pages_are_held_until_their_copies_have_ended() -> None:
    tier = make_tier(3, late=True)
    pages = save(tier, "ab")
    assert tier.pool.num_free == NUM_PAGES - 1 - 2
    assert tier.num_leaving == 2
    own = tier.pool.allocate(1)
    arriving = tier.load(tier.find([b"a"]), own)
    tier.pool.release(own)  # its request was aborted
    assert tier.pool.refs(own[0]) == 1
    assert tier.num_leaving == 2
    assert arriving.ready is not None
    arriving.ready.synchronize()
    assert tier.collect() == 2
    assert [tier.pool.refs(page) for page in (*pages, *own)] == [0, 0, 0]
    assert not tier.moving


def test_a_cleared_tier_finds_nothing_and_has_all_its_room() -> None:
    tier = make_tier(3)
    save(tier, "abc")
    tier.clear()
    assert found(tier, "abc") == ""
    tier.collect()
    save(tier, "def")
    assert found(tier, "fed") == "fed"


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_page_is_named_by_every_token_it_depends_on(lookahead: int) -> None:
    """Digests of pages taken out of the tree are those looked for later, whatever was cached when they were made."""
    pool = PagePool(NUM_PAGES)
    tree = PrefixTree(pool, 2, lookahead)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    empty = tree.match([])
    names = list(tree.digests(tokens, empty))
    assert len(set(names)) == len(names) == 3
    pages = pool.allocate(3)
    tree.insert(tokens, pages)
    pool.release(pages)
    for cached in (2, 1):
        taken = tree.take(1)
        assert taken == [Evicted(names[cached], pages[cached])]
        assert pool.refs(pages[cached]) == 1  # the caller's now
        assert list(tree.digests(tokens, tree.match(tokens))) == names[cached:]
    assert list(tree.digests([1, 2, 9, 4, 5, 6, 7], empty))[1] != names[1]
    assert (next(tree.digests([1, 2, 9], empty)) == names[0]) == (lookahead == 0)
    assert tree.take(0) == tree.take(-1) == []
