"""What planning costs the host: microseconds of processor time for a round's plan and for taking in its verdicts.

Rows stay the same, half of them with good drafts and half with bad ones; a plan is kept for some rounds, so the figure
is the mean over rounds. Nothing is run on a device.

    python benchmarks/planner_host.py
"""

import argparse
import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from peregrine.engine.ahead_planner import AheadCosts, AheadPlanner
from peregrine.engine.request import Request
from peregrine.sampling import SamplingParams
from peregrine.spec.ahead import RowCosts, token_sizes

DEPTH, HEADER = 8, 4


def requests_of(rows: int) -> list[Request]:
    """Running requests, as far as a planner looks at them."""
    made: Any = [SimpleNamespace(id=i, params=SamplingParams(), num_tokens=2048) for i in range(rows)]
    return list(made)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=1000)
    args = parser.parse_args()
    for rows in args.rows:
        found = recorded_us(rows, args.rounds)
        print(json.dumps({"rows": rows, "us_per_round": round(found, 1), "limit_us": 20 + 0.2 * rows}))


if __name__ == "__main__":
    main()
