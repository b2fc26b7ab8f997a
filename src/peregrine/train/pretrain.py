"""Trains a decoder on rows of text: the engine's own model code with dense attention.

A run is a function of (data, options): rows come by number, the rate by step, so a run that was stopped and
resumed ends with the weights of one that was not.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from peregrine.log import logger
from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.layers import draw_weights
from peregrine.train.checkpoint import Saved, load_state, log_line, same_options, save_state
from peregrine.train.dense_attend import dense_attend
from peregrine.train.optimizer import Curve, Optimizers
from peregrine.train.packing import RowStream, TokenShard

MAX_GRAD_NORM = 1.0
UNKNOWN_STEPS = 10**9
# With a time box the speed of these steps decides how many there will be; the first ones compile.
WARM_STEPS, MEASURED_STEPS = 10, 40
LossOf = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is started with, by default merlin's recipe; a resumed run must be asked for with the same."""

    row_len: int = 1024
    batch_rows: int = 96
    steps: int | None = 3600  # None: as many as `minutes` allows
    minutes: float = 0.0
    rate: float = 3e-3
    warmup_steps: int = 100
    decay_share: float = 0.85
    weight_decay: float = 0.1
    seed: int = 0
    eval_every: int = 400
    save_every: int = 500
    epoch_tokens: int = 20_000_000


class Run:
    """One training run and where it stands."""

    def __init__(self, config: ModelConfig, options: Options, folder: Path, device: torch.device) -> None:
        """Takes up the run in the folder where it stopped, or starts it."""
        self.options, self.folder, self.device = options, folder, device
        self.decoder = fresh_decoder(config, options.seed, device)
        self.optimizers = Optimizers(self.decoder, options.weight_decay, frozenset({"embedding"}))
        self.step, self.total_steps = 0, options.steps or UNKNOWN_STEPS
        saved = load_state(folder)
        if saved is not None:
            same_options(saved.facts, asdict(options), folder)
            self.step, self.total_steps = saved.facts["step"], saved.facts["total_steps"]
            self.decoder.load_state_dict(saved.model, strict=False, assign=False)
            self.optimizers.restore({name: tensor.to(device) for name, tensor in saved.optimizer.items()})
            logger.info("resumed %s at step %d of %d", folder, self.step, self.total_steps)

    def save(self) -> None:
        """Puts the run's state on disk."""
        facts = {**asdict(self.options), "step": self.step, "total_steps": self.total_steps}
        save_state(self.folder, Saved(facts, trained_tensors(self.decoder), self.optimizers.tensors()))

    def curve(self) -> Curve:
        """The learning-rate curve as far as it is known."""
        options = self.options
        return Curve(options.rate, options.warmup_steps, self.total_steps, options.decay_share)


def pretrain(run: Run, train: Sequence[TokenShard], held_out: Sequence[TokenShard]) -> Decoder:
    """Trains until the last step and returns the decoder; log and states are in the run's folder."""
    options, began = run.options, time.monotonic()
    run.folder.mkdir(parents=True, exist_ok=True)
    stream = RowStream(train, options.row_len + 1, options.seed, options.epoch_tokens)
    batches = stream.batches(options.batch_rows, skip=run.step)
    loss_of, tokens_per_step = compiled_loss(run.decoder), options.batch_rows * options.row_len
    progress = tqdm(initial=run.step * tokens_per_step, unit=" tokens", unit_scale=True, mininterval=5.0)
    clock = Clock(options.minutes, began)
    while run.step < run.total_steps:
        rate = run.curve().at(run.step)
        loss, norm = train_step(run, loss_of, next(batches), rate)
        run.step += 1
        if run.total_steps == UNKNOWN_STEPS:
            run.total_steps = clock.total_steps(run.step, run.device) or UNKNOWN_STEPS
        else:
            progress.total = run.total_steps * tokens_per_step
        progress.update(tokens_per_step)
        last = run.step == run.total_steps
        if run.step % 10 == 0 or last:
            seconds = time.monotonic() - began
            facts = {"loss": loss.item(), "grad_norm": norm.item(), "rate": rate, "seconds": seconds}
            facts |= {"step": run.step, "tokens": run.step * tokens_per_step}
            log_line(run.folder, {"kind": "train", **facts})
            progress.set_postfix(loss=f"{facts['loss']:.3f}", step=run.step, refresh=False)
        if run.step % options.eval_every == 0 or last:
            losses = evaluate(run.decoder, held_out, options)
            log_line(run.folder, {"kind": "held_out", "step": run.step, "losses": losses})
            shown = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
            progress.write(f"step {run.step} held out: {shown}")
        if run.step % options.save_every == 0 or last:
            run.save()
    progress.close()
    return run.decoder


