"""What planning costs the host: microseconds of processor time for a round's plan and for taking in its verdicts.

Rows stay the same, half of them with good drafts and half with bad ones; a plan is kept for some rounds, so the figure
is the mean over rounds. Nothing is run on a device. Of recorded rounds (a GPU), and of those of a CPU, where a round is
planned from its drafts: all that is done for a round that is planned draft by draft, for one with one number of drafts
for all rows, and for one that rests.

    python benchmarks/planner_host.py
"""

import argparse
import json
import time
from collections import Counter
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
    spent = 0.0
    for done in range(2 * rounds):
        right = (dice.random((rows, DEPTH)) < means).cumprod(axis=1).sum(axis=1)
        began = time.thread_time()
        plan = planner.plan(requests, rows)
        planned = time.thread_time()
        table = np.zeros((rows, HEADER), dtype=np.int64)
        table[:, 2] = np.array(plan.lens) - 1
        table[:, 1] = np.minimum(right, table[:, 2])
        table[:, 0] = table[:, 1] + 1
        judged = time.thread_time()
        planner.learn(plan, table)
        if done >= rounds:
            spent += planned - began + time.thread_time() - judged
    return 1e6 * spent / rounds


def unrecorded_us(rows: int, rounds: int, chance: float, wanted: str) -> float:
    """Of the planner of a CPU's rounds; the first half of them only teaches it. `chance` is what the drafter says.

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
    planner, requests = WindowPlanner(DEPTH, costs, looks_up=False), requests_of(rows)
    kinds: Counter[str] = Counter()
    dice, said, spent, offered = np.random.default_rng(0), torch.full((rows,), chance), 0.0, [0] * rows
    for done in range(2 * rounds):
        planner.rates.of(requests).note(1000, 10.0 if wanted == BY_DRAFT else 1e6)
        began = time.thread_time()
        repeated = planner.repeat(requests)
        plan = repeated or planner.plan(requests, offered)
        if isinstance(plan, LonePlan):  # a kernel makes the drafts and follows the rule
            paused = time.thread_time()
            made = drafts_by(plan.rule, chance)
            passed, offered = np.array([float(made)] + [chance] * DEPTH), [made]
            began += time.thread_time() - paused
            plan.take(passed)
        elif isinstance(plan, SteadyPlan):
            offered = [plan.drafts or 0] * rows
        else:
            drafts_on = len(plan.drafted) > 0
            while drafts_on and (plan.add(said[plan.rows] if plan.rows is not None else said), plan.go_on())[1]:
                pass
            offered = plan.known.made
        ended = time.thread_time()
        drafts = np.array(plan.windows.lens) - 1
        clock.seconds += 1e-3 * (3.0 + 0.05 * sum(plan.windows.lens) + 0.35 * max(offered))
        right = np.minimum((dice.random((rows, DEPTH)) < chance).cumprod(axis=1).sum(axis=1), drafts)
        table = np.stack([1 + right, right, drafts, np.zeros_like(right)], axis=1)
        times = None if done % TIMED else RoundTimes(6.0, 1.0, [], 0.2)
        judged = time.thread_time()
        if not (repeated and plan.rests):  # then the engine has no verdicts to take in
            planner.learn(plan, table, times)
        learnt = time.thread_time()
        for request, count in zip(requests, right.tolist(), strict=True):
            request.tokens += [0] * (1 + count)
        if done >= rounds:
            spent += ended - began + learnt - judged
            kinds[AT_REST if plan.rests else ONE_NUMBER if isinstance(plan, SteadyPlan) else BY_DRAFT] += 1
    assert kinds[wanted] > 0.9 * rounds, kinds  # others are tried now and then
    return 1e6 * spent / rounds


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
        print(json.dumps({"rows": rows, "us_per_round": round(found, 1), "limit_us": 20 + 0.2 * rows}))
    for rows in args.cpu_rows:
        chances = {BY_DRAFT: 0.8, ONE_NUMBER: 0.8, AT_REST: 0.02}
        found = {f"us_{kind}": unrecorded_us(rows, args.rounds, chance, kind) for kind, chance in chances.items()}
        print(json.dumps({"cpu_rows": rows} | {name: round(us, 1) for name, us in found.items()}))


if __name__ == "__main__":
    main()
