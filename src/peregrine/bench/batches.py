"""`peregrine bench throughput` and `bench latency`: the engine in this process, measured as vLLM's of these names.

throughput: many requests are submitted at once; from the first submission to the last output.
latency: one batch at a time, again and again; from submission to the last output, first tokens and times per token.

Prompts are random token ids, so that none shares a prefix with another, and every request has exactly its output
length. The prefix cache is emptied before each measurement.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from peregrine.bench.generation import decided, with_rows
from peregrine.bench.prompts import read_prompts, repeated
from peregrine.bench.serve_metrics import figures
from peregrine.engine.output import Output
from peregrine.errors import ConfigError
from peregrine.llm import LLM
from peregrine.sampling import SamplingParams

Json = dict[str, Any]
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a measurement."""

    count: int
    input_len: int = 1024
    output_len: int = 128
    prompts: Path | None = None  # a JSONL file of prompts, used in turn instead of random ones
    temperature: float = 0.0
    seed: int = 0


def run_throughput(load: Load, options: dict[str, object]) -> Json:
    """All requests at once: tokens and requests per second."""
    with LLM(**options) as llm:  # type: ignore[arg-type]
        prompts = make_prompts(llm, load)
        few = min(load.count, llm.engine.policy.max_rows)
        measured(llm, prompts[:few], replace(load, output_len=min(WARM_UP_TOKENS, load.output_len)), progress=False)
        outputs, seconds = measured(llm, prompts, load, progress=sys.stderr.isatty())
        inputs, made = (sum(map(len, texts)) for texts in (prompts, (output.token_ids for output in outputs)))
        return (
            {"model": str(options.get("model", "merlin"))}
            | facts(llm, load, outputs)
            | {
                "benchmark": "throughput",
                "elapsed_time": round(seconds, 4),
                "num_requests": load.count,
                "total_num_tokens": inputs + made,
                "requests_per_second": round(load.count / seconds, 3),
                "tokens_per_second": round((inputs + made) / seconds, 2),
                "output_tokens_per_second": round(made / seconds, 2),
                "ttft_ms": figures([output.timing.first_token_s for output in outputs]),
                "tpot_ms": per_token_ms(outputs),
            }
        )


def run_latency(load: Load, num_iters: int, num_iters_warmup: int, options: dict[str, object]) -> Json:
    """One batch `num_iters` times: its latency, first tokens, and time per further token."""
    with LLM(**with_rows(options, load.count, "batch_size")) as llm:  # type: ignore[arg-type]
        prompts = make_prompts(llm, load)
        runs = [
            measured(llm, prompts, load, progress=False)
            for _ in tqdm(range(num_iters_warmup + num_iters), "batches", leave=False, disable=None)
        ][num_iters_warmup:]
        outputs = [output for some, _ in runs for output in some]
        latencies = [round(seconds, 5) for _, seconds in runs]
        return (
            {"model": str(options.get("model", "merlin"))}
            | facts(llm, load, outputs)
            | {
                "benchmark": "latency",
                "batch_size": load.count,
                "avg_latency": round(sum(latencies) / len(latencies), 5),
                "latency_ms": figures(latencies),
                "latencies": latencies,
                "ttft_ms": figures([output.timing.first_token_s for output in outputs]),
                "tpot_ms": per_token_ms(outputs),
            }
        )


def make_prompts(llm: LLM, load: Load) -> list[list[int]]:
    """The token ids of every request; refused if one does not fit."""
    most = llm.engine.limits.max_len
    told = f"with output_len={load.output_len} more than the {most} tokens of a request (max_len)"
    if load.prompts is not None:
        asked = repeated(read_prompts(load.prompts), load.count)
        prompts = [llm.encode(text) if isinstance(text, str) else llm.encode_chat(text) for text in asked]
        longest = max(prompts, key=len)
        if len(longest) + load.output_len > most:
            raise ConfigError(
                f"prompts={str(load.prompts)!r}: prompt {prompts.index(longest) + 1} has {len(longest)} tokens, {told}"
                "; take it out, or lower output_len"
            )
        return prompts
    if load.input_len + load.output_len > most:
        raise ConfigError(f"input_len={load.input_len}: {told}; lower one of these two")
    draw, vocab = Random(load.seed), llm.config.vocab_size
    return [[draw.randrange(vocab) for _ in range(load.input_len)] for _ in range(load.count)]


def measured(llm: LLM, prompts: Sequence[list[int]], load: Load, progress: bool) -> tuple[list[Output], float]:
    """The outputs, and seconds from the first submission to the last one."""
    llm.drop_cached()
    params = [
        SamplingParams(
            temperature=load.temperature,
            seed=load.seed + index,
            max_tokens=load.output_len,
            ignore_eos=True,
            detokenize=False,
        )
        for index in range(len(prompts))
    ]
    start = time.perf_counter()
    outputs = llm.generate(list(prompts), params, progress=progress)
    seconds = time.perf_counter() - start
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise ConfigError(f"{len(failed)} of {len(outputs)} requests failed, the first with: {failed[0]}")
    return outputs, seconds


def per_token_ms(outputs: Sequence[Output]) -> dict[str, float] | None:
    """Milliseconds per token after the first; None if no request has a second one."""
    return figures([output.timing.per_token_s for output in outputs if len(output.token_ids) > 1])


def facts(llm: LLM, load: Load, outputs: Sequence[Output]) -> Json:
    """What was measured, and how the engine was set up for it."""
    stats = [output.stats for output in outputs]
    return {
        "drafter": decided(llm, "drafter"),
        "device": decided(llm, "device"),
        "input_len": load.input_len if load.prompts is None else None,
        "output_len": load.output_len,
        "prompts": None if load.prompts is None else str(load.prompts),
        "max_rows": llm.engine.policy.max_rows,
        "prefill_chunk": llm.engine.policy.prefill_chunk,
        "accept_length": round(sum(s.accepted for s in stats) / max(1, sum(s.rounds for s in stats)), 3),
        "simulated": llm.engine.simulated,
        "preemptions": sum(s.preemptions for s in stats),
    }


def show(result: Json) -> str:
    """The result in words."""
    prompts = f"{result['input_len']} tokens in" if result["prompts"] is None else f"prompts of {result['prompts']}"
    count = result["num_requests"] if result["benchmark"] == "throughput" else result["batch_size"]
    lines = [
        f"{result['model']}, drafter {result['drafter']}, {result['device']}",
        f"{count} requests, {prompts}, {result['output_len']} out; up to {result['max_rows']} at a time, prompts in "
        f"chunks of {result['prefill_chunk']}",
    ]
    if result["benchmark"] == "throughput":
        lines.append(
            f"Throughput: {result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.2f} total "
            f"tokens/s, {result['output_tokens_per_second']:.2f} output tokens/s"
        )
    else:
        lines.append(f"Avg latency: {result['avg_latency']:.4f} seconds")
        lines.append(shown_figures("latency", result["latency_ms"]))
    lines.append(shown_figures("time to first token", result["ttft_ms"]))
    if result["tpot_ms"] is not None:
        lines.append(shown_figures("time per further token", result["tpot_ms"]))
    rounds = f"tokens per round: {result['accept_length']:.2f}" + (" (simulated)" if result["simulated"] else "")
    lines.append(rounds + (f"; preemptions: {result['preemptions']}" if result["preemptions"] else ""))
    return "\n".join(lines)


def shown_figures(name: str, values: dict[str, float]) -> str:
    """Mean and percentiles on one line."""
    return f"{name}, ms: " + ", ".join(f"{key} {value:.2f}" for key, value in values.items())
