"""The linear layers of Llama-3.1-8B for many rows beside the library's matrix product, on a GPU: prints JSON.

    PYTHONPATH=src python tests/gpu/bench_linear.py [--rows 512 1024 2048 4096 8192] [--weights qkv o gate_up down]

Other weights are the output head, and those that an EAGLE-3 head has besides a layer's: fc, its qkv (which reads two
vectors side by side) and the head of its draft vocabulary.

The library multiplies only; ours also divides by the norm, gates, or adds to the residual stream. Where ours adds, the
library is also timed with a product that adds, though it neither scales nor squares the sums. All are recorded in
graphs over copies of the weight that are together larger than the device's cache, and replayed in turn, so that they
see the same clocks. "ratio" is the library's time over ours, "ratio_adding" that of its product that adds.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))

from gpu.test_linear import WEIGHTS, Problem, make_problem
from peregrine.bench.device import COLD_BYTES, new_event
from peregrine.engine.graphs import Graphs
from peregrine.hardware import read_hardware
from peregrine.kernels.linear.epilogue import Addition
from peregrine.kernels.linear.triton import TritonWeight, run

REPEATS, GRAPH_S, PEAK = 15, 3e-3, 700e12
DRAFTER = {"eagle_fc": (4096, 12288, "plain"), "eagle_qkv": (6144, 8192, "plain"), "eagle_head": (32000, 4096, "plain")}
ALL = WEIGHTS | DRAFTER
SHOWN = ("us", "library_us", "ratio", "ratio_adding")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--weights", choices=list(ALL), nargs="+", default=["qkv", "o", "gate_up", "down"])
    asked = parser.parse_args()
    lines = []
    with torch.inference_mode():
        for name, rows in itertools.product(asked.weights, asked.rows):
            lines.append(measure(name, rows))
            print(f"{name:10} {rows:5} rows", *(lines[-1].get(key, "") for key in SHOWN), file=sys.stderr, flush=True)
    command = (
        f"python tests/gpu/bench_linear.py --rows {' '.join(map(str, asked.rows))} --weights {' '.join(asked.weights)}"
    )
    print(json.dumps({"command": command, "machine": asdict(read_hardware()), "lines": lines}, indent=2))


def measure(name: str, rows: int) -> dict[str, object]:
    """One weight and number of rows: microseconds, operations per second and the ratio of both."""
    outputs, inputs, part = ALL[name]
    problem = make_problem(outputs, inputs, part, False, rows, torch.bfloat16)
    height = problem.weight.shape[0]
    copies = [problem.weight, *(torch.randn_like(problem.weight) for _ in range(COLD_BYTES // problem.weight.nbytes))]
    operations = 2 * rows * height * inputs
    calls = max(len(copies), round(GRAPH_S * PEAK / operations))
    product = torch.empty(rows, height, dtype=torch.bfloat16, device="cuda")
    ours = linear_of(problem)
    graphs: Graphs[list[Tensor]] = Graphs(torch.device("cuda"))
    kinds = {"ours": ours, "library": lambda weight: torch.matmul(problem.x, weight.T, out=product)}
    if part == "add":
        kinds["adding"] = lambda weight: torch.addmm(problem.residual, problem.x, weight.T, out=product)
    for kind, call in kinds.items():
        graphs.record(kind, repeated(call, copies, calls))
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(REPEATS):
        for kind, taken in times.items():
            before, after = new_event(), new_event()
            before.record()
            graphs.replay(kind)
            after.record()
            after.synchronize()
            taken.append(float(before.elapsed_time(after)) * 1e3 / calls)
    medians = {kind: statistics.median(taken[2:]) for kind, taken in times.items()}
    facts = {"weight": name, "outputs": height, "inputs": inputs, "rows": rows}
    for kind, us in medians.items():
        prefix = "" if kind == "ours" else f"{kind}_"
        facts |= {f"{prefix}us": round(us, 2), f"{prefix}tflops": round(operations / us / 1e6)}
    ratios = {kind: round(us / medians["ours"], 3) for kind, us in medians.items()}
    return facts | {"ratio": ratios["library"]} | ({"ratio_adding": ratios["adding"]} if "adding" in ratios else {})


def repeated(call: Callable[[Tensor], object], copies: list[Tensor], calls: int) -> Callable[[], list[Tensor]]:
    """The call on one copy of the weight after the other."""

    def all_calls() -> list[Tensor]:
        for i in range(calls):
            call(copies[i % len(copies)])
        return []

    return all_calls


def linear_of(problem: Problem) -> Callable[[Tensor], None]:
    """The fused linear of a problem, as a function of the weight."""
    out, scaled = torch.empty_like(problem.residual), torch.empty_like(problem.residual)
    squares, stale = torch.zeros_like(problem.squares), torch.zeros_like(problem.squares)
    add = Addition(problem.residual, problem.norm, scaled, squares, stale) if problem.part == "add" else None
    scale, gate = (problem.squares, 1e-5) if problem.part in ("scale", "gate") else None, problem.part == "gate"
    return lambda weight: run(problem.x, TritonWeight(weight, None), out, scale=scale, gate=gate, add=add)


if __name__ == "__main__":
    main()
