"""Samples packed into rows of one length; each keeps its own positions and attends to itself alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peregrine.errors import ConfigError
from peregrine.train.samples import Samples

OPEN_ROWS = 64  # rows that are filled at once; more rows waste less space and take longer to search
ROUNDED_TO = 64
PAD = -1  # the document of an empty place


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch of B rows of S tokens."""

    tokens: Tensor  # [B, S] i64
    documents: Tensor  # [B, S] i64, the sample's number in its row; PAD where there is none
    positions: Tensor  # [B, S] i64, from 0 in each sample
    learn: Tensor  # [B, S] bool: from the prompt's last token on, where a drafter may start

    def to(self, device: torch.device) -> "Rows":
        """These rows on a device."""
        fields = [self.tokens, self.documents, self.positions, self.learn]
        if device.type == "cuda":
            fields = [field.pin_memory() for field in fields]
        return Rows(*(field.to(device, non_blocking=True) for field in fields))


class SampleRows:
    """All samples packed into rows, and batches of rows in an order fixed by the seed."""

    def __init__(self, samples: Samples, row_len: int) -> None:
        """A sample longer than a row is cut at its end."""
        self.samples, self.row_len = samples, row_len
        self.lens = np.minimum(samples.lens, row_len)  # [n]
        self.bins = _pack(self.lens, row_len)

    def batches(self, num_rows: int, seed: int, skip: int = 0) -> Iterator[Rows]:
        """Endless batches of `num_rows` rows, from batch number `skip` on."""
        if len(self.bins) < num_rows:
            raise ConfigError(
                f"batch={num_rows}: the samples fill only {len(self.bins)} rows of {self.row_len} tokens; "
                "lower batch or sample more tokens"
            )
        per_epoch = len(self.bins) // num_rows
        epoch, first = divmod(skip, per_epoch)
        while True:
            order = np.random.default_rng((seed, epoch)).permutation(len(self.bins))
            for batch in range(first, per_epoch):
                yield self.rows(order[batch * num_rows : (batch + 1) * num_rows])
            epoch, first = epoch + 1, 0

    def rows(self, chosen: NDArray[np.int64]) -> Rows:
        """The rows with these numbers."""
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
    return -(-int(samples.lens.max()) // ROUNDED_TO) * ROUNDED_TO


def _pack(lens: NDArray[np.int64], row_len: int) -> list[list[int]]:
    """The samples of each row, by best fit: each sample goes into the fullest open row that has room for it."""
    full: list[list[int]] = []
    open_rows: list[tuple[int, list[int]]] = []  # (room, samples)
    for sample, length in enumerate(lens.tolist()):
        fitting = [i for i, (room, _) in enumerate(open_rows) if room >= length]
        if fitting:
            room, members = open_rows.pop(min(fitting, key=lambda i: open_rows[i][0]))
            open_rows.append((room - length, [*members, sample]))
            continue
        if len(open_rows) == OPEN_ROWS:
            fullest = min(range(OPEN_ROWS), key=lambda i: open_rows[i][0])
            full.append(open_rows.pop(fullest)[1])
        open_rows.append((row_len - length, [sample]))
    return full + [members for _, members in open_rows]
