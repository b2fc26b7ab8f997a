"""Random plans for rounds that run in parts: any size, any windows that fill it, drafts of any depth."""

import random
from collections.abc import Sequence

from peregrine.engine.ahead_planner import AheadCosts, AheadPlan, AheadPlanner
from peregrine.engine.ahead_rounds import AheadRounds
from peregrine.engine.engine import Engine
from peregrine.engine.request import Request
from peregrine.engine.runner import VARIANTS
from peregrine.engine.window_choice import parted
from peregrine.spec.ahead import token_sizes, window_width
from spec.harness import build


def any_lens(dice: random.Random, rows: int, total: int, width: int) -> list[int]:
    """Windows of at most `width` tokens, `total` in all."""
    lens = [1] * rows
    for _ in range(total - rows):
        lens[dice.choice([row for row in range(rows) if lens[row] < width])] += 1
    return lens


class AnyPlanner(AheadPlanner):
    """Plans anything."""

    def __init__(self, depth: int, depths: Sequence[int], dice: random.Random) -> None:
        super().__init__(depth, AheadCosts({}))
        self.dice, self.depths, self.seen = dice, depths, set[tuple[int, int, int]]()

    def plan(self, requests: list[Request], rows: int) -> AheadPlan:
        self._seat(requests)
        size = self.dice.choice(token_sizes(rows, self.depth))
        lens = any_lens(self.dice, rows, size, window_width(rows, size, self.depth))
        self.drafted = self.dice.choice(self.depths)
        self.seen.add((rows, size, self.drafted))
        return AheadPlan(rows, size, lens, self.drafted, self._lines, self._sampled, float(rows))


def ahead(seed: int, **options: object) -> tuple[Engine, AnyPlanner]:
    """An engine whose rounds run in parts, by random plans; one round is always queued before the last is read."""
    engine = build(**({"windows": "fixed", "lag": 1} | options)).engine  # type: ignore[arg-type]
    return engine, plan_anything(engine, seed)


def plan_anything(engine: Engine, seed: int) -> AnyPlanner:
    """Let the engine's rounds run in parts, by random plans."""
    runner = engine.runner
    drafter = parted(runner.drafter)
    rounds = AheadRounds(runner.target, drafter, runner.judge, runner.seats, VARIANTS)
    if runner.ahead is not None:
        rounds = runner.ahead[1]
    planner = AnyPlanner(drafter.shape.depth, drafter.depths, random.Random(seed))
    runner.ahead = planner, rounds
    return planner
