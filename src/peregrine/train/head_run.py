"""A run that trains a draft head of any kind."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import BlockHead, Eagle3Head, save_head
from peregrine.train.block import block_loss
from peregrine.train.head import Labels, Outcome, head_loss, read_target
from peregrine.train.options import HeadOptions
from peregrine.train.rows import Rows, SampleRows
from peregrine.train.run import Run

TABLES = frozenset({"head.weight", "markov.embedding", "markov.out.weight"})  # matrices whose rows stand for tokens


class HeadRun(Run[Rows]):
    """A run that trains a head; each save also writes the head in bfloat16 into `out`."""

    options: HeadOptions

    def __init__(
        self,
        head: Eagle3Head | BlockHead,
        target: Decoder,
        options: HeadOptions,
        rows: SampleRows,
        folder: Path,
        out: Path,
    ) -> None:
        super().__init__(head, options, folder, TABLES & {name for name, _ in head.named_parameters()})
        self.head, self.target, self.rows, self.out = head, target, rows, out

    @property
    def tokens_per_step(self) -> int:
        return self.options.batch_rows * self.rows.row_len

    def batches(self) -> Iterator[Rows]:
        return self.rows.batches(self.options.batch_rows, self.options.seed, skip=self.step)

    def loss(self, batch: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        rows = batch.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            outcome = self._outcome(rows, read_target(self.target, self.head, rows))
        return outcome.loss, {"losses": outcome.losses, "agreement": outcome.agreement}

    def _outcome(self, rows: Rows, labels: Labels) -> Outcome:
        options = self.options
        if isinstance(self.head, Eagle3Head):
            return head_loss(self.head, rows, labels, options.unroll, options.step_decay)
        # Drawn by the step's number: a resumed run draws the same blocks.
        generator = torch.Generator().manual_seed(options.seed * 1_000_003 + self.step)
        return block_loss(self.head, rows, labels, options.blocks, options.step_decay, generator)

    def save(self) -> None:
        super().save()
        save_head(self.head, self.out, torch.bfloat16)
