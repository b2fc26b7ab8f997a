"""Planned windows against every fixed number of drafts on a GPU, by simulated acceptance: drafts and verify are real.

Every cell is a number of rows and a mean acceptance length (bonus counted), or two of them, for every other row. All
settings run on one engine and its recorded rounds; a fixed one has the same windows and depth in every round.

    python benchmarks/windows_simulated.py                                     # an 8B shape, 1 to 256 rows of 2k tokens
    python benchmarks/windows_simulated.py --rows 64 --means 1.2 1.1,3.8
"""

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from peregrine.bench.seating import seat, unseat
from peregrine.engine.ahead_planner import AheadPlan, AheadPlanner
from peregrine.engine.build import build_engine
from peregrine.engine.engine import Engine
from peregrine.engine.request import Request
from peregrine.llm import engine_config
from peregrine.spec.ahead import RowCosts
from peregrine.spec.odds import Floats, Ints
from peregrine.spec.round import no_mark
from peregrine.synthetic.judge import SimulatedJudge


class FixedPlanner(AheadPlanner):
    """The same windows and depth in every round."""

    def __init__(self, planner: AheadPlanner, drafts: int) -> None:
        super().__init__(planner.depth, planner.costs)
        self.drafts = drafts

    def plan(self, requests: list[Request], rows: int) -> AheadPlan:
        if requests != self._requests:
            self._seat(requests)
        nodes = 1 + self.drafts
        return AheadPlan(rows, rows * nodes, [nodes] * rows, self.drafts, self._lines, self._sampled, 0.0)


class Read:
    """What the timed rounds did."""

    def __init__(self) -> None:
        self.tokens = self.predicted_ms = 0.0
        self.plans: Counter[str] = Counter()

    def note(self, plan: AheadPlan, table: Ints, means: list[float], costs: RowCosts, keys: int) -> None:
        """Count a round. Its tokens are the mean of what might have been drawn, which chance does not change."""
        for row, drafted in enumerate(table[:, 2].tolist()):
            least, share = divmod(means[row % 2], 1)
            self.tokens += (1 - share) * min(least, 1 + drafted) + share * min(least + 1, 1 + drafted)
        place, depth = costs.sizes.index(plan.tokens), costs.depths.index(plan.depth)
        self.predicted_ms += float(costs.round_ms(keys)[max(depth, min(place, 1)), place])
        self.plans[f"{plan.tokens} tokens, {plan.depth} drafts"] += 1


class Measured:
    """Figures of the timed rounds of a setting."""

    def __init__(self, read: Read, rounds: int, rows: int, seconds: float, waited: float) -> None:
        self.speed, self.plans = read.tokens / seconds, dict(read.plans)
        self.tokens_per_round = read.tokens / rounds / rows
        self.ms, self.predicted_ms = 1e3 * seconds / rounds, read.predicted_ms / rounds
        self.host_us = 1e6 * (seconds - waited) / rounds

    def to_json(self) -> dict[str, object]:
        return {
            "tokens_per_s": round(self.speed, 1),
            "tokens_per_round": round(self.tokens_per_round, 3),
            "ms": round(self.ms, 3),
            "predicted_ms": round(self.predicted_ms, 3),
            "host_us": round(self.host_us),
            "plans": self.plans,
        }


def rounds_of(rows: int, rounds: int) -> int:
    """Timed rounds: more with few rows, which draw fewer numbers of accepted tokens each."""
    return rounds * (4 if rows < 4 else 2 if rows < 32 else 1)


def measure(engine: Engine, rows: int, args: argparse.Namespace) -> Measured:
    """Of rounds that are queued and read as ever: neither the first nor the last of them finds the device idle.

    As many rounds come before them in every setting: a device that has worked for a second may be slower.
    """
    runner = engine.runner
    assert runner.ahead is not None
    assert isinstance(runner.judge, SimulatedJudge)
    planner, read, means = runner.ahead[0], Read(), runner.judge.means.tolist()
    rounds = rounds_of(rows, args.rounds)
    growth = (args.warm + rounds + 8) * (runner.drafter.shape.depth + 1)
    requests = seat(engine, rows, args.context, growth)
    for _ in range(args.warm):
        engine.step()
    learn, costs = planner.learn, planner.costs.by_rows[rows]

    def note(plan: AheadPlan, table: Ints, said: Floats | None = None) -> None:
        read.note(plan, table, means, costs, sum(request.num_tokens for request in requests))
        learn(plan, table, said)

    planner.learn, began = note, time.perf_counter()  # type: ignore[method-assign]
    stages = {"wait": 0.0, "read": 0.0}
    runner.mark = lambda stage: stages.update({stage: stages.get(stage, 0.0) + time.perf_counter()})
    for _ in range(rounds):
        engine.step()
    seconds, waited = time.perf_counter() - began, stages["read"] - stages["wait"]
    runner.mark, planner.learn = no_mark, learn  # type: ignore[method-assign]
    unseat(engine, requests)
    return Measured(read, rounds, rows, seconds, waited)


