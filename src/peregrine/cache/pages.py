"""The page pool: which pages of the KV stores are free, and how many references the others have.

Host only, plain integers. A page without references is free; every holder takes a reference and gives it back.
Page 0 is scratch: padding rows and the tails of page tables point at it; it has no references and is never
allocated. So `num_free` plus the number of referenced pages is always `num_pages - 1`.
"""

from collections.abc import Iterable

from peregrine.errors import ConfigError, EngineFault, OutOfPages

SCRATCH_PAGE = 0


class PagePool:
    """Allocates pages and counts their references. Deterministic: the same calls give the same pages."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ConfigError(
                f"num_pages={num_pages}: page {SCRATCH_PAGE} is scratch, so at least 2 are needed; "
                "give the cache more memory"
            )
        self.num_pages = num_pages
        self._refs = [0] * num_pages
        # A stack, lowest page on top at first; the page freed last is reused first.
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))

    @property
    def num_free(self) -> int:
        """Pages without references."""
        return len(self._free)

    def refs(self, page: int) -> int:
        """The number of references to a page; 0: the page is free, or the scratch page."""
        return self._refs[page]

    def are_held(self, pages: Iterable[int]) -> bool:
        """Whether all pages have references."""
        return all(map(self._refs.__getitem__, pages))

    def allocate(self, num_pages: int) -> list[int]:
        """Take free pages with one reference each; raises OutOfPages, and takes none, if there are too few."""
        if num_pages < 0:
            raise EngineFault(f"num_pages={num_pages}: cannot allocate a negative number of pages; ask for 0")
        if num_pages > len(self._free):
            raise OutOfPages(
                f"{num_pages} pages wanted, {len(self._free)} of {self.num_pages - 1} free; "
                "evict cached pages or finish a request first"
            )
        start = len(self._free) - num_pages
        pages = self._free[start:][::-1]
        del self._free[start:]
        for page in pages:
            self._refs[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add one reference to each page; each must have one already."""
        refs, end = self._refs, self.num_pages
        for page in pages:
            if not (SCRATCH_PAGE < page < end and refs[page]):
                raise not_owned(page, end)
            refs[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove one reference from each page; a page whose last one is removed becomes free."""
        refs, end = self._refs, self.num_pages
        for page in pages:
            if not (SCRATCH_PAGE < page < end and refs[page]):
                raise not_owned(page, end)
            refs[page] -= 1
            if not refs[page]:
                self._free.append(page)


def not_owned(page: int, num_pages: int) -> EngineFault:
    """What is wrong with a page that nobody holds, or that does not exist."""
    return EngineFault(
        f"page {page} has no owner, so no reference can be added or given back; "
        f"pages are 1 to {num_pages - 1} and come from allocate()"
    )
