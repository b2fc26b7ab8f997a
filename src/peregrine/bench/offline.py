"""`peregrine bench offline`: this engine against itself and against transformers, same prompts, one run.

Reported: tokens/s plain and speculative, acceptance length, time per round by stage, the share of a round outside
compiled kernels, memory beyond weights and KV pages, time from import to first token.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from peregrine.bench.clock import timed_rounds
from peregrine.bench.generation import PROMPTS, decided, first_prompts, generate
from peregrine.errors import ConfigError, need_packages
from peregrine.llm import LLM
from peregrine.log import style
from peregrine.models.loading import num_weights

SPECULATION = ("drafter", "num_drafts", "tree")
MIB = 2**20
Json = dict[str, Any]
START_UP = """
import time
start = time.perf_counter()
from peregrine import LLM, SamplingParams
llm = LLM({model!r}, {options})
next(llm.stream("Once", SamplingParams(temperature=0, max_tokens=2)))
print(time.perf_counter() - start)
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    rows: tuple[int, ...] = (1, 8)  # batch sizes
    tokens: int = 128  # per request
    repeats: int = 3  # the median counts
    temperature: float = 0.0
    peer: bool = True  # measure transformers, too


def run(plan: Plan, options: dict[str, object]) -> Json:
    """Measure, and return everything as plain values."""
    speculative = {"max_rows": max(plan.rows), **options}
    model = str(speculative.pop("model", "merlin"))
    plain = {name: value for name, value in speculative.items() if name not in SPECULATION} | {"drafter": "none"}
    start_up_s = start_up_seconds(model, speculative)
    before = peak_mib()
    with ExitStack() as opened:
        fast = opened.enter_context(LLM(model, **speculative))
        generate(fast, PROMPTS, plan.tokens, plan.temperature)
        memory = memory_facts(fast, before)  # of this engine alone
        slow = opened.enter_context(LLM(model, **plain))
        peer = load_peer(decided(slow, "model")) if plan.peer else None
        lines = [measure_rows(plan, rows, slow, fast, peer) for rows in plan.rows]
        return {
            "model": model,
            "drafter": decided(fast, "drafter"),
            "attention": decided(fast, "attention"),
            "depth": fast.engine.limits.num_drafts,
            "tokens": plan.tokens,
            "temperature": plan.temperature,
            "start_up_s": round(start_up_s, 3),
            "memory": memory,
            "rows": lines,
        }


def measure_rows(plan: Plan, rows: int, slow: LLM, fast: LLM, peer: object) -> Json:
    """Plain, speculative and transformers at one batch size."""
    plain, plain_tokens = measure(slow, rows, plan)
    speculative, speculative_tokens = measure(fast, rows, plan)
    line: Json = {"rows": rows, "plain": plain, "speculative": speculative}
    line["identical"] = plain_tokens == speculative_tokens
    if peer is not None:
        line["transformers"] = {"tokens_per_s": measure_peer(peer, slow, rows, plan)}
    return line


def measure(llm: LLM, rows: int, plan: Plan) -> tuple[Json, list[list[int]]]:
    """Tokens/s and acceptance of one batch, and where a round's time goes; and the tokens."""
    prompts = first_prompts(rows)
    generate(llm, prompts, plan.tokens, plan.temperature)  # warm-up
    speeds = []
    for _ in range(plan.repeats):
        outputs, speed = generate(llm, prompts, plan.tokens, plan.temperature)
        speeds.append(speed)
    rounds = sum(o.stats.rounds for o in outputs)
    figures = {
        "tokens_per_s": round(statistics.median(speeds), 1),
        "accept_length": round(sum(o.stats.accepted for o in outputs) / rounds, 3),
        "stages": stage_times(llm, prompts, plan),
    }
    return figures, [o.token_ids for o in outputs]


