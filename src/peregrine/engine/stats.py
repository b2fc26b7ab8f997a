"""How speculation went, counted from the verdicts of a request's rounds when somebody asks, not in every round."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Rounds = npt.NDArray[np.int64]  # [rounds, 3]: tokens, right drafts, drafts


@dataclass(slots=True)
class Stats:
    """How speculation went for one request."""

    rounds: int = 0
    drafted: int = 0  # drafts offered to the target (tree nodes counted)
    correct: int = 0  # drafts that became output
    accepted: int = 0  # tokens that came out of rounds, bonus tokens included
    accept_histogram: list[int] = field(default_factory=list)  # rounds by number of correct drafts
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    preemptions: int = 0

    @staticmethod
    def of(rounds: Rounds, cached_tokens: int, preemptions: int) -> "Stats":
        """Of rounds with these verdicts."""
        accepted, correct, drafted = rounds.sum(axis=0).tolist()
        histogram = np.bincount(rounds[:, 1]).tolist()
        return Stats(len(rounds), drafted, correct, accepted, histogram, cached_tokens, preemptions)

    @property
    def accept_length(self) -> float:
        """Tokens per round, bonus included."""
        return self.accepted / self.rounds if self.rounds else 0.0

    def count(self, drafted: int, correct: int, accepted: int) -> None:
        """Add one round that produced something."""
        self.rounds += 1
        self.drafted += drafted
        self.correct += correct
        self.accepted += accepted
        if correct >= len(self.accept_histogram):
            self.accept_histogram.extend([0] * (correct + 1 - len(self.accept_histogram)))
        self.accept_histogram[correct] += 1


def rounds_of(verdicts: Sequence[int]) -> Rounds:
    """The verdicts of some rounds, from three numbers of each."""
    return np.array(verdicts, dtype=np.int64).reshape(-1, 3)


def drafted_flags(rounds: Rounds) -> list[bool]:
    """Of each token of the rounds: whether it was drafted. Right drafts come first in a round."""
    accepted, correct, _ = rounds.T
    if not correct.any():
        return [False] * int(accepted.sum())
    firsts = np.repeat(np.cumsum(accepted) - accepted, accepted)  # the first token of each token's round
    flags: list[bool] = (np.arange(len(firsts)) - firsts < np.repeat(correct, accepted)).tolist()
    return flags
