"""What planning costs the host: microseconds for a round's plan and for taking in its verdicts.

Rows stay the same, half of them with good drafts and half with bad ones; a plan is kept for some rounds, so the figure
is the mean over rounds, and of several such means the median. (A clock of processor time would be a system call, which
takes 2 us of a round itself.) Nothing is run on a device. Of recorded rounds (a GPU), and of those of a CPU, where a
round is planned from its drafts: all that is done for a round that is planned draft by draft, for one with one number
of drafts for all rows, and for one that rests.

    python benchmarks/planner_host.py
"""

import argparse
import json
import time
from collections import Counter
from statistics import median
from unittest.mock import patch

import numpy as np
import torch

from peregrine.engine.ahead_planner import AheadCosts, AheadPlanner
from peregrine.engine.alone import LonePlan
from peregrine.engine.planning import WindowPlanner
from peregrine.engine.request import Request
from peregrine.engine.round_costs import RoundCosts
from peregrine.engine.round_times import RoundTimes
from peregrine.engine.runner import TIMED
from peregrine.engine.steady import SteadyPlan
from peregrine.kernels.round import GateRule
from peregrine.sampling import SamplingParams
from peregrine.spec.ahead import RowCosts, token_sizes

DEPTH, HEADER = 8, 4
PARTS = 5  # of which the median is taken, after one in which the planner learns
BY_DRAFT, ONE_NUMBER, AT_REST = "draft_by_draft", "one_number", "at_rest"


def requests_of(rows: int) -> list[Request]:
    """Running requests, as far as a planner looks at them."""
    made = [Request(i, [1] * 64, SamplingParams(), 0, 1 << 20) for i in range(rows)]
    return made


