"""What training a head will take, said before it starts; refused with the numbers where it cannot fit."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from peregrine.errors import ConfigError
from peregrine.hardware import read_gpu, read_memory
from peregrine.models.config import ModelConfig
from peregrine.models.loading import num_weights
from peregrine.train.head_run import HeadOptions
from peregrine.train.sampling import PAGE_SIZE, SamplingPlan

SHARE = 0.9  # of what is free may be asked for
SAMPLE_BYTES = 4  # of one token on disk
STATE_BYTES = 16  # of one parameter while it trains: itself, its gradient and two moments
ACTIVATIONS = 40  # values of hidden size kept for one token and step
SCORE_COPIES = 3  # of a float32 score that training keeps


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes and tokens of a run."""

    sampled_tokens: int
    trained_tokens: int | None  # None: as many as the time allows
    disk_bytes: int
    sampling_bytes: int  # memory of the device while sampling
    training_bytes: int  # and while training

    def lines(self) -> list[str]:
        """The estimate in words."""
        trained = "as many as the time allows" if self.trained_tokens is None else f"{self.trained_tokens:,}"
        return [
            f"tokens to sample: {self.sampled_tokens:,}; tokens to train on, repeats counted: {trained}",
            f"disk: {shown(self.disk_bytes)}; device memory: {shown(self.sampling_bytes)} to sample, "
            f"{shown(self.training_bytes)} to train",
        ]


def estimate(
    config: ModelConfig, plan: SamplingPlan, options: HeadOptions, draft_vocab: int, dtype: torch.dtype
) -> Size:
    """The size of a run on rows as long as the longest sample can be."""
    row_len = plan.longest_prompt + plan.max_tokens
    places = options.batch_rows * row_len
    hidden, inner = config.hidden_size, config.intermediate_size
    heads_size = (config.num_heads + config.num_kv_heads) * config.head_dim
    layer = hidden * (2 * heads_size + 3 * inner)
    target = num_weights(config) * dtype.itemsize
    head = layer + hidden * (heads_size + 3 * hidden + draft_vocab)
    pages = plan.rows * (-(-row_len // PAGE_SIZE) + 1) * PAGE_SIZE
    cache = pages * config.num_layers * config.kv_shape.num_entries * dtype.itemsize
    chosen = plan.rows * config.vocab_size * 4 * 6  # logits, noise and what makes it
    scores = options.batch_rows * config.num_heads * row_len**2 * 4
    per_step = places * (draft_vocab * 4 * SCORE_COPIES + hidden * 4 * ACTIVATIONS) + scores * SCORE_COPIES
    lesson = places * (config.vocab_size * 4 * 2 + draft_vocab * 4)
    return Size(
        sampled_tokens=plan.tokens,
        trained_tokens=None if options.steps is None else options.steps * places,
        disk_bytes=plan.tokens * SAMPLE_BYTES * 2 + head * (STATE_BYTES + 2 + 12),
        sampling_bytes=target + cache + chosen,
        training_bytes=target + head * STATE_BYTES + options.unroll * per_step + lesson,
    )


def refuse_oversize(size: Size, device: torch.device, folder: Path) -> None:
    """Refuses a run that disk or memory cannot hold."""
    free_disk = shutil.disk_usage(folder).free
    if size.disk_bytes > SHARE * free_disk:
        raise ConfigError(
            f"tokens={size.sampled_tokens}: needs {shown(size.disk_bytes)} of disk, {folder} has "
            f"{shown(free_disk)} free; ask for fewer tokens or another folder"
        )
    free = read_memory()[1] if device.type == "cpu" else read_gpu(device.index or 0).memory_free_bytes
    if free is None:
        return
    for what, wanted, remedy in (
        ("sampling", size.sampling_bytes, "lower rows or max_tokens"),
        ("training", size.training_bytes, "lower batch, max_tokens, unroll or draft_vocab"),
    ):
        if wanted > SHARE * free:
            raise ConfigError(f"{what} needs about {shown(wanted)}, {device} has {shown(free)} free; {remedy}")


def shown(count: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
