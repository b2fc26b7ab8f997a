"""What rounds give that are planned in one way or another: the planner takes the way that gives more."""

from collections import defaultdict
from collections.abc import Sequence

from peregrine.engine.request import Request

UNSEEN = 1.2  # times as much as costs and odds foresee may be hoped of rounds that were not tried: these may be off


class PlannedRate:
    """Tokens per millisecond of rounds that are planned in one way: draft by draft, or with one number for all rows.

    Of the drafts, the former take those that the drafter is sure of, which takes the host time. What that gives is
    measured: such rounds are worth having if it is more than others give. A draft is worth its time at the same rate.
    """

    PRIOR = 100.0  # where fewer tokens are known, others count as fast as is hoped: who is not tried learns nothing
    MEMORY, RESTED = 0.99, 0.999  # what is kept of the record by a round of its own, and by another

    def __init__(self) -> None:
        self._won = self._ms = 0.0

    def value(self, foreseen: float, hope: float = 1.0) -> float:
        """Where the same number of drafts for all rows gives so much, and `hope` times as much may be hoped for."""
        unknown = max(0.0, self.PRIOR - self._won)
        return (self._won + hope * unknown) / (self._ms + unknown / foreseen)

    def fade(self, rounds: int) -> None:
        """Other rounds have passed: old ones count less, so that such rounds are tried again."""
        self._keep(self.RESTED**rounds)

    def note(self, tokens: int, ms: float) -> None:
        """Take in one round."""
        self._keep(self.MEMORY)
        self._won, self._ms = self._won + tokens, self._ms + ms

    def _keep(self, share: float) -> None:
        self._won, self._ms = share * self._won, share * self._ms


class PlannedRates:
    """By the number of requests, in powers of two, whether one is sampled, and the way their rounds are planned."""

    def __init__(self) -> None:
        self._rates: dict[tuple[int, bool, bool], PlannedRate] = defaultdict(PlannedRate)

    def of(self, requests: Sequence[Request], steady: bool = False) -> PlannedRate:
        """Of rounds of about as many such requests, planned draft by draft, or with one number of drafts for all."""
        sampled = any(request.params.temperature > 0 for request in requests)
        return self._rates[len(requests).bit_length(), sampled, steady]
