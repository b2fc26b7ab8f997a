"""What was planned and what came of it, for metrics."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

KINDS = "plain", "drafts", "mixed", "tree"  # of rounds


@dataclass(slots=True)
class PlanRecord:
    """What was planned and what came of it, for metrics."""

    windows: Counter[int] = field(default_factory=Counter)  # rows by window length
    rounds: Counter[str] = field(default_factory=Counter)  # rounds by plan, one of KINDS
    expected_tokens: float = 0.0
    tokens: int = 0
    expected_ms: float = 0.0  # of the rounds that were timed
    ms: float = 0.0

    def note(self, lens: Sequence[int], tokens: int, expected: float, rounds: int = 1) -> None:
        """Count rounds whose windows have one length, or are what there was of it; they gave so many tokens in all."""
        self.windows[lens[0]] += rounds * len(lens)
        self.rounds["drafts" if lens[0] > 1 else "plain"] += rounds
        self.tokens += tokens
        self.expected_tokens += rounds * expected

    def note_rows(self, lens: Counter[int], tokens: int) -> None:
        """Count rounds of one row whose windows have these lengths; they gave so many tokens in all."""
        self.windows += lens
        self.rounds += Counter(plain=lens[1], drafts=lens.total() - lens[1])
        self.tokens += tokens

    def note_rests(self, rows: int, rounds: int) -> None:
        """Count rounds in which all rows rested."""
        self.windows[1] += rows * rounds
        self.rounds["plain"] += rounds
        self.tokens += rows * rounds
        self.expected_tokens += rows * rounds

    def copy(self) -> "PlanRecord":
        """As it is now."""
        return replace(self, windows=self.windows.copy(), rounds=self.rounds.copy())
