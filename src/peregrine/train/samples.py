"""Samples of the target: prompts continued by the engine, stored in shards.

A sample is a function of its prompt's number: a run that was killed goes on at the first missing shard and ends with
the samples of a run that was not.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tqdm import tqdm

from peregrine.errors import ConfigError
from peregrine.hardware import resolve_device
from peregrine.llm import LLM
from peregrine.log import logger
from peregrine.sampling import SamplingParams
from peregrine.train.options import SamplingPlan

TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.0)
SHARD_ROUNDS = 4  # prompts in a shard, as a multiple of the rows that run together when the first one is made
SHARD_SIZE = "shard_size"
PAGE_SIZE = 64
PREFILL_CHUNK = 8192
OWN_SHARE = 0.25  # at least this share of an epoch's tokens are the target's own samples with their prompts


@dataclass(frozen=True, slots=True)
class Samples:
    """Sequences of tokens, one after the other, each with a prompt at its front."""

    tokens: NDArray[np.int32]  # [T]
    starts: NDArray[np.int64]  # [n + 1]; sample i is tokens[starts[i]:starts[i + 1]]
    prompt_lens: NDArray[np.int64]  # [n]

    @property
    def lens(self) -> NDArray[np.int64]:
        """Tokens of each sample, prompt included."""
        return np.diff(self.starts)

    def written(self) -> NDArray[np.int32]:
        """The tokens after the prompts."""
        place = np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], self.lens)
        return self.tokens[place >= np.repeat(self.prompt_lens, self.lens)]

    @staticmethod
    def pack(rows: Sequence[ArrayLike], prompt_lens: Sequence[int]) -> "Samples":
        """Samples from one row of tokens each."""
        arrays = [np.asarray(row, dtype=np.int32) for row in rows]
        starts = np.cumsum([0] + [len(array) for array in arrays], dtype=np.int64)
        return Samples(np.concatenate(arrays), starts, np.array(prompt_lens, dtype=np.int64))

    @staticmethod
    def join(parts: Sequence["Samples"]) -> "Samples":
        """All samples of all parts."""
        starts = np.cumsum(np.concatenate([[0], *(part.lens for part in parts)]))
        return Samples(
            np.concatenate([part.tokens for part in parts]), starts, np.concatenate([p.prompt_lens for p in parts])
        )

    @staticmethod
    def load(path: Path) -> "Samples":
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return Samples(arrays["tokens"], arrays["starts"], arrays["prompt_lens"])

    def save(self, path: Path) -> None:
        """Write a file, which exists whole or not at all."""
        new = path.with_name(f"{path.stem}.new.npz")
        np.savez(new, tokens=self.tokens, starts=self.starts, prompt_lens=self.prompt_lens)
        os.replace(new, path)


def sample(target: Path, prompts: Sequence[list[int]], plan: SamplingPlan, folder: Path, **options: str) -> Samples:
    """Sample until the plan is fulfilled, the prompts are used up or the time is over."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "done"
    if not done.exists():
        _sample_shards(target, prompts, plan, folder, options)
        done.touch()
    samples = Samples.join([Samples.load(path) for path in sorted(folder.glob("[0-9]*[0-9].npz"))])
    if len(samples.written()) < plan.tokens:
        logger.warning("%d of %d tokens were sampled", len(samples.written()), plan.tokens)
    return samples


def with_texts(samples: Samples, texts: Samples | None) -> Samples:
    """One epoch: the texts, and the samples repeated until they make up OWN_SHARE."""
    if texts is None:
        return samples
    wanted = OWN_SHARE / (1 - OWN_SHARE) * len(texts.tokens)
    repeats = max(1, round(wanted / len(samples.tokens)))
    return Samples.join([samples] * repeats + [texts])


def _sample_shards(
    target: Path, prompts: Sequence[list[int]], plan: SamplingPlan, folder: Path, options: dict[str, str]
) -> None:
    size = _shard_size(folder, plan.rows)
    on_gpu = resolve_device(options.get("device", "auto")).type == "cuda"
    llm = LLM(
        str(target),
        drafter="none",
        max_rows=plan.rows,
        row_sizes=(max(1, plan.rows // 8), plan.rows) if on_gpu else None,  # most rounds are full: record few sizes
        max_len=plan.max_len,
        page_size=PAGE_SIZE,
        num_pages=plan.rows * (-(-(plan.max_len + 2) // PAGE_SIZE) + 1) + 1,
        prefill_chunk=PREFILL_CHUNK,
        prefix_cache=False,
        **options,
    )
    ends = None if plan.sample_minutes is None else time.monotonic() + 60.0 * plan.sample_minutes
    with llm, tqdm(total=plan.tokens, desc="sample", unit=" tokens", unit_scale=True, mininterval=1.0) as bar:
        for number, first in enumerate(range(0, len(prompts), size)):
            path, began = folder / f"{number:05d}.npz", time.monotonic()
            if not path.exists():
                _continue(llm, prompts[first : first + size], plan, first).save(path)
            bar.update(len(Samples.load(path).written()))
            now = time.monotonic()
            if bar.n >= plan.tokens or (ends is not None and 2 * now - began > ends):
                return


def _shard_size(folder: Path, rows: int) -> int:
    """Prompts in each shard of the folder; it stays when another machine, with other rows, goes on."""
    noted = folder / SHARD_SIZE
    if not noted.exists():
        noted.write_text(str(rows * SHARD_ROUNDS))
    return int(noted.read_text())


def _continue(llm: LLM, prompts: Sequence[list[int]], plan: SamplingPlan, first: int) -> Samples:
    """The target's continuations of prompts number `first` and following."""
    params = [
        SamplingParams(
            temperature=TEMPERATURES[number % len(TEMPERATURES)],
            seed=plan.seed * 1_000_003 + number,
            max_tokens=plan.max_tokens,
            detokenize=False,
        )
        for number in range(first, first + len(prompts))
    ]
    outputs = llm.generate(prompts, params, progress=False)
    kept = [output for output in outputs if output.finish_reason != "error"]
    if not kept:
        raise ConfigError(f"the target continued none of {len(outputs)} prompts: {outputs[0].error}")
    prompt_lens = [len(output.prompt_token_ids) for output in kept]
    return Samples.pack([output.prompt_token_ids + output.token_ids for output in kept], prompt_lens)
