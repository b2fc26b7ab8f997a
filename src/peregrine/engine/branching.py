"""Decides in every round which chains of drafts branch, by costs and odds or as requests ask (`spec/branches.py`)."""

from collections.abc import Sequence
from typing import NamedTuple

from peregrine.engine.request import Request
from peregrine.spec.branches import RANKS, RankOdds, branch_windows, whole_tree
from peregrine.spec.links import Branched
from peregrine.spec.odds import survivals as survivals_of
from peregrine.spec.planner import Costs

ASKED_EVERY = 16  # rounds after which the drafter's further choices are asked for again, while no branch pays
ASKED_FOR = 32  # rounds for which they are asked for after one did
TREE_DRAFTS = 3  # the least that are drafted for a request whose windows are always trees


class Choice(NamedTuple):
    """The windows of a round: nodes of each row's chain, the windows if some branch, and what branches may win."""

    lens: tuple[int, ...]
    branched: Branched | None
    gain: float  # expected tokens


class Branching:
    """Chooses branches, and learns how often the drafter's further choices are right."""

    def __init__(self, room: int) -> None:
        self.room = room  # the most drafts of a window
        self.odds = {False: RankOdds(), True: RankOdds()}  # by whether a request is sampled
        self._rounds = self._until = 0

    def wants(self, requests: Sequence[Request]) -> int:
        """How many drafts are made in any case, for requests whose windows are always trees; 0: as many as pay."""
        return TREE_DRAFTS if any(request.params.tree == "tree" for request in requests) else 0

    def ranks(self, requests: Sequence[Request], least: float, wanted: int) -> int:
        """How many of the likeliest tokens of each step the drafter is asked for after the next round.

        Windows that branch must win as many tokens as `least`: of a row, they can win one at the most. `wanted` is what
        `wants` says.
        """
        self._rounds += 1
        due = self._rounds < self._until or self._rounds % ASKED_EVERY == 1
        if not wanted and (least > len(requests) or not due):
            return 1
        chains = all(request.params.tree == "chain" for request in requests)
        return 1 if chains or any(request.matcher is not None for request in requests) else RANKS

    def choose(
        self,
        costs: Costs,
        requests: Sequence[Request],
        chains: tuple[int, ...],
        chances: Sequence[Sequence[float]],
        rate: float,
    ) -> Choice:
        """The windows of the next round, where `chains` would be verified without branches.

        `chances` are those of the drafts in each row's window.
        """
        seconds = [self._seconds(request, line) for request, line in zip(requests, chances, strict=True)]
        known = all(len(r.ranked) >= len(line) for r, line in zip(requests, chances, strict=True))
        if not known or not any(map(any, seconds)) or any(request.matcher is not None for request in requests):
            return Choice(chains, None, 0.0)
        survivals = [survivals_of(line) for line in chances]
        deepest = [length - 1 for length in chains]
        depths, places = branch_windows(costs, survivals, seconds, rate, self.room, deepest)
        if any(places):
            self._until = self._rounds + ASKED_FOR
        for row, request in enumerate(requests):
            if request.params.tree == "tree":
                depths[row], places[row] = whole_tree(survivals[row], seconds[row], self.room)
        if not any(places):
            return Choice(tuple([1 + depth for depth in depths]), None, 0.0)
        lines, branches, gain = [], [], 0.0
        for row, request in enumerate(requests):
            ranked = request.ranked
            lines.append([request.tokens[-1], *(tokens[0] for tokens, _ in ranked[: depths[row]])])
            branches.append([(at, ranked[at][0][1 + further]) for at, further in places[row]])
            for at, further in places[row]:
                gain += (survivals[row][at - 1] if at else 1.0) * seconds[row][at][further]
        return Choice(tuple([1 + depth for depth in depths]), Branched.of(lines, branches), gain)

    def _seconds(self, request: Request, chances: Sequence[float]) -> list[list[float]]:
        """The chances of further choices at each depth of a request's chain, whose drafts have these chances."""
        if request.params.tree == "chain":
            return []
        odds = self.odds[request.params.temperature > 0]
        drafts = zip(request.ranked, chances, strict=False)
        return [odds.chances(said[1:], 1.0 - chance) for (_, said), chance in drafts]

    def learn(self, request: Request, tokens: Sequence[int], right: int) -> None:
        """Take in the tokens of a round, the first `right` of which were the chain's drafts."""
        odds = self.odds[request.params.temperature > 0]
        for (choices, said), token in zip(request.ranked[: right + 1], tokens, strict=False):
            place = choices.index(token) if token in choices else 0
            odds.judge(said[1:], place - 1 if place else None)
