"""What planned windows lose against the best fixed number of drafts on made-up machines, where nothing is noisy.

The engine and its planner are real, rounds have made-up verdicts and times (`peregrine.bench.made_up`), so a turn takes
milliseconds and a hundredth can be seen. Machines are two that were measured: two cores of a Cascade Lake server and
two of a Sapphire Rapids one. Real rounds with drafts take longer or shorter than the planner's table says, by `--off`.
`--learn` requests come before those that count; with 0 all that is recorded and tried for the first time counts, too.

    python benchmarks/planner_regret.py                                # all cells; ten minutes on two cores
    python benchmarks/planner_regret.py --rows 4 --texts story --off 0.25 --learn 0 --verbose
"""

import argparse
import json
import statistics
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from peregrine.bench.made_up import MACHINES, TEXTS, Lab

AUTO = "auto"


def cell(asked: tuple[str, str, int, float], args: argparse.Namespace) -> dict[str, object]:
    """One machine, text and number of requests."""
    machine, text, rows, off = asked
    made_up = replace(MACHINES[machine], off=off, busy=args.busy, unsteady=args.unsteady)
    lab, took = Lab(made_up, TEXTS[text], args.seed), Counter[str]()
    shapes: dict[str, dict[str, object]] = {str(k): {"num_drafts": k, "windows": "fixed"} for k in args.fixed}
    before, counted = -(-args.learn // rows), -(-args.requests // rows)
    max_rows = 2 if rows <= 2 else max(rows, 16)
    with lab.opened():
        for name, shape in (shapes | {AUTO: {}}).items():
            with lab.build(max_rows, **shape) as llm:
                first = 0 if name == AUTO else max(0, before - 2)  # fixed windows learn nothing, they are recorded
                for number in range(first, before + counted):
                    began, outputs = lab.work_ms, lab.turn(llm, rows, number)
                    ms = lab.work_ms - began
                    took[name] += ms if number >= before else 0.0
                    if args.verbose:
                        rounds = max(output.stats.rounds for output in outputs)
                        print(f"{name:>5} turn {number:3} {ms:7.1f} ms {rounds:4} rounds", flush=True)
    best = min(shapes, key=took.__getitem__)
    fixed = {name: round(took[best] / took[name], 3) for name in shapes}
    found = {"machine": machine, "text": text, "rows": rows, "off": off, "learn": args.learn, "best_fixed": best}
    return found | {"of_best": fixed, "auto_of_best_fixed": round(took[best] / took[AUTO], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", nargs="+", default=sorted(MACHINES), choices=sorted(MACHINES))
    parser.add_argument("--texts", nargs="+", default=sorted(TEXTS), choices=sorted(TEXTS))
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 16], help="requests that run together")
    parser.add_argument("--off", type=float, nargs="+", default=[-0.1, 0.0, 0.1, 0.25], help="by what share tables err")
    parser.add_argument("--busy", type=float, default=0.0, help="sizes seemed slower at the start, up to this share")
    parser.add_argument("--unsteady", type=float, default=0.0, help="the machine's speed changes by up to this share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed", type=int, nargs="+", default=[0, 1, 2, 3], help="fixed numbers of drafts")
    parser.add_argument("--requests", type=int, default=64, help="that count")
    parser.add_argument("--learn", type=int, default=96, help="requests before them")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="every turn")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    leasts = {"rows": 1, "requests": 1, "processes": 1, "learn": 0, "fixed": 0, "off": -0.5, "busy": 0, "unsteady": 0}
    for name, least in leasts.items():
        given = getattr(args, name)
        if min(given if isinstance(given, list) else [given]) < least:
            parser.error(f"--{name}: {given} is below {least}")
    cells = list(product(args.machines, args.texts, args.rows, args.off))
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        results = list(tqdm(pool.map(partial(cell, args=args), cells), "cells", len(cells), disable=args.verbose))
    for result in results:
        print(json.dumps(result))
    for off in args.off:
        ratios = [float(str(result["auto_of_best_fixed"])) for result in results if result["off"] == off]
        below = f"{sum(ratio < 0.97 for ratio in ratios)} of {len(ratios)} below 0.97"
        print(f"off {off:+.2f}: mean {statistics.mean(ratios):.3f}, least {min(ratios):.3f}, {below}")
    if args.out:
        args.out.write_text(json.dumps({"benchmark": "planner_regret", "cells": results}, indent=1))


if __name__ == "__main__":
    main()
