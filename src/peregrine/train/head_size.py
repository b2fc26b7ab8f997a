"""Memory and disk that training a head takes, estimated before it starts; what cannot fit is refused."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from peregrine.errors import ConfigError
from peregrine.hardware import read_gpu, read_memory
from peregrine.models.config import ModelConfig
from peregrine.models.loading import num_weights
from peregrine.train.options import HeadOptions, SamplingPlan
from peregrine.train.samples import PAGE_SIZE

SHARE = 0.9  # of the free memory or disk that a run may take
SAMPLE_BYTES = 4  # per token on disk
STATE_BYTES = 16  # per parameter in training: weight, gradient and two moments
ACTIVATIONS = 40  # values of hidden size kept per token and step
SCORE_COPIES = 3  # float32 copies of a score that training keeps


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes and tokens of a run."""

    sampled_tokens: int
    trained_tokens: int | None  # None: as many as the time allows
    disk_bytes: int
    sampling_bytes: int  # device memory
    training_bytes: int  # device memory

    def __str__(self) -> str:
        trained = "as many as the time allows" if self.trained_tokens is None else f"{self.trained_tokens:,}"
        return (
            f"tokens to sample: {self.sampled_tokens:,}; tokens to train on, repeats counted: {trained}\n"
            f"disk: {shown(self.disk_bytes)}; device memory: {shown(self.sampling_bytes)} to sample, "
            f"{shown(self.training_bytes)} to train"
        )


def estimate(
    config: ModelConfig, plan: SamplingPlan, options: HeadOptions, draft_vocab: int, dtype: torch.dtype
) -> Size:
    """The size of a run whose rows are as long as the longest possible sample."""
    row_len = plan.max_len
    places = options.batch_rows * row_len
    hidden, inner = config.hidden_size, config.intermediate_size
    heads_size = (config.num_heads + config.num_kv_heads) * config.head_dim
    target = num_weights(config) * dtype.itemsize
    head = hidden * (3 * heads_size + 3 * inner + 3 * hidden + draft_vocab)
    slots = plan.rows * (-(-row_len // PAGE_SIZE) + 1) * PAGE_SIZE
    cache = slots * config.num_layers * config.kv_shape.num_entries * dtype.itemsize
    logits = plan.rows * config.vocab_size * 4 * 6  # logits, noise and intermediates of the noise
    scores = options.batch_rows * config.num_heads * row_len**2 * 4
    per_step = places * (draft_vocab * 4 * SCORE_COPIES + hidden * 4 * ACTIVATIONS) + scores * SCORE_COPIES
    labels = places * (config.vocab_size * 4 * 2 + draft_vocab * 4)
    return Size(
        sampled_tokens=plan.tokens,
        trained_tokens=None if options.steps is None else options.steps * places,
        disk_bytes=plan.tokens * SAMPLE_BYTES * 2 + head * (STATE_BYTES + 2 + 12),
        sampling_bytes=target + cache + logits,
        training_bytes=target + head * STATE_BYTES + options.unroll * per_step + labels,
    )


def refuse_oversize(size: Size, device: torch.device, folder: Path) -> None:
    """Refuse a run that does not fit on the disk or in the device's memory."""
    free_disk = shutil.disk_usage(folder).free
    if size.disk_bytes > SHARE * free_disk:
        raise ConfigError(
            f"tokens={size.sampled_tokens}: needs {shown(size.disk_bytes)} of disk, {folder} has "
            f"{shown(free_disk)} free; ask for fewer tokens or another folder"
        )
    free = read_memory()[1] if device.type == "cpu" else read_gpu(device.index or 0).memory_free_bytes
    for what, needed, remedy in (
        ("sampling", size.sampling_bytes, "lower rows or max_tokens"),
        ("training", size.training_bytes, "lower batch, max_tokens, unroll or draft_vocab"),
    ):
        if free is not None and needed > SHARE * free:
            raise ConfigError(f"{what} needs about {shown(needed)}, {device} has {shown(free)} free; {remedy}")


def shown(count: int) -> str:
    """Bytes with a unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
