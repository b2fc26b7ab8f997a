"""How rounds of one number of drafts compare with those of another, by the clock, with all the host does between them.

The table of costs is timed part by part when the engine starts, and is some percent off. The time of a round also grows
with the texts, and changes with the machine. So rounds are compared where their number of drafts changes while the same
requests go on: the last ones before with the first ones after.
"""

from collections import deque
from statistics import median

COMPARED, LEAST = 15, 5  # rounds on each side of a change; at least so many
CHANGES = 8  # of which the median is taken: up and down, so that growing texts cancel
TABLE = 1  # changes that the table counts for: of a single one, rounds may be slow by chance

Size = tuple[int, int]  # rows, drafts of each


class Periods:
    """Times of rounds that repeat a plan, and what they say of its number of drafts."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[int, int, int], deque[float]] = {}  # rows, drafts, more drafts: how many times as long
        self._size: Size | None = None  # of the rounds that are noted now
        self._before: float | None = None  # milliseconds of the last rounds of `_from`, just before them
        self._from = 0  # drafts
        self._now: list[float] = []  # milliseconds

    def note(self, ms: float) -> None:
        """Take in one round of the present size."""
        self._now.append(ms)

    def begin(self, size: Size | None, goes_on: bool) -> None:
        """The rounds from now on have this size; None: no one number of drafts. `goes_on`: requests are the same."""
        if goes_on and size is not None and size == self._size:
            return
        self.compare()
        ended, noted = self._size, self._now
        compares = goes_on and ended is not None and len(noted) >= LEAST
        self._before, self._from = (median(noted[-COMPARED:]), ended[1]) if compares and ended else (None, 0)
        self._size, self._now = size, []

    def compare(self) -> None:
        """Compare the rounds of the present size with those just before them; once, when there are enough."""
        if self._size is None or self._before is None or len(self._now) < LEAST:
            return
        ratio, (rows, drafts) = median(self._now[:COMPARED]) / self._before, self._size
        fewer, more = sorted((self._from, drafts))
        changes = self._ratios.setdefault((rows, fewer, more), deque(maxlen=CHANGES))
        changes.append(ratio if drafts == more else 1 / ratio)
        self._before = None

    def ratio(self, rows: int, fewer: int, more: int, foreseen: float) -> float:
        """How many times as long a round takes with more drafts; `foreseen`: by the table."""
        known: float = median([foreseen] * TABLE + [*self._ratios.get((rows, fewer, more), ())])
        return known

    def most_compared(self, rows: int, drafts: int) -> int:
        """With which fewer drafts they were compared most often; the nearest of several."""
        return max(range(drafts), key=lambda fewer: (self.num_changes(rows, fewer, drafts), fewer))

    def num_changes(self, rows: int, fewer: int, more: int) -> int:
        """How often they were compared, up to CHANGES."""
        return len(self._ratios.get((rows, fewer, more), ()))
