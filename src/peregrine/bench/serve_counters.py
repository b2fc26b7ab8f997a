"""Acceptance on a server, from the counters that it publishes at /metrics under vLLM's names."""

import re
from collections import defaultdict
from dataclasses import dataclass

LINE = re.compile(
    r"^(?:\w+:)?spec_decode_(?P<name>num_drafts|num_draft_tokens|num_accepted_tokens(?:_per_pos)?)(?P<total>_total)?"
    r"(?:\{(?P<labels>.*)\})?\s+(?P<value>[0-9.eE+]+)(?:\s|$)"
)
POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the server started, summed over its engines."""

    rounds: int  # with drafts
    drafted: int
    correct: int
    by_position: tuple[int, ...]  # correct drafts by depth

    def since(self, earlier: "Counters") -> dict[str, object] | None:
        """Acceptance between two readings; None if nothing was drafted."""
        rounds = self.rounds - earlier.rounds
        drafted, correct = self.drafted - earlier.drafted, self.correct - earlier.correct
        if rounds <= 0:
            return None
        before = earlier.by_position + (0,) * (len(self.by_position) - len(earlier.by_position))
        return {
            "rounds": rounds,
            "drafted": drafted,
            "correct": correct,
            "accept_length": 1 + correct / rounds,
            "accept_rate": correct / drafted if drafted else 0.0,
            "by_position": [(now - then) / rounds for now, then in zip(self.by_position, before, strict=True)],
        }


def read_counters(exposition: str) -> Counters | None:
    """Read the counters from Prometheus' text format; None if there are none."""
    totals: dict[str, int] = defaultdict(int)
    positions: dict[int, int] = defaultdict(int)
    found = [match for line in exposition.splitlines() if (match := LINE.match(line))]
    # A counter that is listed both with and without the suffix is one counter.
    suffixed = {match["name"] for match in found if match["total"]}
    for match in found:
        name, value = match["name"], int(float(match["value"]))
        if name in suffixed and not match["total"]:
            continue
        if name != "num_accepted_tokens_per_pos":
            totals[name] += value
        elif position := POSITION.search(match["labels"] or ""):
            positions[int(position[1])] += value
    if "num_drafts" not in totals:
        return None
    depth = max(positions, default=-1) + 1
    return Counters(
        rounds=totals["num_drafts"],
        drafted=totals["num_draft_tokens"],
        correct=totals["num_accepted_tokens"],
        by_position=tuple(positions[place] for place in range(depth)),
    )
