"""What rounds cost on this machine: the table that was timed at the start (`start_costs.py`), and what real rounds say.

The table says how sizes compare. Real rounds tell how its parts compare: the drafter's work, with the planning that
only rounds with drafts need, against the verification in the same round, which is as fast as the machine is at the
moment. Sizes are corrected only by rounds that followed each other: one that is seen often would drift away from those
that are not, otherwise, and the choice between them with it. Of several rows these are rounds with more and with fewer
drafts (`periods.py`), of a row alone windows of unlike length (`lone_windows.py`). All of it by medians: a round that
was interrupted, or recorded a new size, says little.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from peregrine.engine.lone_windows import LoneWindows
from peregrine.engine.periods import Fit, Periods
from peregrine.engine.planned_rates import PlannedRate
from peregrine.engine.round_times import RoundTimes
from peregrine.spec.planner import Costs, Points, rising
from peregrine.spec.windows import Windows

RECENT, FIRST = 15, 5  # rounds whose median counts, and for how many of them the table does at first
MOST_OFF = 2.0  # a round that takes this many times what it should was interrupted, or recorded a new size


class PastRound(NamedTuple):
    """A round after which every row has as many drafts, what it took, and what it gave."""

    tokens: int
    rows: int
    drafts: int
    times: RoundTimes
    won: int
    rate: PlannedRate | None


class PlannedRound(NamedTuple):
    """A round that was planned draft by draft."""

    windows: Windows
    steps: Sequence[int]  # rows of each step of the drafter
    branches: bool
    even: bool  # all rows were drafted for
    times: RoundTimes
    won: int  # tokens
    rate: PlannedRate | None  # for which they count


class RoundCosts:
    """The table of costs, and how the rounds that pass compare with it."""

    def __init__(
        self,
        verify: dict[int, float],
        absorb: dict[int, float],
        step: dict[int, float],
        steps: int,
        first: dict[int, float] | None = None,
        ragged: float = 0.0,
        recording_ms: float = 0.0,
    ) -> None:
        self.recording_ms = recording_ms  # what the first round of a size takes more: it allocates and records
        parts = rising(absorb), rising(step), steps, rising(first or {})
        self._table = Costs(rising(verify), *parts, ragged)
        self._drafting_table: dict[tuple[int, int, int], float] = {}  # see `_drafting_ms`
        self._first_table: dict[tuple[int, int], float] = {}  # see `_first_ms`
        self._expected: dict[tuple[int, ...], float] = {}  # see `_expect`; by `_known`
        self.branched = 0.0  # milliseconds more, if chains branch
        self._between: deque[float] = deque(maxlen=RECENT)  # milliseconds between rounds, at the table's speed
        # What rounds took, over the table: the verification; then, over that, the first drafts and further ones.
        self._speed, self._first, self._step = (deque([1.0] * FIRST, RECENT) for _ in range(3))
        # Of rounds of a row alone, and of those with one number of drafts for all rows: the drafter's work, over the
        # table and the verification.
        self._alone, self._steady = (deque([1.0] * FIRST, RECENT) for _ in range(2))
        self._planning = deque([0.0], RECENT)  # milliseconds that a row alone takes more, if its chain may branch
        self._missed = deque([1.0], RECENT)  # what it took to read missed tokens, over the table
        self.periods = Periods()  # of rounds with one number of drafts for all, and of those without
        self._lone = LoneWindows(self._table)
        self._now = 1.0  # the speed at the moment
        self._known = self._table

    def costs(self) -> Costs:
        """The table as a value, with what real rounds have said."""
        table, first, step = self._table, middle(self._first), middle(self._step)
        verify = scaled(table.verify, 1.0, self._host)
        parts = scaled(table.absorb, first), scaled(table.step, step), table.steps, scaled(table.first, first)
        self._known, self._expected = Costs(verify, *parts, table.ragged, self.branched), {}
        return self._known

    def replayed(self) -> Costs:
        """Of a row alone, all of whose drafts are one replay, with what real rounds have said and the host does.

        Windows of a length that was hardly tried are hoped to be cheap, so that they are tried.
        """
        table, factor = self._lone.hoped, middle(self._alone)
        absorb, step, first = (scaled(part, factor) for part in (table.absorb, table.step, table.first))
        return Costs(scaled(table.verify, 1.0, self._host), absorb, step, table.steps, first)

    def steady_ms(self, rows: int, drafts: int) -> float:
        """Milliseconds of a round in which every row has so many drafts, with the host's work after it."""
        return self.steady_times(rows, drafts)[drafts] if drafts else self._host + self._table.verify_ms(rows)

    def steady_times(self, rows: int, most: int) -> list[float]:
        """The same for no draft, one, two and so on."""
        return self.steady_fit(rows, most).times

    def steady_fit(self, rows: int, most: int) -> Fit:
        """The same, with how sure it is.

        How real rounds with more drafts compare with others is measured, too, where such rounds followed each other.
        """
        host, factor = self._host, middle(self._seen(rows))
        table = [host + self._steady_ms(rows * (1 + drafts), rows, drafts, factor) for drafts in range(1 + most)]
        return self.periods.fit(rows, table)

    def _table_of(self, rows: int) -> Costs:
        """Of rounds of so many rows, whose windows have one length."""
        return self._lone.table if rows == 1 else self._table

    def _seen(self, rows: int) -> deque[float]:
        """How the drafter's work in real rounds of so many rows compares with the table."""
        return self._alone if rows == 1 else self._steady

    def _steady_ms(self, tokens: int, rows: int, drafts: int, factor: float) -> float:
        """By the table: of windows with so many tokens, after which every row gets so many drafts.

        The drafter takes `factor` times as long as the table says.
        """
        return self._table_of(rows).verify_ms(tokens) + factor * self._drafting_ms(tokens, rows, drafts)

    def _drafting_ms(self, tokens: int, rows: int, drafts: int) -> float:
        """The drafter's part, by the table."""
        known = self._drafting_table.get((tokens, rows, drafts))
        if known is None:
            table, made = self._table, min(drafts, self._table.steps)
            steps = table.step_ms(rows, 0) + (made - 1) * table.step_ms(rows, 1) if made else 0.0
            known = self._drafting_table[tokens, rows, drafts] = table.absorb_ms(tokens) + steps if drafts else 0.0
        return known

    def learn_steady(self, rounds: Sequence[PastRound]) -> float:
        """Take in rounds after which every row has as many drafts; tokens count for the `rate` of such rounds.

        Returns the milliseconds that they should take.
        """
        for past in rounds:
            if past.rows == 1 and past.times.usual and past.times.verify_ms < self._most_ms(past.tokens):
                self._lone.note(past.tokens, past.times.verify_ms)
        if rounds and rounds[-1].rows == 1:
            self._lone.correct()
        for past in rounds[-RECENT:]:
            self._speed.append(ratio(past.times.verify_ms, self._table_of(past.rows).verify_ms(past.tokens)))
        speed = self._now = middle(self._speed)
        for past in rounds[-RECENT:]:
            self._note_host(past.times.host_ms)
        for tokens, rows, drafts, times, _, _ in rounds:
            if drafts:
                drafting = speed * self._drafting_ms(tokens, rows, drafts)
                self._seen(rows).append(ratio(times.ms - times.verify_ms, drafting))
        host, alone, several = self._host, middle(self._alone), middle(self._steady)
        total, due = 0.0, dict[tuple[int, int, int], float]()
        for tokens, rows, drafts, times, won, rate in rounds:
            size = tokens, rows, drafts
            if size not in due:
                due[size] = speed * self._steady_ms(*size, alone if rows == 1 else several)
            expected, ms = due[size], times.ms
            total += expected
            if rate is not None and times.usual and ms < MOST_OFF * expected:
                rate.note(won, ms / speed + host)
        return total

    def _most_ms(self, tokens: int) -> float:
        """What it may take to verify so many tokens, unless something held the round up."""
        return MOST_OFF * self._now * self._table.verify_ms(tokens)

    def _note_host(self, ms: float | None) -> None:
        if ms is not None:
            self._between.append(ms / self._now)

    @property
    def _host(self) -> float:
        """Milliseconds between rounds."""
        return middle(self._between) if self._between else 0.0

    def note_missed(self, tokens: int, ms: float) -> None:
        """The drafter has absorbed so many tokens that it had missed."""
        if tokens:
            self._missed.append(ratio(ms / self._now, self._table.read_ms(tokens)))

    def missed_ms(self, tokens: int) -> float:
        """Milliseconds until the drafter has absorbed so many tokens that it missed."""
        return middle(self._missed) * self._table.read_ms(tokens) if tokens else 0.0

    @property
    def planning_ms(self) -> float:
        """Milliseconds that a round of one row takes more, if the drafter ranks tokens for branches."""
        return max(0.0, middle(self._planning))

    def _expect(self, tokens: int, steps: Sequence[int], branches: bool = False) -> float:
        """Milliseconds of a round at the machine's present speed, without what the host does after it."""
        known, size = self._known, (tokens, *steps)
        ms = self._expected.get(size)
        if ms is None:
            absorbed = known.absorb_ms(tokens) if steps else 0.0
            ms = self._expected[size] = self._table.verify_ms(tokens) + known.steps_ms(steps) + absorbed
        return self._now * (ms + (known.branched if branches else 0.0))

    def _first_ms(self, tokens: int, rows: int) -> float:
        """By the table: until so many tokens are absorbed and so many rows have their first draft."""
        ms = self._first_table.get((tokens, rows))
        if ms is None:
            ms = self._first_table[tokens, rows] = self._table.absorb_ms(tokens) + self._table.step_ms(rows, 0)
        return ms

    def learn_planned(self, rounds: Sequence[PlannedRound]) -> float:
        """Take in rounds that were planned draft by draft; returns the milliseconds that they should take.

        Where windows differ in length or branch, they say nothing of the machine's speed: the table is of others.
        """
        table, total = self._table, 0.0
        for past in rounds[-RECENT:]:
            if past.windows.is_uniform and not past.branches:
                tokens = past.windows.window.num_tokens
                self._speed.append(ratio(past.times.verify_ms, table.verify_ms(tokens)))
        speed = self._now = middle(self._speed)
        for past in rounds[-RECENT:]:
            self._note_host(past.times.host_ms)
        host = self._host
        for windows, steps, branches, even, times, won, rate in rounds:
            tokens = windows.window.num_tokens
            expected = self._expect(tokens, steps, branches)
            total += expected
            if even and steps and not branches and windows.is_uniform:
                self._first.append(ratio(times.first(table.steps), speed * self._first_ms(tokens, steps[0])))
                if len(steps) == sum(steps):
                    self._planning.append(times.ms / speed - self.steady_ms(1, len(steps)) + host)
                if times.steps_ms and table.steps > 1:
                    due = speed * table.step_ms(steps[0], 1)
                    self._step.append(ratio(sum(times.steps_ms) / len(times.steps_ms), due))
            if rate is not None and times.usual and times.ms < MOST_OFF * expected:
                rate.note(won, times.ms / speed + host)
        return total


def middle(values: Iterable[float]) -> float:
    """The median, or the larger of the two in the middle."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def ratio(took: float, expected: float) -> float:
    return took / expected if took > 0 and expected > 0 else 1.0


def scaled(points: Points, factor: float, more: float = 0.0) -> Points:
    return tuple((size, ms * factor + more) for size, ms in points)
