"""How windows of unlike length compare in rounds of one request alone, by the clock.

The table of costs is timed when the engine starts, some sizes only once: where the machine was busy for a moment, one
may seem to take half as long again. The windows of a request alone change from round to round, so that rounds of two
lengths often follow each other, at one speed of the machine. Of several requests see `periods.py`.
"""

from collections import Counter, deque
from dataclasses import replace

from peregrine.engine.periods import Compared
from peregrine.spec.planner import Costs, rising

RECENT = 15  # comparisons of two lengths that count: single rounds are compared
TRIED = 5  # rounds of a length, and comparisons with others, until its cost is known


class LoneWindows:
    """Times of verification that followed each other, and what they say of the table."""

    def __init__(self, table: Costs) -> None:
        self._start, self.table = table, table  # as it was timed, and corrected
        # A length that was hardly compared, but the longer ones after it, is hoped to cost no more than a shorter one,
        # so that it is tried: else what the table says of it would never be corrected.
        self.hoped = table
        # How many times as long the longer of two windows takes.
        self._ratios: dict[tuple[int, int], deque[float]] = {}
        self._rounds: Counter[int] = Counter()  # of a length
        self._compared: Counter[int] = Counter()  # the same, with a round of another length before or after them
        self._last: tuple[int, float] | None = None  # tokens and milliseconds

    def note(self, tokens: int, ms: float) -> None:
        """Take in a round with a window of so many tokens, whose verification took so long."""
        last, self._last = self._last, (tokens, ms)
        self._rounds[tokens] += 1
        if last is not None and last[0] != tokens:
            (fewer, less_ms), (more, more_ms) = sorted((last, self._last))
            self._ratios.setdefault((fewer - 1, more - 1), deque(maxlen=RECENT)).append(more_ms / less_ms)
            self._compared.update((fewer, more))

    def correct(self) -> None:
        """Correct the table by what was taken in."""
        start, new = self._start, next(size for size in range(2, 3 + len(self._rounds)) if self._rounds[size] < TRIED)
        sizes = range(1, 1 + max([new, *self._rounds]))
        times = Compared(self._ratios, len(sizes)).fit([start.verify_ms(size) for size in sizes]).times
        last = times[-1] / start.verify_ms(sizes[-1])
        larger = {size: last * ms for size, ms in start.verify if size > sizes[-1]}
        self.table = replace(start, verify=rising(dict(zip(sizes, times, strict=True)) | larger))
        for size in range(2, 1 + new):
            if self._compared[size] < TRIED:
                times[size - 1] = times[size - 2]
        self.hoped = replace(start, verify=rising(dict(zip(sizes, times, strict=True)) | larger))
