"""A run that trains a draft head of any kind."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from peregrine.models.decoder import Decoder
from peregrine.models.draft_heads import BlockHead, Eagle3Head, save_head
from peregrine.train.block import block_loss, draw_starts
from peregrine.train.head import Labels, head_loss, read_target
from peregrine.train.options import HeadOptions
from peregrine.train.rows import Rows, SampleRows
from peregrine.train.run import Compiled, Run

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
        self.outcome = Compiled(self._compute, self.device)

    @property
    def tokens_per_step(self) -> int:
        return self.options.batch_rows * self.rows.row_len

    def batches(self) -> Iterator[Rows]:
        return self.rows.batches(self.options.batch_rows, self.options.seed, skip=self.step)

    def loss(self, batch: Rows) -> tuple[Tensor, dict[str, Tensor]]:
        rows = batch.to(self.device)
        with self._autocast():
            labels = read_target(self.target, self.head, rows)
        starts: tuple[Tensor, ...] = ()
        if isinstance(self.head, BlockHead):
            # Drawn by the step's number: a resumed run draws the same blocks.
            generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + self.step)
            starts = draw_starts(rows, self.options.blocks, generator)
        given = rows.tokens, rows.documents, rows.positions, rows.learn
        loss, losses, agreement = self.outcome(*given, labels.tapped, labels.probabilities, labels.best, *starts)
        return loss, {"losses": losses, "agreement": agreement}

    def _compute(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The fields of an `Outcome`, from those of `Rows` and `Labels` and, for a block head, where blocks start."""
        rows, labels = Rows(*tensors[:4]), Labels(*tensors[4:7])
        head, options = self.head, self.options
        with self._autocast():
            if isinstance(head, Eagle3Head):
                outcome = head_loss(head, rows, labels, options.unroll, options.step_decay)
            else:
                starts, allowed = tensors[7:]
                outcome = block_loss(head, rows, labels, starts, allowed, options.step_decay)
        return outcome.loss, outcome.losses, outcome.agreement

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def save(self) -> None:
        super().save()
        save_head(self.head, self.out, torch.bfloat16)
