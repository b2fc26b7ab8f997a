"""A round's plan on the ranks that follow: it travels as what its choices depend on, and makes the same ones there.

How deep a row is drafted for is decided between the drafter's steps, by what the drafter says of its drafts. That is
the same on every rank; costs and odds are rank 0's, which learns them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from peregrine.engine.round_plan import RoundPlan
from peregrine.spec.links import Branched
from peregrine.spec.odds import Odds, RequestOdds
from peregrine.spec.planner import Costs


@dataclass(frozen=True, slots=True)
class FollowedRow:
    """What a plan asks of a request."""

    odds: RequestOdds
    cap: int  # the most drafts it may have after the round
    sampled: bool


@dataclass(frozen=True, slots=True)
class FollowedPlanner:
    """What a plan asks of its planner."""

    costs: Costs  # of the rows that are drafted for
    rate: float
    tables: dict[bool, Odds]  # by whether a request is sampled

    def odds(self, row: FollowedRow) -> Odds:
        return self.tables[row.sampled]

    def cap_of(self, row: FollowedRow) -> int:
        return row.cap

    def costs_of(self, rows: int) -> Costs:
        return self.costs


class FollowedPlan(RoundPlan):
    """The plan of one round, without requests."""

    def __init__(
        self,
        planner: FollowedPlanner,
        rows: Sequence[FollowedRow],
        windows: tuple[list[int], list[int], Branched | None, int],
        probe: int,
    ) -> None:
        super().__init__(planner, rows, *windows)  # type: ignore[arg-type]
        self.probe = probe


Values = tuple[FollowedPlanner, list[FollowedRow], tuple[list[int], list[int], Branched | None, int], int]


def followed(plan: RoundPlan) -> tuple[type[FollowedPlan], Values]:
    """What pickle sends of a plan, and what it becomes."""
    planner, sampled = plan.planner, [request.params.temperature > 0 for request in plan.requests]
    rows = [
        FollowedRow(request.odds, planner.cap_of(request), kind)
        for request, kind in zip(plan.requests, sampled, strict=True)
    ]
    odds = {kind: planner.odds(request) for kind, request in zip(sampled, plan.requests, strict=True)}
    tables = odds if plan.drafted else {}
    values = FollowedPlanner(planner.costs_of(len(plan.drafted)), planner.rate, tables)
    return FollowedPlan, (values, rows, (plan.chains, plan.drafted, plan.branched, plan.ranks), plan.probe)
