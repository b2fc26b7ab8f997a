"""Rows of tokens for pretraining, from a mixture of sources; a function of (tokens, seed, row number).

A row starts with the start of a document and is filled with the documents that follow. A document that does not fit
starts the next row again, so every document is seen whole. Any row can be found again from its number, which makes a
resumed run see the same rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from peregrine.errors import ConfigError
from peregrine.train.documents import END_OF_TEXT, Source, held_out, read_source
from peregrine.train.samples import Samples

BATCH_DOCUMENTS = 4096
TRAIN, HELD_OUT = "train", "held_out"
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenShard:
    """A source's documents as tokens, each ended by the end-of-text token."""

    name: str
    share: float
    documents: Samples


def encode_source(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the source's training and held-out tokens into the folder, unless they are there."""
    if shard_path(source, folder, HELD_OUT).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    splits: dict[str, list[NDArray[np.int32]]] = {TRAIN: [], HELD_OUT: []}
    documents = iter(tqdm(read_source(source), desc=f"encode {source.name}", unit=" documents", mininterval=1.0))
    while batch := list(islice(documents, BATCH_DOCUMENTS)):
        encodings = tokenizer.encode_batch_fast([document.text + END_OF_TEXT for document in batch])
        for document, encoding in zip(batch, encodings, strict=True):
            splits[HELD_OUT if held_out(document.key) else TRAIN].append(np.array(encoding.ids, dtype=np.int32))
    for split, rows in splits.items():
        if not rows:
            raise ConfigError(f"data: {source.name} has no {split} document; give more text")
        Samples.pack(rows, [0] * len(rows)).save(shard_path(source, folder, split))


def load_shard(source: Source, folder: Path, split: str) -> TokenShard:
    """A source's tokens of one split."""
    return TokenShard(source.name, source.share, Samples.load(shard_path(source, folder, split)))


def shard_path(source: Source, folder: Path, split: str) -> Path:
    """The file with a source's tokens of one split."""
    return folder / f"{source.name}.{split}.npz"


class TokenRows:
    """Endless rows of `row_len` tokens from a mixture of shards, in an order fixed by the seed."""

    def __init__(self, shards: Sequence[TokenShard], row_len: int, seed: int, epoch_tokens: int) -> None:
        self.shards, self.row_len, self.seed = tuple(shards), row_len, seed
        # Documents of each shard in an epoch: the same in every epoch, so that an epoch's first one is known.
        total = sum(shard.share for shard in shards)
        self.epoch_documents = [
            max(1, round(epoch_tokens * s.share / total * len(s.documents.lens) / len(s.documents.tokens)))
            for s in shards
        ]

    def batches(self, num_rows: int, skip: int = 0) -> Iterator[Tensor]:
        """Batches [num_rows, row_len] i64, from batch number `skip` on."""
        rows = self._rows(skip * num_rows)
        while True:
            yield torch.from_numpy(np.stack(list(islice(rows, num_rows))).astype(np.int64))

    def _rows(self, skip: int) -> Iterator[NDArray[np.int32]]:
        epoch = 0
        while True:
            shard_of, document_of = self.order(epoch)
            firsts = self.first_documents(shard_of, document_of)
            for first in firsts[skip:]:
                yield self._row(shard_of, document_of, first)
            skip = max(0, skip - len(firsts))
            epoch += 1

    def order(self, epoch: int) -> tuple[Numbers, Numbers]:
        """The epoch's documents, sources evenly interleaved: (shard, document) [D] each."""
        shards, documents, times = [], [], []
        for index, (shard, count) in enumerate(zip(self.shards, self.epoch_documents, strict=True)):
            size = len(shard.documents.lens)
            places = np.arange(epoch * count, (epoch + 1) * count)
            passes = places // size  # each pass over the shard has a permutation of its own
            chosen = np.empty(count, dtype=np.int64)
            for number in range(int(passes[0]), int(passes[-1]) + 1):
                generator = np.random.default_rng((self.seed, index, number))
                now = passes == number
                chosen[now] = generator.permutation(size)[places[now] % size]
            jitter = np.random.default_rng((self.seed, index, epoch, 1)).random(count)
            shards.append(np.full(count, index))
            documents.append(chosen)
            times.append((np.arange(count) + jitter) / count)
        order = np.argsort(np.concatenate(times), kind="stable")
        return np.concatenate(shards)[order], np.concatenate(documents)[order]

    def first_documents(self, shard_of: Numbers, document_of: Numbers) -> list[int]:
        """The index in the order of each full row's first document."""
        lens = np.empty(len(shard_of), dtype=np.int64)
        for index, shard in enumerate(self.shards):
            mine = shard_of == index
            lens[mine] = shard.documents.lens[document_of[mine]]
        ends = np.cumsum(lens)  # [D]
        firsts, first, before = [], 0, 0
        while before + self.row_len <= ends[-1]:
            firsts.append(first)
            last = int(np.searchsorted(ends, before + self.row_len))  # the document that fills the row
            whole = int(ends[last]) == before + self.row_len
            # A document longer than a row is cut at its end.
            first = last + 1 if whole or last == first else last
            before = int(ends[first - 1])
        if not firsts:
            raise ConfigError(f"data: an epoch of {ends[-1]} tokens does not fill one row of {self.row_len}")
        return firsts

    def _row(self, shard_of: Numbers, document_of: Numbers, first: int) -> NDArray[np.int32]:
        parts, filled = [], 0
        for shard, document in zip(shard_of[first:], document_of[first:], strict=True):
            samples = self.shards[shard].documents
            parts.append(samples.tokens[samples.starts[document] : samples.starts[document + 1]])
            filled += len(parts[-1])
            if filled >= self.row_len:
                break
        return np.concatenate(parts)[: self.row_len]
