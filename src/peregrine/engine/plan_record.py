"""What was planned and what came of it, for metrics."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class PlanRecord:
    """What was planned and what came of it, for metrics."""

    windows: Counter[int] = field(default_factory=Counter)  # rows by window length
    rounds: Counter[str] = field(default_factory=Counter)  # rounds by plan: plain, drafts, mixed, tree
    expected_tokens: float = 0.0
    tokens: int = 0
    expected_ms: float = 0.0
    ms: float = 0.0
