"""What a replica's steps take, from measurements: a result of `bench round`, or a running server."""

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

from peregrine.bench import serve
from peregrine.bench.prompts import Prompt
from peregrine.bench.serve_client import Client
from peregrine.errors import ConfigError

WORDS = ("river", "stone", "cloud", "garden", "window", "letter", "bridge", "candle", "winter", "music", "forest")
SHORT_WORDS, LONG_WORDS = 24, 400
MEASURED, LEAST_MEASURED = 3, 12  # requests for each row of a case, and of a case


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of rounds and prompts."""

    rounds: tuple[tuple[int, float], ...]  # (rows, seconds), rows ascending, at `base_context` tokens a row
    prompt_s: float  # per prompt token
    accept_length: float  # tokens per round and row, bonus included
    base_context: float = 0.0
    context_s: float = 0.0  # per token that a row's context is longer
    overhead_s: float = 0.0  # of a request, outside the engine

    def round_s(self, rows: int, context: int) -> float:
        """A round of this many rows, whose contexts have this many tokens together."""
        return self._at(rows) + self.context_s * (context - rows * self.base_context)

    def _at(self, rows: int) -> float:
        """Between measured numbers of rows on a straight line, beyond the last one on the line that ends there."""
        if len(self.rounds) == 1 or rows <= self.rounds[0][0]:
            return self.rounds[0][1]
        pairs = list(pairwise(self.rounds))
        (low, low_s), (high, high_s) = next((pair for pair in pairs if rows <= pair[1][0]), pairs[-1])
        return low_s + (rows - low) * (high_s - low_s) / (high - low)


def costs_of_rounds(result: dict[str, Any], prompt_tokens_per_s: float) -> Costs:
    """From a result of `bench round`: its shortest context gives the rounds, a longer one of equal rows the slope."""
    if result.get("benchmark") != "round" or not result.get("cases"):
        raise ConfigError(f"rounds={result.get('benchmark')!r}: is not a result of `bench round`; write one with --out")
    if not prompt_tokens_per_s > 0:
        raise ConfigError(f"prompt_tokens_per_s={prompt_tokens_per_s}: must be above 0")
    cases = result["cases"]
    base = min(case["context"] for case in cases)
    rounds = sorted((case["rows"], case["ms_per_round"] / 1e3) for case in cases if case["context"] == base)
    slopes = [
        (long["ms_per_round"] - short["ms_per_round"]) / 1e3 / (long["context"] - base) / short["rows"]
        for short in cases
        for long in cases
        if short["context"] == base < long["context"] and short["rows"] == long["rows"]
    ]
    return Costs(
        rounds=tuple(rounds),
        prompt_s=1 / prompt_tokens_per_s,
        accept_length=cases[0]["accept_length"],
        base_context=base,
        context_s=sum(slopes) / len(slopes) if slopes else 0.0,
    )


def made_up_prompts(count: int, num_words: int, seed: int) -> list[Prompt]:
    """Texts that have no beginning in common, so that no prefix cache helps."""
    draw = Random(f"{seed} {num_words}")
    return [" ".join(draw.choice(WORDS) for _ in range(num_words)) for _ in range(count)]


async def costs_of_server(client: Client, model: str, rows: int, output_tokens: int, seed: int) -> Costs:
    """From a server that does nothing else: closed loops of 1 to `rows` requests, and one of long prompts."""

    async def measured(concurrency: int, num_words: int) -> dict[str, Any]:
        count = max(LEAST_MEASURED, MEASURED * concurrency)
        plan = serve.Plan(
            cases=(),
            prompts=made_up_prompts(count, num_words, seed + concurrency),
            requests=count,
            max_tokens=output_tokens,
            ignore_eos=True,
            seed=seed,
        )
        case = await serve.measure_case(plan, client, model, serve.Case(concurrency=concurrency))
        if case["failed"]:
            raise ConfigError(
                f"url={client.url!r}: requests failed ({', '.join(case['errors'])}); nothing was simulated"
            )
        return case

    sizes = sorted({1, max(1, rows // 4), max(1, rows // 2), rows})
    cases = {size: await measured(size, SHORT_WORDS) for size in sizes}
    long = await measured(1, LONG_WORDS)
    short, acceptance = cases[1], cases[rows]["acceptance"]
    accept_length = acceptance["accept_length"] if acceptance else 1.0
    rounds = tuple((size, case["tpot_ms"]["p50"] / 1e3 * accept_length) for size, case in cases.items())
    tokens = {name: case["prompt_tokens"] / case["completed"] for name, case in (("short", short), ("long", long))}
    first = {name: case["ttft_ms"]["p50"] / 1e3 for name, case in (("short", short), ("long", long))}
    prompt_s = max(1e-9, (first["long"] - first["short"]) / (tokens["long"] - tokens["short"]))
    overhead = max(0.0, first["short"] - tokens["short"] * prompt_s - rounds[0][1])
    return Costs(rounds, prompt_s, accept_length, tokens["short"] + output_tokens / 2, 0.0, overhead)
