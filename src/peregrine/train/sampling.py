"""Text from the target itself: prompts continued by the engine, kept on disk in shards.

A sample is a function of its prompt's number: a run that was killed goes on at the first missing shard and ends
with the samples of one that was not.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from peregrine.errors import ConfigError
from peregrine.llm import LLM
from peregrine.log import logger
from peregrine.sampling import SamplingParams
from peregrine.train.prompts import Prompt

TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.0)
SHARD_ROUNDS = 4  # a shard holds this many times as many prompts as run together
PAGE_SIZE = 64
PREFILL_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How much to sample and how."""

    tokens: int  # to stop at, prompts not counted
    max_tokens: int  # of one sample
    longest_prompt: int
    rows: int  # requests that run together
    seed: int
    minutes: float | None  # stop earlier after this long

    @property
    def num_prompts(self) -> int:
        """Prompts that are surely enough unless answers are very short."""
        return max(1, -(-2 * self.tokens // self.max_tokens))


@dataclass(frozen=True, slots=True)
class Samples:
    """Prompts with the target's continuations, one after the other."""

    tokens: NDArray[np.int32]  # [T]
    starts: NDArray[np.int64]  # [n + 1]
    prompt_lens: NDArray[np.int64]  # [n]

    @property
    def num_sampled(self) -> int:
        """Tokens the target wrote."""
        return len(self.tokens) - int(self.prompt_lens.sum())

    def written(self) -> NDArray[np.int32]:
        """The tokens the target wrote, without the prompts."""
        place = np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], np.diff(self.starts))
        return self.tokens[place >= np.repeat(self.prompt_lens, np.diff(self.starts))]


def engine_options(plan: SamplingPlan, device: str, dtype: str) -> dict[str, object]:
    """What the engine is asked for when it samples: many rows, no drafts, no prefix cache."""
    max_len = plan.longest_prompt + plan.max_tokens
    pages = plan.rows * (-(-(max_len + 2) // PAGE_SIZE) + 1) + 1
    return {
        "drafter": "none",
        "max_rows": plan.rows,
        "max_len": max_len,
        "page_size": PAGE_SIZE,
        "num_pages": pages,
        "prefill_chunk": PREFILL_CHUNK,
        "prefix_cache": False,
        "device": device,
        "dtype": dtype,
    }


def sample(
    target: Path, prompts: Sequence[Prompt], plan: SamplingPlan, folder: Path, options: dict[str, object]
) -> Samples:
    """Samples until the plan is fulfilled, the prompts are used up or the time is over."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "done"
    if not done.exists():
        _sample_shards(target, prompts, plan, folder, options)
        done.touch()
    samples = load_samples(folder)
    if samples.num_sampled < plan.tokens:
        logger.warning("%d of %d tokens were sampled", samples.num_sampled, plan.tokens)
    return samples


def _sample_shards(
    target: Path, prompts: Sequence[Prompt], plan: SamplingPlan, folder: Path, options: dict[str, object]
) -> None:
    size = plan.rows * SHARD_ROUNDS
    ends = None if plan.minutes is None else time.monotonic() + 60.0 * plan.minutes
    bar = tqdm(total=plan.tokens, desc="sample", unit=" tokens", unit_scale=True, mininterval=1.0)
    with bar, LLM(str(target), **options) as llm:
        for number, first in enumerate(range(0, len(prompts), size)):
            path, began = folder / f"{number:05d}.npz", time.monotonic()
            if not path.exists():
                write_shard(path, _continue(llm, prompts[first : first + size], plan, first))
            bar.update(load_shard(path).num_sampled)
            now = time.monotonic()
            if bar.n >= plan.tokens or (ends is not None and 2 * now - began > ends):
                return


def _continue(llm: LLM, prompts: Sequence[Prompt], plan: SamplingPlan, first: int) -> Samples:
    params = [
        SamplingParams(
            temperature=TEMPERATURES[(first + i) % len(TEMPERATURES)],
            seed=plan.seed * 1_000_003 + first + i,
            max_tokens=plan.max_tokens,
            detokenize=False,
        )
        for i in range(len(prompts))
    ]
    outputs = llm.generate([prompt.tokens for prompt in prompts], params, progress=False)
    failed = [output.error for output in outputs if output.finish_reason == "error"]
    if len(failed) == len(outputs):
        raise ConfigError(f"the target continued none of {len(failed)} prompts: {failed[0]}")
    kept = [output for output in outputs if output.finish_reason != "error"]
    rows = [output.prompt_token_ids + output.token_ids for output in kept]
    starts = np.cumsum([0] + [len(row) for row in rows], dtype=np.int64)
    prompt_lens = np.array([len(output.prompt_token_ids) for output in kept], dtype=np.int64)
    return Samples(np.concatenate([np.array(row, dtype=np.int32) for row in rows]), starts, prompt_lens)


def write_shard(path: Path, samples: Samples) -> None:
    """Puts a shard on disk; it is there whole or not at all."""
    new = path.with_name(f"{path.stem}.new.npz")
    np.savez(new, tokens=samples.tokens, starts=samples.starts, prompt_lens=samples.prompt_lens)
    os.replace(new, path)


def load_shard(path: Path) -> Samples:
    """One shard."""
    with np.load(path) as arrays:
        return Samples(arrays["tokens"], arrays["starts"], arrays["prompt_lens"])


def load_samples(folder: Path) -> Samples:
    """Every shard of a folder as one."""
    shards = [load_shard(path) for path in sorted(folder.glob("[0-9]*.npz")) if ".new." not in path.name]
    lens = np.concatenate([np.diff(shard.starts) for shard in shards])
    return Samples(
        np.concatenate([shard.tokens for shard in shards]),
        np.concatenate([[0], np.cumsum(lens)]),
        np.concatenate([shard.prompt_lens for shard in shards]),
    )
