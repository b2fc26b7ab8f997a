"""Pretrains a decoder on rows of text: the engine's own module with dense attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from peregrine.models.config import ModelConfig
from peregrine.models.decoder import Decoder
from peregrine.models.layers import draw_weights
from peregrine.train.attend import dense_attend
from peregrine.train.merlin.token_rows import TokenRows, TokenShard
from peregrine.train.options import RunOptions
from peregrine.train.run import Compiled, Run

MAX_EVAL_ROWS = 64


@dataclass(frozen=True, slots=True)
class PretrainOptions(RunOptions):
    """Options of a pretraining run; the defaults are merlin's recipe."""

    batch_rows: int = 96
    steps: int | None = 3600
    rate: float = 3e-3
    warmup_steps: int = 100
    decay_share: float = 0.85
    weight_decay: float = 0.1
    row_len: int = 1024
    eval_every: int = 400
    epoch_tokens: int = 20_000_000


class Pretraining(Run[Tensor]):
    """A run that trains a decoder from random weights, with the held-out loss in its log."""

    options: PretrainOptions

    def __init__(
        self,
        config: ModelConfig,
        options: PretrainOptions,
        folder: Path,
        device: torch.device,
        train: Sequence[TokenShard],
        held_out: Sequence[TokenShard],
    ) -> None:
        self.decoder = fresh_decoder(config, options.seed, device)
        super().__init__(self.decoder, options, folder, frozenset({"embedding"}))
        self.rows = TokenRows(train, options.row_len + 1, options.seed, options.epoch_tokens)
        self.held_out = held_out
        decoder = self.decoder
        self._loss = Compiled(lambda rows: next_token_loss(decoder, rows), device)

    @property
    def tokens_per_step(self) -> int:
        return self.options.batch_rows * self.options.row_len

    def batches(self) -> Iterator[Tensor]:
        return self.rows.batches(self.options.batch_rows, skip=self.step)

    def loss(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        rows = batch.pin_memory() if self.device.type == "cuda" else batch
        rows = rows.to(self.device, non_blocking=True)
        return self._loss(rows), {}

    def after_step(self, last: bool) -> None:
        if self.step % self.options.eval_every == 0 or last:
            losses = self.evaluate()
            self.log("held_out", {"step": self.step, "losses": losses})
            shown = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
            tqdm.write(f"step {self.step} held out: {shown}")

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """The held-out loss of each source, and of the mixture under "all"."""
        losses, row_len = {}, self.options.row_len
        num_rows = min(self.options.batch_rows, MAX_EVAL_ROWS)
        for shard in self.held_out:
            epoch_tokens = max(len(shard.documents.tokens), 2 * num_rows * row_len)
            batch = next(TokenRows([shard], row_len + 1, 0, epoch_tokens).batches(num_rows))
            losses[shard.name] = next_token_loss(self.decoder, batch.to(self.device)).item()
        total = sum(shard.share for shard in self.held_out)
        losses["all"] = sum(losses[shard.name] * shard.share for shard in self.held_out) / total
        return losses


def next_token_loss(decoder: Decoder, rows: Tensor) -> Tensor:
    """Mean cross-entropy of each token of rows [B, S + 1] given those before it in its row."""
    count, length = rows.shape[0], rows.shape[1] - 1
    tokens, targets = rows[:, :-1].flatten(), rows[:, 1:].flatten()  # [B * S]
    positions = torch.arange(length, device=rows.device).repeat(count)
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
        hidden, _ = decoder(tokens, positions, dense_attend(decoder.layer_attention(), count))
        logits = decoder.logits(hidden)  # [B * S, V]
    return F.cross_entropy(logits.float(), targets)


def fresh_decoder(config: ModelConfig, seed: int, device: torch.device) -> Decoder:
    """A decoder with weights drawn from the seed, the same on every device."""
    decoder = Decoder(config)
    draw_weights(decoder, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            # Outputs added to the residual stream start smaller the deeper the model is.
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                parameter.mul_((2 * config.num_layers) ** -0.5)
    return decoder.to(device)
