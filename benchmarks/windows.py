"""Planned windows against every fixed number of drafts: tokens/s of each as a ratio of the best, and of plain decoding.

Every cell is a kind of text and a number of requests that run together. All engines take turns in one process, each
turn in another order, so a machine that is busy for a while slows all of them; a ratio is the median over turns of
ratios within one turn, and `spread` says between which values half of the turns lie: a difference within it is noise.

    python benchmarks/windows.py                                      # all cells; about ten minutes on two cores
    python benchmarks/windows.py --tokens 64 --turns 7                # about five
    python benchmarks/windows.py --rows 1 8 --texts story --turns 3
    python benchmarks/windows.py --clock cpu                          # processor time, for a machine that is not quiet
"""

import argparse
import json
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

from peregrine import LLM, SamplingParams
from peregrine.bench.generation import first_prompts

QUESTIONS = (
    "Tell me a story about a brave cat.",
    "What did the girl find in the garden?",
    "Who lives in the old house?",
)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def prompts_of(llm: LLM, text: str, count: int) -> list[list[int]]:
    """Token ids of `count` prompts of one kind of text."""
    if text == "story":
        return [llm.encode(prompt) for prompt in first_prompts(count)]
    if text == "chat":
        asked = [QUESTIONS[i % len(QUESTIONS)] for i in range(count)]
        return [llm.encode_chat([{"role": "user", "content": question}]) for question in asked]
    dice = random.Random(7)
    return [[dice.randrange(300, 8000) for _ in range(24)] for _ in range(count)]


def measure(engines: dict[str, LLM], text: str, rows: int, args: argparse.Namespace) -> dict[str, object]:
    """One cell: tokens per second of every engine in every turn."""
    clock = CLOCKS[args.clock]
    temperature = 1.0 if text == "random" else args.temperature  # greedy text of random words soon repeats itself
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.tokens, ignore_eos=True)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    texts, rounds = {}, {}
    for turn in range(args.warm + args.turns):
        names = list(engines)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            llm = engines[name]
            prompts = prompts_of(llm, text, rows)
            begun = clock()
            outputs = llm.generate(prompts, params, progress=False)
            if turn >= args.warm:
                speeds[name].append(sum(len(output.token_ids) for output in outputs) / (clock() - begun))
            texts[name] = [output.token_ids for output in outputs]
            rounds[name] = sum(o.stats.accepted for o in outputs) / sum(o.stats.rounds for o in outputs)
    fixed = [name for name in engines if name != "auto"]
    turns = [{name: speeds[name][turn] for name in engines} for turn in range(args.turns)]
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    best = max(fixed, key=lambda name: medians[name])
    ratios = {name: [turn["auto"] / turn[name] for turn in turns] for name in (best, "0")}
    return {
        "text": text,
        "rows": rows,
        "tokens_per_s": {name: round(value, 1) for name, value in medians.items()},
        "tokens_per_round": {name: round(value, 2) for name, value in rounds.items()},
        "best_fixed": best,
        "auto_of_best_fixed": round(statistics.median(ratios[best]), 3),
        "auto_of_plain": round(statistics.median(ratios["0"]), 3),
        "spread": spread(ratios[best]),
        "identical": all(made == texts["0"] for made in texts.values()),
    }


def spread(values: list[float]) -> list[float]:
    """The quartiles."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [round(low, 3), round(high, 3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="merlin")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--texts", nargs="+", default=["story", "chat", "random"], choices=["story", "chat", "random"])
    parser.add_argument("--fixed", type=int, nargs="+", default=[0, 1, 2, 3, 5], help="fixed numbers of drafts")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="turns before those that are timed: sizes are recorded")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name in ("rows", "tokens", "turns", "warm"):
        given = getattr(args, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            parser.error(f"--{name}: {given} is not above 0")
    cells = []
    with ExitStack() as opened:
        shapes: dict[str, dict[str, object]] = {str(k): {"num_drafts": k, "windows": "fixed"} for k in {0, *args.fixed}}
        shapes["auto"] = {}
        engines = {
            name: opened.enter_context(LLM(args.model, max_rows=max(args.rows), **shape))
            for name, shape in shapes.items()
        }
        for text in args.texts:
            for rows in args.rows:
                cell = measure(engines, text, rows, args)
                cells.append(cell)
                print(json.dumps(cell), flush=True)
        planner = engines["auto"].engine.runner.planner
        if planner is not None:
            print(f"calibration error {planner.calibration_error:.3f}, costs {json.dumps(planner.costs.to_json())}")
    least = min(float(str(cell["auto_of_best_fixed"])) for cell in cells)
    print(f"least ratio to the best fixed setting {least:.3f}")
    if args.out:
        args.out.write_text(json.dumps({"benchmark": "windows", "clock": args.clock, "cells": cells}, indent=1))


if __name__ == "__main__":
    main()
