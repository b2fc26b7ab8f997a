"""`peregrine bench contention`: tokens/s beside processes that keep a core busy each, offline and over HTTP.

All cases are measured in turns, in one run, and reported as a share of the speed alone. A scheduler that is fair to
threads leaves `cores / (threads + busy)` of the machine to an engine whose threads would use all of it; `of_fair_share`
is the measured share over that one. What else runs on the machine counts as well: `load` is the system's load average
(runnable threads) when the run began.
"""

import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from peregrine.bench import http
from peregrine.bench.generation import first_prompts, generate
from peregrine.hardware import read_cpu
from peregrine.llm import LLM

# Computes until whoever started it ends it, or is gone.
BUSY_LOOP = f"{http.FOLLOW}print(flush=True)\nwhile True: sum(range(10000))"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    busy: tuple[int, ...] = (1, 2)  # processes that compute beside the engine; none is measured in any case
    tokens: int = 64  # per generation, one at a time
    repeats: int = 7  # the median counts
    temperature: float = 0.0


def run(plan: Plan, options: Json, flags: list[str]) -> Json:
    """Measure every case in turns; `flags` are `options` as the server's command line takes them."""
    load = os.getloadavg()[0]
    model, prompts = str(options.pop("model", "merlin")), first_prompts(1)
    counts = (0, *plan.busy)
    speeds: dict[int, list[tuple[float, float]]] = {busy: [] for busy in counts}
    texts = set()
    with LLM(model, **options) as llm, http.running_server(flags) as port:
        for turn in range(plan.repeats + 1):  # the first one warms up
            for busy in counts:
                with busy_processes(busy):
                    outputs, offline = generate(llm, prompts, plan.tokens, plan.temperature)
                    streamed, through = asyncio.run(http.streamed(port, prompts, http_plan(plan)))
                texts |= {outputs[0].text, streamed[0]}
                if turn:
                    speeds[busy].append((offline, through))
        threads, cores = torch.get_num_threads(), read_cpu().cores
    alone = [statistics.median(way) for way in zip(*speeds[0], strict=True)]
    return {
        "model": model,
        "tokens": plan.tokens,
        "threads": threads,
        "cores": cores,
        "load": round(load, 2),
        "cases": [case(busy, speeds[busy], alone, min(1.0, cores / (threads + busy))) for busy in counts],
        "identical": len(texts) == 1,
    }


def http_plan(plan: Plan) -> http.Plan:
    """One stream of the same length."""
    return http.Plan(streams=1, tokens=plan.tokens, repeats=1, temperature=plan.temperature)


def case(busy: int, speeds: list[tuple[float, float]], alone: list[float], fair: float) -> Json:
    """The figures of one number of busy processes, offline and over HTTP."""
    line: Json = {"busy": busy, "fair_share": round(fair, 3)}
    for name, runs, reference in zip(("offline", "http"), zip(*speeds, strict=True), alone, strict=True):
        share = statistics.median(runs) / reference
        line[name] = {
            "tokens_per_s": round(statistics.median(runs), 1),
            "slowest": round(min(runs), 1),
            "fastest": round(max(runs), 1),
            "share": round(share, 3),
            "of_fair_share": round(share / fair, 3),
        }
    return line


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that compute without a pause inside the block, from its first line on."""
    command, pipe = [sys.executable, "-c", BUSY_LOOP], subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def show(result: Json) -> str:
    """The result as a table."""
    lines = [
        f"model {result['model']}, one request of {result['tokens']} tokens at a time, {result['threads']} threads on "
        f"{result['cores']} cores, load average {result['load']} before",
        f"{'busy beside it':>14}  {'fair share':>10}  {'':7}  {'tok/s':>7}  {'slowest-fastest':>15}  {'of alone':>8}  "
        f"{'of fair share':>13}",
    ]
    for line in result["cases"]:
        for name in ("offline", "http"):
            way = line[name]
            speeds = f"{way['tokens_per_s']:>7.1f}  {way['slowest']:>7.1f}-{way['fastest']:<7.1f}"
            shares = f"{way['share']:>8.0%}  {way['of_fair_share']:>13.0%}"
            lines.append(f"{line['busy']:>14}  {line['fair_share']:>10.0%}  {name:7}  {speeds}  {shares}")
    lines.append(f"identical: {'yes' if result['identical'] else 'NO'}")
    return "\n".join(lines)
