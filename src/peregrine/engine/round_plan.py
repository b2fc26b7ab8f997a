"""The plan of one round: its windows, and how far the drafter goes on, decided step by step from what it says."""

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from peregrine.engine.branching import Branching
from peregrine.engine.request import Request
from peregrine.kernels.round import FINISH_NONE, HEADER
from peregrine.spec.links import Branched
from peregrine.spec.odds import MOST, Guess, Odds, survivals, survivals_of
from peregrine.spec.planner import Costs, trim_windows, worth_taking
from peregrine.spec.windows import Ruled, Windows, paths_of


class Planner(Protocol):
    """What a plan asks while the drafter works."""

    rate: float  # tokens per millisecond that time is worth
    costs: Costs

    def odds(self, request: Request) -> Odds:
        """Of the class of requests that this one is in."""

    def cap_of(self, request: Request) -> int:
        """The most drafts a request may have after the round to come."""

    def costs_of(self, rows: int) -> Costs:
        """Where every step is made for so many rows."""


class RoundPlan:
    """The plan of one round; see `spec.windows.Plan`."""

    drafts: int | None = None
    ruled: Ruled | None = None

    def __init__(
        self,
        planner: Planner,
        requests: Sequence[Request],
        lens: list[int],
        drafted: list[int],
        branched: Branched | None = None,
        ranks: int = 1,
    ) -> None:
        self.planner, self.requests, self.branched, self.ranks = planner, requests, branched, ranks
        self.chains = lens  # nodes of each row's chain, the newest token included
        self.windows = Windows.of(tuple(lens) if branched is None else branched.lens)
        self.paths = paths_of(self.windows, branched)
        self.rests = not drafted and sum(self.windows.lens) == len(lens)
        self.rows = None if len(drafted) == len(lens) else torch.tensor(drafted, dtype=torch.int64)
        self.guesses: list[list[Guess]] = [[] for _ in requests]  # of the new drafts
        self.ranked: list[list[tuple[list[int], list[float]]]] = [[] for _ in requests]  # the tokens they were among
        self.steps: list[int] = []  # rows of each step of the drafter
        self.stamps: list[float] = []  # seconds when each was done
        self.expected = 0.0  # tokens of this round
        self.probe = 0  # drafts that each of these rows gets, to learn what they cost and whether they are right
        self.drafted, self._wanted = drafted, set(drafted)  # rows that are drafted for, and whose drafts seem to pay
        self._survivals = [1.0] * len(drafted)  # of the drafts so far, in each row that is drafted for
        self._tokens = len(lens)  # of the next round, as far as it is planned

    @property
    def offered(self) -> list[int]:
        """How deep the drafts of each row may be accepted."""
        return [length - 1 for length in self.chains] if self.branched is None else list(self.branched.deepest)

    def add(self, chances: Tensor, ranked: tuple[Tensor, Tensor] | None = None) -> None:
        self.stamps.append(time.perf_counter())
        self.steps.append(len(self.drafted))
        if ranked is not None:
            for row, tokens, said in zip(self.drafted, *(x.tolist() for x in ranked), strict=True):
                self.ranked[row].append((tokens, said))
        for place, (row, chance) in enumerate(zip(self.drafted, chances.tolist(), strict=True)):
            request, line = self.requests[row], self.guesses[row]
            guess = self.planner.odds(request).guess(len(line), chance, request.odds, row in self._wanted)
            line.append(guess)
            self._survivals[place] *= guess.chance
        self._tokens += len(self._wanted)

    def go_on(self) -> bool:
        planner, depth = self.planner, len(self.steps)
        if depth < self.probe:
            return True
        survivals = []
        for row, survival in zip(self.drafted, self._survivals, strict=True):
            request = self.requests[row]
            if depth < planner.cap_of(request):
                survivals.append((survival * planner.odds(request).expect(depth, request.odds), row))
        survivals.sort(reverse=True)
        chances = [survival for survival, _ in survivals]
        count, _ = worth_taking(planner.costs_of(len(self.drafted)), chances, self._tokens, planner.rate, depth)
        self._wanted = {row for _, row in survivals[:count]}
        return count > 0

    def judge(self, lines: Sequence[list[int]], branching: Branching | None) -> None:
        """Learn from the round's verdict, a line for each row; its requests have the new drafts' guesses then."""
        for row, (request, line) in enumerate(zip(self.requests, lines, strict=True)):
            odds, own, verified = self.planner.odds(request), request.odds, self.chains[row] - 1
            right, ended = line[1], line[3] != FINISH_NONE
            if self.branched is not None:  # of the path, what is in the chain
                path = line[(HEADER + len(line)) // 2 :]
                right = sum(node <= verified for node in path[1 : right + 1])
            own.fade()
            for guess in request.guesses[: min(right, verified)]:
                odds.judge(guess, True, own)
            if right < verified and not (ended and right == line[1]):
                odds.judge(request.guesses[right], False, own)
            if branching is not None and request.ranked:
                branching.learn(request, line[HEADER : HEADER + line[0]], right)
            request.guesses, request.ranked = self.guesses[row], self.ranked[row]

    def depths(self) -> Tensor | int:
        depths = [len(line) for line in self.guesses]
        return depths[0] if depths.count(depths[0]) == len(depths) else torch.tensor(depths)

    def force(self, forced: Tensor) -> None:
        for line, known in zip(self.guesses, (forced >= 0).long().cumprod(dim=1).sum(dim=1).tolist(), strict=True):
            line[:known] = [Guess(depth, None, 1.0, 1.0) for depth in range(known)]


def choose_verified(planner: Planner, requests: Sequence[Request], offered: Sequence[int], whole: bool) -> list[int]:
    """How many of the drafts that it is offered each row verifies: what pays, or the `whole` window."""
    for request, count in zip(requests, offered, strict=True):
        line = request.guesses
        del line[count:]
        while len(line) < count:  # the drafter said nothing of them
            line.append(planner.odds(request).guess(len(line), None, request.odds))
    if whole or not any(offered):
        return list(offered)
    lines = [survivals_of(request.guesses[: planner.cap_of(request)]) for request in requests]
    return trim_windows(planner.costs, lines, planner.rate)


def expected_survivals(planner: Planner, request: Request, means: Sequence[float]) -> list[float]:
    """The survival of drafts that have not been made, by the engine's mean chance at each depth."""
    factor = request.odds.factor
    return survivals([min(MOST, mean * factor) for mean in means[: planner.cap_of(request)]])
