"""Timed generation through an LLM, for the benchmarks that run the engine in this process."""

import time
from collections.abc import Mapping, Sequence

from peregrine.config import LIMITS
from peregrine.engine.output import Output
from peregrine.errors import ConfigError
from peregrine.llm import LLM
from peregrine.sampling import SamplingParams

PROMPTS = (
    "Once upon a time, there was a little bird who",
    "One day, Tom and his sister went to the park. They saw",
    "The old man sat by the river and thought about",
    "Lily had a red ball. She loved to",
    "In the morning the farmer found that his",
    "Ben wanted to bake a cake for his mother, but",
    "It was raining, and the cat did not want to",
    "There was a small house at the edge of the forest where",
)


def first_prompts(count: int) -> list[str]:
    """`count` of the prompts, starting over when they run out."""
    return [PROMPTS[i % len(PROMPTS)] for i in range(count)]


def with_rows(options: Mapping[str, object], rows: int, field: str) -> dict[str, object]:
    """An engine's options with room for `rows` requests at a time; ConfigError if they ask for less."""
    asked = options.get("max_rows") or rows
    most = min(asked, LIMITS["max_rows"][1] or rows) if isinstance(asked, int) else rows
    if rows > most:
        raise ConfigError(f"{field}={rows}: at most {most} requests run at a time (max_rows); ask for no more")
    return {**options, "max_rows": asked}


def generate(
    llm: LLM, prompts: Sequence[str | list[int]], tokens: int, temperature: float
) -> tuple[list[Output], float]:
    """Continue every prompt by exactly `tokens` tokens; the outputs, and output tokens per second."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(list(prompts), params, progress=False)
    seconds = time.perf_counter() - start
    return outputs, sum(len(output.token_ids) for output in outputs) / seconds


def decided(llm: LLM, field: str) -> str:
    """What the engine decided for a field."""
    return str(next(decision.value for decision in llm.decisions if decision.field == field))