def stage_times(llm: LLM, prompts: Sequence[str], plan: Plan) -> dict[str, float]:
    """Milliseconds per round by stage, and the share of a round outside compiled kernels."""
    with timed_rounds(llm.engine) as clock:
        start = time.perf_counter()
        generate(llm, prompts, plan.tokens, plan.temperature)
        total = time.perf_counter() - start
    ms = 1e3 / max(1, clock.rounds)
    stages = {f"{name}_ms": clock.seconds[name] * ms for name in ("verify", "judge", "propose")}
    times = {
        "round_ms": clock.round_seconds * ms,
        **stages,
        "commit_and_rest_ms": clock.round_seconds * ms - sum(stages.values()),
        "host_between_rounds_ms": (total - clock.round_seconds) * ms,
        "outside_kernels": 1 - clock.kernel_seconds / clock.round_seconds,
    }
    return {name: round(value, 3) for name, value in times.items()}


def load_peer(folder: str) -> object:
    """Load the checkpoint with transformers, in float32."""
    need_packages("transformers", instead=", or pass --no-peer")
    from transformers import AutoModelForCausalLM

    model: object = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


@torch.inference_mode()
def measure_peer(peer: object, llm: LLM, rows: int, plan: Plan) -> float:
    """Tokens/s of transformers' generate on the same batch; prompts are cut to one length, so that none is padded."""
    ids = [llm.encode(prompt) for prompt in first_prompts(rows)]
    shortest = min(len(i) for i in ids)
    batch = torch.tensor([i[:shortest] for i in ids])
    speeds = []
    for attempt in range(plan.repeats + 1):
        start = time.perf_counter()
        out = peer.generate(  # type: ignore[attr-defined]
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=plan.tokens,
            min_new_tokens=plan.tokens,
            do_sample=False,
            pad_token_id=0,
        )
        if attempt:
            speeds.append((out.shape[1] - shortest) * rows / (time.perf_counter() - start))
    return float(round(statistics.median(speeds), 1))


def start_up_seconds(model: str, options: dict[str, object]) -> float:
    """Seconds from import to first token, in a fresh process."""
    written = ", ".join(f"{name}={value!r}" for name, value in options.items())
    code = START_UP.format(model=model, options=written)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"start-up failed: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.split()[-1])


def memory_facts(llm: LLM, before: float) -> dict[str, float]:
    """Mebibytes: weights, KV pages, and the engine's peak beyond both since `before`."""
    runner = llm.engine.runner
    weights = num_weights(runner.target.decoder.config) * runner.target.store.keys.element_size() / MIB
    pages = runner.target.store.num_bytes / MIB
    return {
        "weights_mib": round(weights, 1),
        "kv_pages_mib": round(pages, 1),
        "peak_beyond_mib": round(peak_mib() - before - weights - pages, 1),
    }


def peak_mib() -> float:
    """The peak of this process's memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(result: Json) -> str:
    """The result as a table."""
    lines = [f"model {result['model']}, drafter {result['drafter']}, {result['tokens']} tokens per request"]
    lines.append(f"import to first token: {result['start_up_s']} s; memory: {json.dumps(result['memory'])}")
    for line in result["rows"]:
        plain, spec = line["plain"], line["speculative"]
        lines.append(style(f"rows {line['rows']}", "bold"))
        lines.append(f"  plain        {plain['tokens_per_s']:9.1f} tok/s   round {plain['stages']['round_ms']} ms")
        if "transformers" in line:
            peer = line["transformers"]["tokens_per_s"]
            lines.append(f"  transformers {peer:9.1f} tok/s   ratio {plain['tokens_per_s'] / peer:.2f}x")
        ratio = spec["tokens_per_s"] / plain["tokens_per_s"]
        lines.append(
            f"  speculative  {spec['tokens_per_s']:9.1f} tok/s   ratio {ratio:.2f}x   accept {spec['accept_length']}"
        )
        lines.append(f"  stages of a speculative round: {json.dumps(spec['stages'])}")
        lines.append(f"  identical: {'yes' if line['identical'] else 'NO'}")
    return "\n".join(lines)
