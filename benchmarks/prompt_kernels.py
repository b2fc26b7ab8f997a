"""Hopper's kernels for prompts, dense and MLA, and for experts of many rows, beside those that serve elsewhere.

Microseconds of one layer, replayed as a CUDA graph, the median of five; and the operations per second that makes. Runs
on Hopper alone. Weights, keys and queries are random; experts are chosen at random, shared ones by every row.

    python benchmarks/prompt_kernels.py
    python benchmarks/prompt_kernels.py --json benchmarks/results/prompt-kernels-h200.json
    python benchmarks/prompt_kernels.py --only dense
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from peregrine.kernels.attention import GpuPlan, Kernel, Launch, StoredKV
from peregrine.kernels.attention.plan import PROMPT_TILE, TALL_TILE
from peregrine.kernels.moe import ExpertChoice

PROMPTS = {  # past, tokens of every row, rows
    "2k": (0, 2048, 1),
    "4k": (0, 4096, 1),
    "4k after 4k": (4096, 4096, 1),
    "8k": (0, 8192, 1),
    "4k after 12k": (12288, 4096, 1),
    "512": (0, 512, 1),
    "8 x 512": (0, 512, 8),
    "128 x 4 after 2k": (2048, 4, 128),
}
EXPERTS = {"DeepSeek-V2-Lite": (64, 2, 6, 2048, 1408), "Qwen3-30B-A3B": (128, 0, 8, 2048, 768)}
DENSE_PROMPTS = {"2k": (0, 2048, 1), "8k": (0, 8192, 1), "32k": (0, 32768, 1), "4k after 28k": (28672, 4096, 1)}
DENSE_PROMPTS |= {"512": (0, 512, 1), "8 x 1k": (0, 1024, 8)}
QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
HEADS, RANK, ROPE, PAGE = 16, 512, 64, 16
ROW = "{name:40} {own_us:>6} us {own_tflops:>4} TF/s, others {other_us:>6} us {other_tflops:>4} TF/s"
Line = dict[str, float | str]


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """Time of one call."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    graph.replay()
    for _ in range(5):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(1000 * first.elapsed_time(last) / repeats)
    return sorted(times)[2]


def line_of(name: str, operations: float, own: Callable[[], object], other: Callable[[], object], repeats: int) -> Line:
    line: Line = {"name": name}
    for which, call in (("own", own), ("other", other)):
        took = microseconds(call, repeats)
        line |= {f"{which}_us": round(took), f"{which}_tflops": round(operations / took / 1e6)}
    return line


