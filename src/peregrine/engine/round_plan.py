"""The plan of one round: its windows, and how far the drafter goes on, decided step by step from what it says."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from peregrine.engine.branching import Branching
from peregrine.engine.draft_rows import DraftRows
from peregrine.engine.request import Request
from peregrine.kernels.round import HEADER
from peregrine.spec.links import Branched
from peregrine.spec.odds import MOST, Ints, Odds, survivals
from peregrine.spec.planner import Costs
from peregrine.spec.windows import Ruled, Windows, paths_of

LOOK_AHEAD = 4  # drafts that are planned before the first is made; further ones are decided step by step


class Planner(Protocol):
    """What a plan asks while the drafter works."""

    rate: float  # tokens per millisecond that time is worth

    def costs_of(self, rows: int) -> Costs:
        """Where every step is made for so many rows."""


class RoundPlan:
    """The plan of one round; see `spec.windows.Plan`."""

    # What is so in almost every round is written here, not into each of them.
    drafts: int | None = None
    ruled: Ruled | None = None
    branched: Branched | None = None
    ranks = 1
    rests = False
    rows: Tensor | None = None
    ranked: Sequence[list[tuple[list[int], list[float]]]] = ()  # of each row, the tokens its drafts were among
    expected = 0.0  # tokens of this round
    won = 0  # those that it gave, when its verdicts have been taken in
    probe = 0  # drafts that each of these rows gets, to learn what they cost and whether they are right

    def __init__(
        self,
        planner: Planner,
        known: DraftRows,
        lens: tuple[int, ...],
        drafted: list[int],
        branched: Branched | None = None,
        ranks: int = 1,
    ) -> None:
        self.planner, self.known, self.drafted = planner, known, drafted  # rows that are drafted for
        self.chains = lens  # nodes of each row's chain, the newest token included
        self.windows = self.paths = Windows.of(lens)
        self.stamps: list[float] = []  # seconds when each step of the drafter was done
        if branched is not None:
            self.branched, self.windows = branched, Windows.of(branched.lens)
            self.paths = paths_of(self.windows, branched)
        if ranks > 1:
            self.ranks = ranks
        if len(drafted) < len(lens):
            self.rests = not drafted and sum(self.windows.lens) == len(lens)
            self.rows = torch.tensor(drafted, dtype=torch.int64)
        known.begin(lens, drafted)
        self._wanted, self._tokens = len(drafted), len(lens)  # of the next round, as far as it is planned

    @property
    def requests(self) -> list[Request]:
        return self.known.requests

    @property
    def steps(self) -> list[int]:
        """Rows of each step of the drafter."""
        return [len(self.drafted)] * len(self.stamps)

    @property
    def offered(self) -> list[int]:
        """How deep the drafts of each row may be accepted."""
        return [length - 1 for length in self.chains] if self.branched is None else list(self.branched.deepest)

    @property
    def is_unusual(self) -> bool:
        """Whether it drafts for some rows only, or its chains branch: there are few such rounds."""
        return self.rows is not None or self.branched is not None or self.ranks > 1

    def add(self, chances: Tensor, ranked: tuple[Tensor, Tensor] | None = None) -> None:
        self.stamps.append(time.perf_counter())
        if ranked is not None:
            self.ranked = self.ranked or [[] for _ in self.chains]
            for row, tokens, said in zip(self.drafted, *(x.tolist() for x in ranked), strict=True):
                self.ranked[row].append((tokens, said))
        self._tokens += self._wanted
        planner, depth = self.planner, len(self.stamps)
        costs = planner.costs_of(len(self.drafted))
        if depth < self.probe or costs.steps == 1:  # a block's drafts are made together
            self.known.add(chances, first=depth == 1)
        else:
            self._wanted = self.known.add_and_want(chances, depth, costs, self._tokens, planner.rate)

    def go_on(self) -> bool:
        return self._wanted > 0

    def judge(self, table: Ints, branching: Branching | None) -> None:
        """Learn from the round's verdicts [R, columns]; its rows have the new drafts then."""
        self.won, right = self.known.judge(table, self.branched)
        if branching is not None:
            for row, request in enumerate(self.requests):
                if request.ranked:
                    tokens = table[row, HEADER : HEADER + table[row, 0]].tolist()
                    branching.learn(request, tokens, int(right[row]))
                request.ranked = self.ranked[row] if self.ranked else []

    def depths(self) -> Tensor | int:
        if not self.stamps:
            return 0
        depths = self.known.made
        return depths[0] if depths.count(depths[0]) == len(depths) else torch.tensor(depths)

    def force(self, forced: Tensor) -> None:
        known = (forced >= 0).long().cumprod(dim=1).sum(dim=1).tolist()
        self.known.force(known, first=not self.stamps)


def expected_survivals(
    requests: Sequence[Request], odds: Mapping[bool, Odds], cap_of: Callable[[Request], int]
) -> list[list[float]]:
    """The survivals of each request's first drafts, before they are made, by the mean chance at each depth.

    `odds` are by whether a request is sampled, and `cap_of` says how many drafts it may have.
    """
    means = {sampled: kind.means_by_depth(LOOK_AHEAD) for sampled, kind in odds.items()}
    lines = []
    for request in requests:
        factor, chances = request.odds.factor, means[request.params.temperature > 0][: cap_of(request)]
        lines.append(survivals([min(MOST, chance * factor) for chance in chances]))
    return lines
