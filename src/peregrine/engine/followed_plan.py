"""A round's plan on the ranks that follow: it travels as what its choices depend on, and makes the same ones there.

How deep a row is drafted for is decided between the drafter's steps, by what the drafter says of its drafts. That is
the same on every rank; costs and odds are rank 0's, which learns them.
"""

from dataclasses import dataclass

from peregrine.engine.draft_rows import DraftRows
from peregrine.engine.round_plan import RoundPlan
from peregrine.spec.links import Branched
from peregrine.spec.odds import Floats
from peregrine.spec.planner import Costs

Known = tuple[Floats, Floats]  # of `DraftRows`
Windows = tuple[tuple[int, ...], list[int], Branched | None, int]  # chains, rows drafted for, branches, ranks


@dataclass(slots=True)
class FollowedPlanner:
    """What a plan asks of its planner."""

    costs: Costs  # of the rows that are drafted for
    rate: float

    def costs_of(self, rows: int) -> Costs:
        return self.costs


class FollowedPlan(RoundPlan):
    """The plan of one round, without requests."""

    def __init__(self, planner: FollowedPlanner, known: Known, windows: Windows, probe: int) -> None:
        super().__init__(planner, DraftRows(*known), *windows)
        self.probe = probe


def followed(plan: RoundPlan) -> tuple[type[FollowedPlan], tuple[FollowedPlanner, Known, Windows, int]]:
    """What pickle sends of a plan, and what it becomes."""
    planner = FollowedPlanner(plan.planner.costs_of(len(plan.drafted)), plan.planner.rate)
    windows = plan.chains, plan.drafted, plan.branched, plan.ranks
    return FollowedPlan, (planner, (plan.known.table, plan.known.odds), windows, plan.probe)