def cell(engine: Engine, rows: int, means: tuple[float, float], args: argparse.Namespace) -> dict[str, Any]:
    """All settings at one number of rows and acceptance."""
    runner = engine.runner
    assert runner.ahead is not None
    assert isinstance(runner.judge, SimulatedJudge)
    planner, rounds = runner.ahead
    runner.judge.means.copy_(torch.tensor(means))
    sizes = planner.costs.by_rows[rows].sizes
    figures: dict[str, list[Measured]] = {}

    def fixed(drafts: int) -> None:
        runner.ahead = FixedPlanner(planner, drafts), rounds
        figures.setdefault(str(drafts), []).append(measure(engine, rows, args))

    def speed(name: str) -> float:
        return statistics.fmean(measured.speed for measured in figures[name])

    for drafts in args.fixed:
        if rows * (1 + drafts) in sizes:
            fixed(drafts)
    best = max(figures, key=speed)
    auto = AheadPlanner(planner.depth, planner.costs)
    runner.ahead = auto, rounds
    figures["auto"] = [measure(engine, rows, args)]
    fixed(int(best))  # before and after
    runner.ahead = planner, rounds
    return {
        "rows": rows,
        "means": sorted(set(means)),
        "best_fixed": best,
        "auto_of_best_fixed": round(speed("auto") / speed(best), 3),
        "auto_of_plain": round(speed("auto") / speed("0"), 3),
        "odds_error": round(auto.calibration_error, 3),
        "settings": {name: [one.to_json() for one in found] for name, found in figures.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:llama-3.1-8b")
    parser.add_argument("--drafter", default="eagle3")
    parser.add_argument("--num-drafts", type=int, default=8, help="the most drafts of a window")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--means", nargs="+", default=["1.2", "2", "3", "4", "1.1,3.8"])
    parser.add_argument("--fixed", type=int, nargs="+", default=[0, 1, 2, 3, 5])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds; more with few rows")
    parser.add_argument("--warm", type=int, default=24, help="rounds before those that are timed, in which auto learns")
    parser.add_argument("--seconds", type=float, help="begin no cell after so many seconds, the start included")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lens = {
        rows: args.context + (args.warm + rounds_of(rows, args.rounds) + 16) * (args.num_drafts + 1)
        for rows in args.rows
    }
    wanted: dict[str, object] = {"drafter": args.drafter, "num_drafts": args.num_drafts}
    wanted |= {"device": "cuda", "max_rows": max(args.rows), "row_sizes": tuple(sorted(args.rows))}
    wanted |= {"simulate_accept": 2.0, "max_len": max(lens.values()), "prefix_cache": False, "prefill_chunk": 2048}
    wanted |= {"num_pages": 1 + max(rows * (-(-length // 16) + 8) for rows, length in lens.items())}
    began = time.perf_counter()
    built = build_engine(engine_config(args.model, wanted))
    started = time.perf_counter() - began
    made = {decision.field: f"{decision.value}: {decision.because}" for decision in built.decisions}
    print(f"start {started:.1f} s; recorded {made['recorded']}; costs {made['costs']}", flush=True)
    cells = []
    with torch.inference_mode():
        for text in args.means:
            for rows in args.rows:
                if args.seconds and time.perf_counter() - began > args.seconds:
                    continue
                parts = [float(part) for part in text.split(",")]
                found = cell(built.engine, rows, (parts[0], parts[-1]), args)
                cells.append(found)
                settings = found.pop("settings")
                shown = {name: [one["tokens_per_s"] for one in figures] for name, figures in settings.items()}
                print(json.dumps(found | shown), settings["auto"][0]["plans"], flush=True)
                found["settings"] = settings
    ahead = built.engine.runner.ahead
    assert ahead is not None
    facts = {"benchmark": "windows_simulated", "start_s": round(started, 1), "decisions": made, "cells": cells}
    if args.out:
        args.out.write_text(json.dumps(facts | {"costs": ahead[0].costs.to_json()}, indent=1))


if __name__ == "__main__":
    main()