def plan_of(past: int, length: int, rows: int, device: torch.device) -> tuple[GpuPlan, int]:
    """(the plan of rows that read so many tokens after so many others, slots of their store); pages in random order."""
    pages = -(-(past + length) // PAGE)
    table = 1 + torch.randperm(rows * pages, device=device).view(rows, pages)
    positions = past + torch.arange(length, device=device).repeat(rows)
    q_starts = length * torch.arange(rows + 1, device=device)
    plan = GpuPlan(positions, q_starts, torch.full((rows,), past, device=device), table, PAGE, None, None, length)
    return plan, (1 + rows * pages) * PAGE


def dense_line(name: str, past: int, length: int, rows: int, device: torch.device) -> Line:
    """One layer's attention of a prompt, 32 heads of 128 with 8 of keys and values."""
    from peregrine.kernels.attention.triton import dense_attention

    plan, slots = plan_of(past, length, rows, device)
    keys, values = (torch.randn(slots, KV_HEADS, HEAD_DIM, device=device).bfloat16() for _ in range(2))
    q = torch.randn(rows * length, QUERY_HEADS, HEAD_DIM, device=device).bfloat16()

    def attend(on_hopper: bool, tile: int) -> Tensor:
        how = Launch(Kernel.CONTEXT, on_hopper, tile, programs=0)
        return dense_attention(q, StoredKV(keys, values, None, None), plan, how, HEAD_DIM**-0.5, None, None)

    own, other = partial(attend, True, PROMPT_TILE), partial(attend, False, TALL_TILE)
    operations = 4 * HEAD_DIM * QUERY_HEADS * rows * (length * past + length * (length + 1) / 2)
    return line_of(f"dense prompt, {name}", operations, own, other, max(1, 16384 // (rows * (past + length))))


def mla_line(name: str, past: int, length: int, rows: int, device: torch.device) -> Line:
    """One layer's attention of a prompt, 16 heads of 512 + 64."""
    from peregrine.kernels.attention import mla_triton

    plan, slots = plan_of(past, length, rows, device)
    keys = torch.randn(slots, 1, RANK + ROPE, device=device).bfloat16()
    q = torch.randn(rows * length, HEADS, RANK + ROPE, device=device).bfloat16()
    how = Launch(Kernel.CONTEXT, on_hopper=True, tile=64, programs=0)

    def own() -> Tensor:
        return mla_triton.mla_attention(q, keys, plan, how, RANK, 192**-0.5)

    def other() -> Tensor:
        with patch.object(mla_triton, "hopper_takes_mla_prompt", lambda rank, rope: False):
            return own()

    operations = 2 * (2 * RANK + ROPE) * HEADS * rows * (length * past + length * (length + 1) / 2)
    return line_of(f"MLA prompt, {name}", operations, own, other, max(1, 16384 // (rows * (past + length))))


def experts_line(name: str, rows: int, device: torch.device) -> Line:
    """The experts of one layer, without routing and without adding up their outputs."""
    from peregrine.kernels.moe.hopper import placed_outputs
    from peregrine.kernels.moe.triton import expert_outputs

    experts, shared, choices, hidden, inner = EXPERTS[name]
    total, half = experts + shared, torch.bfloat16
    gate_up = torch.empty(total, 2 * inner, hidden, device=device, dtype=half).normal_(0, hidden**-0.5)
    down = torch.empty(total, hidden, inner, device=device, dtype=half).normal_(0, inner**-0.5)
    x = torch.randn(rows, hidden, device=device).to(half)
    chosen = torch.rand(rows, experts, device=device).topk(choices).indices
    all_of = torch.cat([chosen, torch.arange(experts, total, device=device).expand(rows, shared)], dim=1).int()
    choice = ExpertChoice(all_of.contiguous(), torch.rand(rows, choices + shared, device=device))
    squares = torch.stack([(x.double() ** 2).sum(1).mul(2.0**24).long(), torch.zeros(rows, device=device).long()], 1)
    inputs = x, (squares, 1e-6), choice, gate_up, down
    operations = 6 * all_of.numel() * hidden * inner
    title = f"experts of {name}, {rows} rows"
    return line_of(title, operations, lambda: placed_outputs(*inputs), lambda: expert_outputs(*inputs), 5)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the lines are written, too")
    parser.add_argument("--only", choices=("dense", "MLA", "experts"), help="measure these alone")
    asked, device = parser.parse_args(), torch.device("cuda")
    if not torch.cuda.is_available():
        parser.error("needs a Hopper GPU with CUDA; this machine has none")
    torch.manual_seed(0)
    makers = {
        "dense": [partial(dense_line, name, *sizes, device) for name, sizes in DENSE_PROMPTS.items()],
        "MLA": [partial(mla_line, name, *sizes, device) for name, sizes in PROMPTS.items()],
        "experts": [partial(experts_line, name, rows, device) for name in EXPERTS for rows in (512, 1024, 2048, 4096)],
    }
    lines = []
    for make in (make for kind, some in makers.items() if asked.only in (None, kind) for make in some):
        lines.append(make())
        print(ROW.format(**lines[-1]), flush=True)
    command = "python benchmarks/prompt_kernels.py" + (f" --only {asked.only}" if asked.only else "")
    facts = {"command": command, "device": torch.cuda.get_device_name(device)}
    if asked.json:
        asked.json.write_text(json.dumps(facts | {"lines": lines}, indent=2) + "\n")


if __name__ == "__main__":
    main()
