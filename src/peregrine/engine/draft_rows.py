"""The rows of rounds that are planned draft by draft: what is known of their requests and of their drafts, in arrays.

They are gathered from the requests when the rows change, and left to them when rounds are planned otherwise. What is
done for all rows of a round is a few compiled calls (`spec/rows_cpu.py`).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from peregrine.engine.request import Request
from peregrine.kernels.round import HEADER
from peregrine.kernels.runtime.arrays import Arrays
from peregrine.kernels.runtime.dispatch import DeviceFile
from peregrine.spec import draft_table as column
from peregrine.spec.links import Branched
from peregrine.spec.odds import OWN_MEMORY, Floats, Guess, Ints, survivals
from peregrine.spec.planner import Costs

NONE = np.zeros(0, np.int64)
NO_VERDICTS = np.zeros((0, HEADER), np.int64)

_compiled = DeviceFile("peregrine.spec.rows_cpu")


class DraftRows:
    """What is known of each row, of the drafts in its window, and of those that are being made."""

    def __init__(self, table: Floats, odds: Floats) -> None:
        self.table, self.odds = table, odds  # one line for each row, and for greedy and sampled requests
        self.numbers = np.zeros((4, len(table)), np.int64)
        self.requests: list[Request] = []
        half = column.DRAFTS + 3 * column.depth_in(table)
        self._window = table[:, column.DRAFTS : half].reshape(len(table), -1, 3)
        self._new = table[:, half:].reshape(len(table), -1, 3)
        self._offered, self._lens, self._held, self._made = self.numbers
        self._drafted = table[:, column.DRAFTED]
        self._rows: Sequence[int] | None = None  # that are drafted for
        self._arrays = Arrays(table, self.numbers, odds)
        self._state = self._arrays.address
        self._counted: Sequence[int] = ()  # drafts that each row got in this round, if they were counted since
        self._chosen_by: Costs | None = None
        self._verify: Arrays  # by those costs
        self._costs: Costs | None = None
        self._curves: list[Arrays] = []  # of each level: verify, absorb, step
        self._verified: Sequence[int] = ()  # nodes of the windows, as `_lens` has them

    @staticmethod
    def of(requests: Sequence[Request], odds: Floats, depth: int) -> "DraftRows":
        """Of these requests; a window has at most so many drafts."""
        rows = DraftRows(np.zeros((len(requests), column.width_of(depth))), odds)
        rows.requests = list(requests)
        for row, request in enumerate(requests):
            asked, own, guesses = request.params.num_drafts, request.odds, request.guesses
            rows.table[row, : column.DRAFTED] = (
                request.params.temperature > 0,
                own.expected,
                own.right,
                depth if asked is None else min(asked, depth),
                request.limit - request.num_tokens - 1,
            )
            if guesses:
                rows._window[row, : len(guesses)], rows._held[row] = guesses, len(guesses)
        return rows

    def tell(self) -> None:
        """Give the requests what is known of them."""
        records, held = self.table[:, column.EXPECTED : column.RIGHT + 1].tolist(), self._held.tolist()
        for request, window, record, count in zip(self.requests, self._window, records, held, strict=True):
            request.odds.expected, request.odds.right = record
            request.guesses = [Guess(*draft) for draft in window[:count].tolist()]

    def rest(self, rounds: int) -> None:
        """So many rounds have passed without drafts: what is known of the rows fades."""
        self.table[:, column.EXPECTED : column.RIGHT + 1] *= OWN_MEMORY**rounds
        self.table[:, column.LEFT] -= rounds

    def choose(
        self, costs: Costs, offered: Sequence[int], rate: float, whole: bool, verdicts: Ints = NO_VERDICTS
    ) -> tuple[tuple[int, ...], float, int]:
        """Nodes of each row's window, and the tokens that its drafts are expected to give.

        Of the drafts that it is offered, what pays, or the `whole` window. If there are verdicts on the windows chosen
        before, they are taken in first, as `judge` does; the third value is the tokens of that round.
        """
        offers_made = len(verdicts) > 0 and offered == self._counted
        if not offers_made:
            self._offered[:] = offered
        if costs is not self._chosen_by:
            self._chosen_by, self._verify = costs, Arrays(costs.curves.verify)
        curves = self._verify.address
        expected, won = _compiled.choose_windows(self._state, verdicts, offers_made, curves, costs.ragged, rate, whole)
        self._verified = lens = tuple(self._lens.tolist())
        return lens, expected, won

    def begin(self, lens: Sequence[int], rows: Sequence[int]) -> None:
        """A round verifies chains of so many nodes, and drafts for these rows."""
        if lens is not self._verified:
            self._lens[:], self._verified = lens, lens
        if rows is self._rows:
            return
        self._rows = rows
        self._drafted[:] = 0.0 if len(rows) < len(self.table) else 1.0
        if 0 < len(rows) < len(self.table):
            self._drafted[rows] = 1.0

    def add(self, said: Tensor, first: bool) -> None:
        """One more draft of each row that is drafted for, of which the drafter says this [n]; `first`: of the round."""
        said, self._counted = said.float().contiguous(), ()
        _compiled.add_drafts(self._state, said.data_ptr(), first)

    def add_and_want(self, said: Tensor, depth: int, costs: Costs, tokens: int, rate: float) -> int:
        """The same; returns how many rows are worth one draft more after so many.

        The next windows have so many tokens until now, where time is worth `rate` tokens per millisecond.
        """
        if costs is not self._costs:
            curves, levels = costs.curves, range(1 + len(self._window[0]))
            steps = [curves.step_at(level, costs.steps) for level in levels]
            self._costs, self._curves = costs, [Arrays(curves.verify, curves.absorb, step) for step in steps]
        if said.dtype is not torch.float32 or not said.is_contiguous():  # asked, since to convert nothing takes longer
            said = said.float().contiguous()
        self._counted = ()
        at = self._curves[depth].address
        count: int = _compiled.add_and_want(self._state, said.data_ptr(), at, depth, tokens, rate)
        return count

    @property
    def made(self) -> list[int]:
        """How many drafts each row got in this round."""
        found: list[int] = self._made.tolist()
        self._counted = found
        return found

    def force(self, known: Sequence[int], first: bool) -> None:
        """The first of the new drafts of each row, so many, are those that its grammar leaves no choice about.

        `first`: the round has made none.
        """
        self._counted = ()
        if first:
            self._made[:] = 0
        for row, count in enumerate(known):
            self._new[row, :count] = np.nan, 1.0, 1.0
            self._made[row] = max(self._made[row], count)

    def judge(self, table: Ints, branched: Branched | None) -> tuple[int, Ints]:
        """Learn from a round's verdicts [R, columns]; returns its tokens, and how many drafts of each chain were right.

        Windows have the new drafts then.
        """
        right = NONE
        if branched is not None:  # of the path, what is in the chain
            path = table[:, (HEADER + table.shape[1]) // 2 + 1 :]
            taken = np.arange(path.shape[1]) < table[:, 1:2]
            right = ((path < self._lens[:, None]) & taken).sum(axis=1)
        won: int = _compiled.judge_windows(self._state, table, right)
        return won, table[:, 1] if branched is None else right

    def won(self, lens: Sequence[int]) -> float:
        """The tokens that the drafts of chains of so many nodes are expected to give."""
        lines = zip(self._window[..., column.CHANCE].tolist(), lens, strict=True)
        return sum([sum(survivals(line[: nodes - 1])) for line, nodes in lines])

    def cap(self, row: int) -> int:
        """The most drafts a row may have."""
        asked, left = self.table[row, column.ASKED : column.DRAFTED].tolist()
        return int(max(0, min(asked, left)))

    def chances(self, row: int) -> list[float]:
        """Of the drafts in a row's window, as far as it may have them."""
        count = min(int(self._held[row]), self.cap(row))
        found: list[float] = self._window[row, :count, column.CHANCE].tolist()
        return found