def recorded_us(rows: int, rounds: int) -> float:
    """Of the planner of recorded rounds."""
    sizes, depths = token_sizes(rows, DEPTH), tuple(range(DEPTH + 1))
    verify = tuple(4.0 + 0.03 * size for size in sizes)
    costs = RowCosts(
        sizes, verify, (0.05,) * len(sizes), (0.1,) * len(sizes), depths, tuple(0.3 * d for d in depths), 0.0
    )
    planner, requests = AheadPlanner(DEPTH, AheadCosts({rows: costs})), requests_of(rows)
    dice = np.random.default_rng(0)
    means = np.where(np.arange(rows) % 2 == 0, 0.1, 0.9)[:, None]
    spent = [0.0] * (1 + PARTS)
    for done in range((1 + PARTS) * rounds):
        right = (dice.random((rows, DEPTH)) < means).cumprod(axis=1).sum(axis=1)
        began = time.perf_counter()
        plan = planner.plan(requests, rows)
        planned = time.perf_counter()
        table = np.zeros((rows, HEADER), dtype=np.int64)
        table[:, 2] = np.array(plan.lens) - 1
        table[:, 1] = np.minimum(right, table[:, 2])
        table[:, 0] = table[:, 1] + 1
        judged = time.perf_counter()
        planner.learn(plan, table)
        spent[done // rounds] += planned - began + time.perf_counter() - judged
    return 1e6 * median(spent[1:]) / rounds


def unrecorded_us(rows: int, rounds: int, chance: float, wanted: str) -> float:
    """Of the planner of a CPU's rounds. `chance` is what the drafter says.

    Rounds are planned draft by draft, or have one number of drafts for all rows, where the former are made to look fast
    or slow. Tokens cost little, so that drafts pay if they are right, whatever the number of rows. The planner's clock
    says what such rounds would take.
    """
    with patch("peregrine.engine.planning.time", Clock()) as clock:
        return planned_us(rows, rounds, chance, wanted, clock)


class Clock:
    """Stands in for `time`."""

    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


def drafts_by(rule: GateRule, chance: float) -> int:
    """How many drafts are made of which this is said each."""
    survivals = rule.survivals([chance] * DEPTH)
    return next(
        (n for n, (least, last) in enumerate(zip(rule.least, survivals, strict=False), 1) if last <= least), DEPTH
    )


def planned_us(rows: int, rounds: int, chance: float, wanted: str, clock: Clock) -> float:
    verify = {size: 3.0 + 0.05 * size for size in (1, 4, 16, 64)}
    costs = RoundCosts(verify, {1: 0.02, 2: 0.04}, {1: 0.3, 16: 0.4}, DEPTH, {1: 0.3, 16: 0.4})
    costs.branched = 1.0  # chains may branch, which does not pay
    planner, requests = WindowPlanner(DEPTH, costs, looks_up=False, room=DEPTH), requests_of(rows)
    kinds: Counter[str] = Counter()
    dice, said, spent = np.random.default_rng(0), torch.full((rows,), chance), [0.0] * (1 + PARTS)
    offered = [0] * rows
    for done in range((1 + PARTS) * rounds):
        planner.rates.of(requests).note(1000, 10.0 if wanted == BY_DRAFT else 1e6)
        began = time.perf_counter()
        repeated = planner.repeat(requests)
        plan = repeated or planner.plan(requests, offered)
        if isinstance(plan, LonePlan):  # a kernel makes the drafts and follows the rule
            paused = time.perf_counter()
            made = drafts_by(plan.rule, chance)
            passed, offered = np.array([float(made)] + [chance] * DEPTH), [made]
            began += time.perf_counter() - paused
            plan.take(passed)
        elif isinstance(plan, SteadyPlan):
            offered = [plan.drafts or 0] * rows
        else:
            drafts_on = len(plan.drafted) > 0
            while drafts_on and (plan.add(said[plan.rows] if plan.rows is not None else said), plan.go_on())[1]:
                pass
            offered = plan.known.made
        ended = time.perf_counter()
        drafts = np.array(plan.windows.lens) - 1
        clock.seconds += 1e-3 * (3.0 + 0.05 * sum(plan.windows.lens) + 0.35 * max(offered))
        right = np.minimum((dice.random((rows, DEPTH)) < chance).cumprod(axis=1).sum(axis=1), drafts)
        table = np.stack([1 + right, right, drafts, np.zeros_like(right)], axis=1)
        times = None if done % TIMED else RoundTimes(6.0, 1.0, [], 0.2)
        judged = time.perf_counter()
        if not (repeated and plan.rests):  # then the engine has no verdicts to take in
            planner.learn(plan, table, times)
        learnt = time.perf_counter()
        for request, count in zip(requests, right.tolist(), strict=True):
            request.tokens += [0] * (1 + count)
        spent[done // rounds] += ended - began + learnt - judged
        if done >= rounds:
            kinds[AT_REST if plan.rests else ONE_NUMBER if isinstance(plan, SteadyPlan) else BY_DRAFT] += 1
    assert kinds[wanted] > 0.9 * PARTS * rounds, kinds  # others are tried now and then
    return 1e6 * median(spent[1:]) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--cpu-rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=1000)
    args = parser.parse_args()
    for name, given in vars(args).items():
        if min(given if isinstance(given, list) else [given]) < 1:
            parser.error(f"--{name.replace('_', '-')}: {given} is not above 0")
    for rows in args.rows:
        found = recorded_us(rows, args.rounds)
        print(json.dumps({"rows": rows, "us_per_round": round(found, 1), "limit_us": round(20 + 0.2 * rows, 1)}))
    for rows in args.cpu_rows:
        chances = {BY_DRAFT: 0.8, ONE_NUMBER: 0.8, AT_REST: 0.02}
        found = {f"us_{kind}": unrecorded_us(rows, args.rounds, chance, kind) for kind, chance in chances.items()}
        line = {"cpu_rows": rows} | {name: round(us, 1) for name, us in found.items()}
        print(json.dumps(line | {"limit_us": round(20 + 0.2 * rows, 1)}))


if __name__ == "__main__":
    main()
