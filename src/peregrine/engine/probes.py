"""Rounds that draft for a few rows, whether that seems to pay or not.

A size of window that looks costly, or a request whose drafts were wrong, would never be looked at again.
"""

from collections.abc import Iterable, Sequence

from peregrine.engine.request import Request

EVERY = 512  # rounds; sooner while there were few
MOST_MISSED = 64  # tokens that are read for a probe
DEPTH = 2  # drafts of a row in a probe; always as many, so that its sizes are recorded soon


class Probes:
    """When the next probe is due, and which rows it drafts for."""

    def __init__(self) -> None:
        self.due = 0  # the round of the next one
        self._made = 0

    def depth(self, number: int, caps: Iterable[int]) -> int:
        """How many drafts some rows get after this round; 0: it is no probe. `caps`: what each row may have."""
        if number < self.due:
            return 0
        depth = min([DEPTH, *caps])
        self._made += depth > 0
        self.due = number + min(EVERY, 4 << self._made)
        return depth

    def rows(self, requests: Sequence[Request]) -> list[int]:
        """A quarter of the rows: those of which the drafter missed the least, of equals in turn.

        It must read that first, so a row of which it missed much is left out.
        """
        count = len(requests)
        order = sorted(range(count), key=lambda row: (requests[row].num_missed, (row - self._made) % count))
        return [row for row in order[: -(-count // 4)] if requests[row].num_missed <= MOST_MISSED]
