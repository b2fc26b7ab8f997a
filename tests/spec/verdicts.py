"""Verdicts of many rounds, told by counts."""

from collections.abc import Mapping

import numpy as np

from peregrine.spec.odds import Odds, RequestOdds


def judge_counts(odds: Odds, counts: Mapping[tuple[int, int], int], own: RequestOdds) -> None:
    """Rounds of one request: (drafts with a verdict, how many of them were right): how many rounds."""
    depths = range(max(known for known, _ in counts))
    tried = [sum(count for (known, _), count in counts.items() if known > depth) for depth in depths]
    right = [sum(count for (_, correct), count in counts.items() if correct > depth) for depth in depths]
    odds.judge_rounds(sum(counts.values()), np.array([tried]), np.array([right]), [own])
