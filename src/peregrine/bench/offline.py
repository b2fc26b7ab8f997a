"""`peregrine bench offline`: this engine against itself and against a peer, same prompts, one run.

The peer is llama.cpp for a GGUF file, on as many threads, and transformers for a folder.

Reported: tokens/s plain and speculative, acceptance length, time per round by stage, the share of a round outside
compiled kernels, memory beyond weights and KV pages, time from import to first token.
"""

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from peregrine.bench.clock import timed_rounds
from peregrine.bench.generation import PROMPTS, decided, first_prompts, generate, with_rows
from peregrine.bench.peers import Peer, open_peer
from peregrine.config import plain_options
from peregrine.engine.output import Output
from peregrine.errors import ConfigError
from peregrine.hardware import DTYPES
from peregrine.llm import LLM
from peregrine.models.loading import num_weights

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
    peer: bool = True  # measure llama.cpp or transformers, too


def run(plan: Plan, options: dict[str, object]) -> Json:
    """Measure, and return everything as plain values."""
    speculative = with_rows(options, max(plan.rows), "rows")
    model = str(speculative.pop("model", "merlin"))
    plain = plain_options(speculative)
    start_up_s = start_up_seconds(model, speculative)
    before = peak_mib()
    with ExitStack() as opened:
        fast = opened.enter_context(LLM(model, **speculative))
        generate(fast, PROMPTS, plan.tokens, plan.temperature)
        memory = memory_facts(fast, before)  # of this engine alone
        slow = opened.enter_context(LLM(model, **plain))
        peer = open_peer(decided(slow, "model"), max(plan.rows), plan.tokens) if plan.peer else None
        lines = [measure_rows(plan, rows, slow, fast, peer) for rows in plan.rows]
        return {
            "model": model,
            "drafter": decided(fast, "drafter"),
            "attention": decided(fast, "attention"),
            "shape": shape_name(fast),
            "tokens": plan.tokens,
            "temperature": plan.temperature,
            "start_up_s": round(start_up_s, 3),
            "memory": memory,
            "rows": lines,
        }


def measure_rows(plan: Plan, rows: int, slow: LLM, fast: LLM, peer: Peer | None) -> Json:
    """Plain, speculative and the peer at one batch size, in turns, so that a busy machine slows all of them."""
    prompts = first_prompts(rows)
    engines = {"plain": slow, "speculative": fast}
    # The first runs are the warm-up.
    outputs = {name: generate(llm, prompts, plan.tokens, plan.temperature)[0] for name, llm in engines.items()}
    speeds: dict[str, list[float]] = {name: [] for name in (*engines, "peer")}
    for attempt in range(plan.repeats):
        for name, llm in engines.items():
            llm.drop_cached()  # what was answered before helps nobody
            outputs[name], speed = generate(llm, prompts, plan.tokens, plan.temperature)
            speeds[name].append(speed)
        if peer is not None:
            speeds["peer"] += measure_peer(peer, slow, rows, plan, warm_up=attempt == 0)
    line: Json = {"rows": rows}
    for name, llm in engines.items():
        line[name] = spread(speeds[name]) | {
            "accept_length": round(accept_length(outputs[name]), 3),
            "stages": stage_times(llm, prompts, plan),
        }
    tokens = [[output.token_ids for output in outputs[name]] for name in engines]
    line["identical"] = tokens[0] == tokens[1]
    if peer is not None:
        line[peer.name] = spread(speeds["peer"])
    return line


def shape_name(llm: LLM) -> str:
    """The shape of an engine's drafts in words."""
    shape = llm.engine.runner.drafter.shape
    if llm.costs is not None:
        return f"planned chains of up to {shape.depth}"
    return f"chain of {shape.depth}" if shape.is_chain else f"tree {shape.depth},{shape.width},{shape.nodes}"


def spread(speeds: Sequence[float]) -> Json:
    """The median of repeats, and how far they lie apart."""
    figures = {"tokens_per_s": statistics.median(speeds), "slowest": min(speeds), "fastest": max(speeds)}
    return {name: round(value, 1) for name, value in figures.items()}


def accept_length(outputs: Sequence[Output]) -> float:
    """Tokens per round, bonus included, over all requests."""
    return sum(o.stats.accepted for o in outputs) / sum(o.stats.rounds for o in outputs)


def stage_times(llm: LLM, prompts: Sequence[str], plan: Plan) -> dict[str, float]:
    """Milliseconds per round by stage, and the share of a round outside compiled kernels."""
    llm.drop_cached()
    with timed_rounds(llm.engine) as clock:
        start = time.perf_counter()
        generate(llm, prompts, plan.tokens, plan.temperature)
        total = time.perf_counter() - start
    ms = 1e3 / max(1, clock.rounds)
    target = ("verify", "judge", "commit")  # on a CPU often one replay
    times = {
        "round_ms": clock.round_seconds * ms,
        "target_ms": sum(clock.seconds[name] for name in target) * ms,
        "propose_ms": clock.seconds["propose"] * ms,
        "rest_ms": sum(spent for name, spent in clock.seconds.items() if name not in (*target, "propose")) * ms,
        "host_between_rounds_ms": (total - clock.round_seconds) * ms,
        "outside_kernels": 1 - clock.kernel_seconds / clock.round_seconds,
    }
    return {name: round(value, 3) for name, value in times.items()}


def measure_peer(peer: Peer, llm: LLM, rows: int, plan: Plan, warm_up: bool) -> list[float]:
    """Tokens/s of the peer on the same prompts."""
    ids = [llm.encode(prompt) for prompt in first_prompts(rows)]
    if warm_up:
        peer.write(ids, plan.tokens)
    start = time.perf_counter()
    peer.write(ids, plan.tokens)
    return [rows * plan.tokens / (time.perf_counter() - start)]


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
    weights = num_weights(runner.target.decoder.config) * DTYPES[decided(llm, "dtype")].itemsize / MIB
    pages = runner.target.store.num_bytes / MIB
    return {
        "weights_mib": round(weights, 1),
        "kv_pages_mib": round(pages, 1),
        "peak_beyond_mib": round(peak_mib() - before - weights - pages, 1),
    }


def peak_mib() -> float:
    """The peak of this process's memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
