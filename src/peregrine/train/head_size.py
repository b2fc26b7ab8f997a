"""Memory and disk that training a head takes, estimated before it starts; what cannot fit is refused."""

import shutil

import torch

from peregrine.errors import ConfigError
from peregrine.hardware import read_gpu, read_memory
from peregrine.models.config import ModelConfig
from peregrine.models.loading import num_weights
from peregrine.train.options import EAGLE3, STAGES, HeadOrder
from peregrine.train.samples import PAGE_SIZE

SHARE = 0.9  # of the free memory or disk that a run may take
SAMPLE_BYTES = 4  # per token on disk
STATE_BYTES = 16  # per parameter in training: weight, gradient and two moments
ACTIVATIONS = 40  # values of hidden size kept per token and step
SCORE_COPIES = 3  # float32 copies of a score that training keeps


def check_size(order: HeadOrder, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """The size of the run in words, for rows as long as the longest sample.

    A stage that is asked for and does not fit is refused.
    """
    plan, options = order.plan, order.options
    disk, sampling, training = estimate(order, config, dtype)
    free_disk = shutil.disk_usage(order.out).free
    if disk > SHARE * free_disk:
        raise ConfigError(
            f"tokens={plan.tokens}: needs {shown(disk)} of disk, {order.out} has {shown(free_disk)} free; "
            "ask for fewer tokens or another folder"
        )
    free = read_memory()[1] if device.type == "cpu" else read_gpu(device.index or 0).memory_free_bytes
    stages = [
        ("sampling", sampling, "lower rows or max_tokens"),
        ("training", training, "lower batch, max_tokens, unroll or draft_vocab"),
    ]
    for what, needed, remedy in stages[: len(stages) if order.stop_after is None else STAGES.index(order.stop_after)]:
        if free is not None and needed > SHARE * free:
            raise ConfigError(f"{what} needs about {shown(needed)}, {device} has {shown(free)} free; {remedy}")
    trained = (
        f"{options.steps * options.batch_rows * plan.max_len:,}" if options.steps else "as many as the time allows"
    )
    return (
        f"tokens to sample: {plan.tokens:,}; tokens to train on, repeats counted: {trained}\n"
        f"disk: {shown(disk)}; device memory: {shown(sampling)} to sample, {shown(training)} to train"
    )


def estimate(order: HeadOrder, config: ModelConfig, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes on disk, and of device memory for sampling and for training."""
    plan, options, hidden = order.plan, order.options, config.hidden_size
    draft_vocab = int(order.draft_vocab) if order.draft_vocab.isdigit() else config.vocab_size
    target = num_weights(config) * dtype.itemsize
    heads_size = (config.num_heads + config.num_kv_heads) * config.head_dim
    head = hidden * (3 * heads_size + 3 * (order.mlp or config.intermediate_size) + 3 * hidden + draft_vocab)
    slots = plan.rows * (-(-plan.max_len // PAGE_SIZE) + 1) * PAGE_SIZE
    cache = slots * config.num_layers * config.kv_shape.num_entries * dtype.itemsize
    logits = plan.rows * config.vocab_size * 4 * 6  # logits, noise and intermediates of the noise
    places = options.batch_rows * plan.max_len
    scores = options.batch_rows * config.num_heads * plan.max_len**2 * 4
    per_step = places * (draft_vocab * 4 * SCORE_COPIES + hidden * 4 * ACTIVATIONS) + scores * SCORE_COPIES
    labels = places * (config.vocab_size * 4 * 2 + draft_vocab * 4)
    if order.kind != EAGLE3:
        tokens = options.batch_rows * options.blocks * (options.unroll + 1)  # of all blocks of an update
        head = head * order.layers + 2 * order.markov_rank * config.vocab_size
        seen = tokens * config.num_heads * (plan.max_len + options.blocks * (options.unroll + 1))
        blocks = tokens * (draft_vocab * 4 * 2 * SCORE_COPIES + hidden * 4 * ACTIVATIONS * order.layers) + seen * 4
        training = target + head * STATE_BYTES + blocks + labels
    else:
        training = target + head * STATE_BYTES + options.unroll * per_step + labels
    return plan.tokens * SAMPLE_BYTES * 2 + head * (STATE_BYTES + 2 + 12), target + cache + logits, training


def shown(count: int) -> str:
    """Bytes with a unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
