"""Samples side by side in rows of one length, for training; each keeps its own positions and sees itself alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peregrine.errors import ConfigError
from peregrine.train.sampling import Samples

OPEN_ROWS = 64  # rows that are still being filled; more waste less and search longer
ROUNDED_TO = 64
PAD = -1  # the document of a place that holds none


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of tokens, B of them, S long."""

    tokens: Tensor  # [B, S] i64
    documents: Tensor  # [B, S] i64, one number per sample in its row; PAD where there is none
    positions: Tensor  # [B, S] i64, from 0 in each sample
    learn: Tensor  # [B, S] bool: a drafter may stand here, at or after the prompt's last token

    def to(self, device: torch.device) -> "Rows":
        """The same rows on a device."""
        fields = (self.tokens, self.documents, self.positions, self.learn)
        if device.type == "cuda":
            fields = tuple(x.pin_memory() for x in fields)  # type: ignore[assignment]
        return Rows(*(x.to(device, non_blocking=True) for x in fields))


class SampleRows:
    """All samples packed into rows, and batches of them in an order fixed by the seed."""

    def __init__(self, samples: Samples, row_len: int) -> None:
        """A sample longer than a row keeps its beginning."""
        self.samples, self.row_len = samples, row_len
        self.lens = np.minimum(np.diff(samples.starts), row_len)  # [n]
        self.bins = _pack(self.lens, row_len)

    def batches(self, rows: int, seed: int, skip: int = 0) -> Iterator[Rows]:
        """Batches of `rows` rows without end, from batch number `skip` on."""
        if len(self.bins) < rows:
            raise ConfigError(
                f"batch={rows}: the samples fill only {len(self.bins)} rows of {self.row_len} tokens; "
                "lower batch or sample more tokens"
            )
        per_epoch = len(self.bins) // rows
        number = skip
        while True:
            epoch, first = divmod(number, per_epoch)
            order = np.random.default_rng((seed, epoch)).permutation(len(self.bins))
            for batch in range(first, per_epoch):
                yield self._rows(order[batch * rows : (batch + 1) * rows])
                number += 1

    def _rows(self, chosen: NDArray[np.int64]) -> Rows:
        shape = (len(chosen), self.row_len)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        documents, learn = np.full(shape, PAD, np.int64), np.zeros(shape, np.bool_)
        for row, number in enumerate(chosen):
            place = 0
            for document, sample in enumerate(self.bins[number]):
                length, start = int(self.lens[sample]), int(self.samples.starts[sample])
                here = slice(place, place + length)
                tokens[row, here] = self.samples.tokens[start : start + length]
                documents[row, here] = document
                positions[row, here] = np.arange(length)
                learn[row, place + int(self.samples.prompt_lens[sample]) - 1 : place + length] = True
                place += length
        return Rows(*(torch.from_numpy(x) for x in (tokens, documents, positions, learn)))


def fitting_row_len(samples: Samples) -> int:
    """The longest sample's length, rounded up."""
    return -(-int(np.diff(samples.starts).max()) // ROUNDED_TO) * ROUNDED_TO


def _pack(lens: NDArray[np.int64], row_len: int) -> list[list[int]]:
    """Which samples share a row: each goes into the fullest open row that has room for it."""
    full: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []  # (room, samples)
    for sample, length in enumerate(lens.tolist()):
        fitting = [i for i, (room, _) in enumerate(open_rows) if room >= length]
        if fitting:
            best = min(fitting, key=lambda i: open_rows[i][0])
            room, members = open_rows.pop(best)
            open_rows.append((room - length, [*members, sample]))
            continue
        if len(open_rows) == OPEN_ROWS:
            fullest = min(range(len(open_rows)), key=lambda i: open_rows[i][0])
            full.append(open_rows.pop(fullest)[1])
        open_rows.append((row_len - length, [sample]))
    return full + [members for _, members in open_rows]
