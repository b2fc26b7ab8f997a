"""Planned windows against every fixed number of drafts on a GPU, by simulated acceptance: drafts and verify are real.

Every cell is a number of rows and a mean acceptance length (bonus counted), or two of them, for every other row. All
settings run on one engine and its recorded rounds; a fixed one has the same windows and depth in every round.

    python benchmarks/windows_simulated.py                                     # an 8B shape, 1 to 256 rows of 2k tokens
    python benchmarks/windows_simulated.py --rows 64 --means 1.2 1.1,3.8
"""

import argparse
import json
import time
from pathlib import Path

import torch

from peregrine.bench.seating import seat, unseat
from peregrine.engine.ahead_planner import AheadPlan, AheadPlanner
from peregrine.engine.build import build_engine
from peregrine.engine.engine import Engine
from peregrine.engine.request import Request
from peregrine.llm import engine_config
from peregrine.synthetic.judge import SimulatedJudge

FIXED_WARM = 4  # rounds before those that are timed, where nothing is learnt


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


def rounds_of(rows: int, rounds: int) -> int:
    """Timed rounds: more with few rows, which draw fewer numbers of accepted tokens each."""
    return rounds * (4 if rows < 4 else 2 if rows < 32 else 1)


def measure(engine: Engine, rows: int, warm: int, context: int, args: argparse.Namespace) -> dict[str, float]:
    """Tokens per second and per round, milliseconds of a round, and of the host's own work in it."""
    rounds = rounds_of(rows, args.rounds)
    growth = (warm + rounds + 8) * (engine.runner.drafter.shape.depth + 1)
    requests = seat(engine, rows, context, growth)
    for _ in range(warm):
        engine.step()
    torch.cuda.synchronize()
    before, began = [r.num_tokens for r in requests], time.perf_counter()
    stages = {"wait": 0.0, "read": 0.0}
    engine.runner.mark = lambda stage: stages.update({stage: stages.get(stage, 0.0) + time.perf_counter()})
    for _ in range(rounds):
        engine.step()
    torch.cuda.synchronize()
    seconds, waited = time.perf_counter() - began, stages["read"] - stages["wait"]
    engine.runner.mark = lambda stage: None
    made = sum(r.num_tokens for r in requests) - sum(before)
    unseat(engine, requests)
    return {
        "tokens_per_s": round(made / seconds, 1),
        "tokens_per_round": round(made / rounds / rows, 3),
        "ms": round(1e3 * seconds / rounds, 3),
        "host_us": round(1e6 * (seconds - waited) / rounds),
    }


def cell(engine: Engine, rows: int, means: tuple[float, float], args: argparse.Namespace) -> dict[str, object]:
    """All settings at one number of rows and acceptance."""
    runner = engine.runner
    assert runner.ahead is not None
    assert isinstance(runner.judge, SimulatedJudge)
    planner, rounds = runner.ahead
    runner.judge.means.copy_(torch.tensor(means))
    sizes = planner.costs.by_rows[rows].sizes
    figures: dict[str, dict[str, float]] = {}
    for drafts in args.fixed:
        if rows * (1 + drafts) in sizes:
            runner.ahead = FixedPlanner(planner, drafts), rounds
            figures[str(drafts)] = measure(engine, rows, FIXED_WARM, args.context, args)
    best = max(figures, key=lambda name: figures[name]["tokens_per_s"])
    # It learns meanwhile, and is timed with about as many cached tokens as the others.
    learnt = round((args.warm - FIXED_WARM) * figures[best]["tokens_per_round"])
    auto = AheadPlanner(planner.depth, planner.costs)
    runner.ahead = auto, rounds
    figures["auto"] = measure(engine, rows, args.warm, args.context - learnt, args)
    runner.ahead = planner, rounds
    speed = figures["auto"]["tokens_per_s"]
    return {
        "rows": rows,
        "means": sorted(set(means)),
        "best_fixed": best,
        "auto_of_best_fixed": round(speed / figures[best]["tokens_per_s"], 3),
        "auto_of_plain": round(speed / figures["0"]["tokens_per_s"], 3),
        "windows": dict(sorted(auto.record.windows.items())),
        "odds_error": round(auto.calibration_error, 3),
        "settings": figures,
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
    parser.add_argument("--warm", type=int, default=24, help="rounds in which auto learns, before those that are timed")
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
                shown = {name: figure["tokens_per_s"] for name, figure in found["settings"].items()}  # type: ignore[attr-defined]
                print(json.dumps({k: v for k, v in found.items() if k != "settings"} | shown), flush=True)
    ahead = built.engine.runner.ahead
    assert ahead is not None
    facts = {"benchmark": "windows_simulated", "start_s": round(started, 1), "decisions": made, "cells": cells}
    if args.out:
        args.out.write_text(json.dumps(facts | {"costs": ahead[0].costs.to_json()}, indent=1))


if __name__ == "__main__":
    main()