def train_step(run: Run, loss_of: LossOf, rows: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """(loss, gradient norm before clipping) of one update on rows [B, S + 1]."""
    rows = rows.pin_memory() if run.device.type == "cuda" else rows
    loss = loss_of(rows.to(run.device, non_blocking=True))
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(run.decoder.parameters(), MAX_GRAD_NORM)
    run.optimizers.step(rate)
    return loss.detach(), norm


def next_token_loss(decoder: Decoder, rows: Tensor) -> Tensor:
    """Mean cross-entropy of each token of rows [B, S + 1] given those before it in its row."""
    count, length = rows.shape[0], rows.shape[1] - 1
    tokens, targets = rows[:, :-1].flatten(), rows[:, 1:].flatten()  # [B * S]
    positions = torch.arange(length, device=rows.device).repeat(count)
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
        hidden, _ = decoder(tokens, positions, dense_attend(decoder.layer_attention(), count))
        logits = decoder.logits(hidden)  # [B * S, V]
    return F.cross_entropy(logits.float(), targets)


def compiled_loss(decoder: Decoder) -> LossOf:
    """`next_token_loss` of this decoder, compiled on a GPU; should that fail, it says so and runs."""

    def eager(rows: Tensor) -> Tensor:
        return next_token_loss(decoder, rows)

    if decoder.embedding.device.type != "cuda":
        return eager
    compiled: LossOf = torch.compile(eager, dynamic=False)
    working = [compiled]

    def loss_of(rows: Tensor) -> Tensor:
        try:
            return working[0](rows)
        except Exception as error:
            if working[0] is eager:
                raise
            logger.warning("torch.compile failed, training goes on uncompiled: %s", error)
            working[0] = eager
            return eager(rows)

    return loss_of


@torch.no_grad()
def evaluate(decoder: Decoder, shards: Sequence[TokenShard], options: Options) -> dict[str, float]:
    """Held-out loss of each source, and of the mixture under "all"."""
    losses, rows = {}, min(options.batch_rows, 64)
    for shard in shards:
        epoch_tokens = max(len(shard.tokens), 2 * rows * options.row_len)
        stream = RowStream([shard], options.row_len + 1, 0, epoch_tokens)
        batch = next(stream.batches(rows)).to(decoder.embedding.device)
        losses[shard.name] = next_token_loss(decoder, batch).item()
    total = sum(shard.share for shard in shards)
    losses["all"] = sum(losses[shard.name] * shard.share for shard in shards) / total
    return losses


def fresh_decoder(config: ModelConfig, seed: int, device: torch.device) -> Decoder:
    """A decoder with weights drawn from the seed, the same on every device."""
    decoder = Decoder(config)
    draw_weights(decoder, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            # What is added to the residual stream starts small, and smaller the deeper the model.
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                parameter.mul_((2 * config.num_layers) ** -0.5)
    return decoder.to(device)


def trained_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Every parameter once; a tied head is the embedding."""
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


class Clock:
    """Turns a time box into a number of steps, from the speed of the first ones."""

    def __init__(self, minutes: float, began: float) -> None:
        self.ends, self.mark = began + 60.0 * minutes, began

    def total_steps(self, step: int, device: torch.device) -> int | None:
        """The number of steps that fits, once it can be told."""
        if step not in (WARM_STEPS, WARM_STEPS + MEASURED_STEPS):
            return None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.monotonic()
        if step == WARM_STEPS:
            self.mark = now
            return None
        return step + max(1, int((self.ends - now) * MEASURED_STEPS / (now - self.mark)))
