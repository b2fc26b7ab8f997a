"""What rounds did for running requests, by seat, until the requests take it in.

Most tokens interest nobody before their request ends, and to append them to lists, row by row, takes the host longer
than all the rest of a round. So a round's verdict is copied into the log as a whole. A request takes in its lines when
somebody asks for its tokens; when the log is full, all of them do.
"""

import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from peregrine.kernels.round import HEADER

Ints = npt.NDArray[np.int64]
ROUNDS = 64  # that are kept
WORD = 8  # bytes
COUNTS = 3  # numbers of a verdict that statistics are made of: tokens, right drafts, drafts
FEW = 8  # requests in the first seats are given their rounds at once: for so few, the log is the slower way
# What a user waits for: the output; each round's tokens; with them their text; what a round must be looked at for.
AT_END, TOKENS, TEXT, MORE = range(4)


class Logged(NamedTuple):
    """What a request is given when the log is full."""

    tokens: bytes  # words
    verdicts: bytes  # of its rounds, three words each
    since: float  # when the first of these tokens came


class RoundLog:
    """The lines of the last rounds' verdicts, for each seat."""

    def __init__(self, seats: int, width: int) -> None:
        """`width`: the most tokens of a row and round."""
        self._lines = np.zeros((seats, ROUNDS, HEADER + width), dtype=np.int64)
        self._times: list[float] = []  # of each round
        self._first = np.zeros(seats, dtype=np.int64)  # of each seat: the first round whose line was not taken
        self._held = np.zeros(seats, dtype=np.int64)  # tokens since then
        self._tells, self._words, self._shows = np.zeros(
            (3, seats), dtype=np.bool_
        )  # users wait for TOKENS, TEXT, MORE
        self._quiet = True  # no user of a running request waits for more than its output
        self.members = 0  # requests whose rounds are taken from here

    @property
    def is_full(self) -> bool:
        """Whether all lines must be taken before another round is added."""
        return len(self._times) == ROUNDS

    def join(self, seat: int, waits: int) -> "RoundLog | None":
        """A request has taken a seat; its user waits for the output (AT_END), for TOKENS, for TEXT, or for MORE.

        None: it is given its rounds one by one, since its user waits for MORE or it is one of a FEW.
        """
        is_member = waits != MORE and seat >= FEW
        self._first[seat], self._held[seat] = len(self._times), 0
        self._tells[seat], self._words[seat] = waits == TOKENS and is_member, waits == TEXT and is_member
        self._shows[seat] = not is_member
        self._quiet = waits == AT_END and is_member and (self._quiet or seat == 0)
        self.members += is_member
        return self if is_member else None

    def leave(self) -> None:
        """A request whose rounds were taken from here has left its seat."""
        self.members -= 1

    def move(self, source: int, target: int) -> None:
        """A request has taken the seat of another one."""
        for values in (self._lines, self._first, self._held, self._tells, self._words, self._shows):
            values[target] = values[source]

    def add(self, table: Ints) -> None:
        """Add a round's verdict, [R, columns] of the first seats; a row that took no part in it has zeros."""
        count, number, columns = len(table), len(self._times), (HEADER + table.shape[1]) // 2
        self._lines[:count, number, :columns] = table[:, :columns]
        self._held[:count] += table[:, 0]
        self._times.append(time.perf_counter())

    def news(self, table: Ints) -> tuple[list[int], list[int], list[int]]:
        """Rows of a verdict that have tokens for their users; tokens and text; an end, or more than that."""
        if self._quiet:
            return [], [], table[:, 3].nonzero()[0].tolist()
        count, came, ends = len(table), table[:, 0] > 0, table[:, 3] > 0
        goes_on = came > ends
        rows = self._tells[:count] & goes_on, self._words[:count] & goes_on, (self._shows[:count] & came) | ends
        told, worded, whole = (each.nonzero()[0].tolist() for each in rows)
        return told, worded, whole

    def held(self, seat: int) -> int:
        """How many tokens its request has not taken in."""
        return self._held.item(seat)

    def take(self, seat: int) -> list[tuple[list[int], float]]:
        """The rounds that its request has not taken in: of each its line of the verdict, and when it was added."""
        first = self._first.item(seat)
        if first == len(self._times):
            return []
        lines, times = self._lines[seat, first : len(self._times)].tolist(), self._times[first:]
        self._first[seat], self._held[seat] = len(self._times), 0
        return [(line, now) for line, now in zip(lines, times, strict=True) if line[0] or line[3]]

    def take_all(self, count: int) -> list[Logged]:
        """What the requests in the first seats, which are all there are, have not taken in; begins the log anew."""
        lines, first = self._lines[:count], self._first[:count, None]
        live = (np.arange(ROUNDS) >= first) & ((lines[..., 0] > 0) | (lines[..., 3] > 0))  # [R, n]
        inside = np.arange(lines.shape[2] - HEADER) < (lines[..., 0] * live)[..., None]  # [R, n, W]
        tokens, verdicts = lines[..., HEADER:][inside].tobytes(), lines[live, :COUNTS].tobytes()
        token_ends, verdict_ends = WORD * self._held[:count].cumsum(), WORD * COUNTS * live.sum(axis=1).cumsum()
        made, start, verdict_start = [], 0, 0
        ends = (values.tolist() for values in (token_ends, verdict_ends, live.argmax(axis=1)))
        for end, verdict_end, began in zip(*ends, strict=True):
            made.append(Logged(tokens[start:end], verdicts[verdict_start:verdict_end], self._times[began]))
            start, verdict_start = end, verdict_end
        self._first[:], self._held[:], self._lines[..., :HEADER] = 0, 0, 0
        self._times.clear()
        return made
