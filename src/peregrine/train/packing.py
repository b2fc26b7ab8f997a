"""Documents as tokens on disk, and rows of tokens for training, a function of (tokens, seed, row number).

A row starts with the start of a document and is filled with the documents that follow; the document its end
cuts through starts the next row over again, so every document is seen whole. Any row can be found again from
its number: that is what makes a resumed run see what an uninterrupted one sees.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from peregrine.errors import ConfigError
from peregrine.train.data import END_OF_TEXT, Source, split_documents

BATCH_DOCUMENTS = 4096
TRAIN, HELD_OUT = "train", "held_out"
T = TypeVar("T")
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenShard:
    """A source's documents as tokens, each ended by the end-of-text token."""

    name: str
    share: float
    tokens: NDArray[np.uint16]  # [T]
    starts: NDArray[np.int64]  # [D + 1]; document d is tokens[starts[d]:starts[d + 1]]

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1


def encode_source(source: Source, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the source's training and held-out tokens into the folder, unless they are there."""
    if tokenizer.get_vocab_size() > 2**16:
        raise ConfigError(f"vocab_size={tokenizer.get_vocab_size()}: token shards hold 16 bits; at most {2**16}")
    if (folder / f"{source.name}.{HELD_OUT}.starts.npy").exists():
        return
    splits: dict[str, list[NDArray[np.uint16]]] = {TRAIN: [], HELD_OUT: []}
    progress = tqdm(split_documents(source), desc=f"encode {source.name}", unit=" documents", mininterval=1.0)
    for batch in _batches(progress, BATCH_DOCUMENTS):
        encodings = tokenizer.encode_batch_fast([document + END_OF_TEXT for document, _ in batch])
        for (_, kept_out), encoding in zip(batch, encodings, strict=True):
            splits[HELD_OUT if kept_out else TRAIN].append(np.array(encoding.ids, dtype=np.uint16))
    folder.mkdir(parents=True, exist_ok=True)
    for split, arrays in splits.items():
        if not arrays:
            raise ConfigError(f"data: {source.name} has no {split} document; give more text")
        starts = np.cumsum([0] + [len(array) for array in arrays], dtype=np.int64)
        np.save(folder / f"{source.name}.{split}.tokens.npy", np.concatenate(arrays))
        np.save(folder / f"{source.name}.{split}.starts.npy", starts)


def load_shard(source: Source, folder: Path, split: str) -> TokenShard:
    """A source's tokens of one split, mapped from disk."""
    tokens = np.load(folder / f"{source.name}.{split}.tokens.npy", mmap_mode="r")
    starts = np.load(folder / f"{source.name}.{split}.starts.npy")
    return TokenShard(source.name, source.share, tokens, starts)


class RowStream:
    """Rows of `row_len` tokens from a mixture of shards, endless, in an order fixed by the seed."""

    def __init__(self, shards: Sequence[TokenShard], row_len: int, seed: int, epoch_tokens: int) -> None:
        self.shards, self.row_len, self.seed = tuple(shards), row_len, seed
        # The same number in every epoch, so that an epoch knows where in a shard's order it begins.
        total_share = sum(shard.share for shard in shards)
        self.epoch_documents = [
            max(1, round(epoch_tokens * shard.share / total_share * shard.num_documents / len(shard.tokens)))
            for shard in shards
        ]

    def batches(self, rows: int, skip: int = 0) -> Iterator[Tensor]:
        """Batches [rows, row_len] i64, from batch number `skip` on."""
        for batch in _batches(self._rows(skip * rows), rows):
            yield torch.from_numpy(np.stack(batch).astype(np.int64))

    def _rows(self, skip: int) -> Iterator[NDArray[np.uint16]]:
        epoch = 0
        while True:
            shard_of, document_of = self._order(epoch)
            begins = self._begins(shard_of, document_of)
            for first in begins[skip:]:
                yield self._row(shard_of, document_of, first)
            skip = max(0, skip - len(begins))
            epoch += 1

    def _order(self, epoch: int) -> tuple[Places, Places]:
        """The epoch's documents, sources interleaved evenly: (shard, document) [D] each."""
        shards, documents, times = [], [], []
        for index, (shard, count) in enumerate(zip(self.shards, self.epoch_documents, strict=True)):
            places = np.arange(epoch * count, (epoch + 1) * count)
            passes = places // shard.num_documents  # one permutation for each pass over the shard
            chosen = np.empty(count, dtype=np.int64)
            for number in range(int(passes[0]), int(passes[-1]) + 1):
                generator = np.random.default_rng((self.seed, index, number))
                now = passes == number
                chosen[now] = generator.permutation(shard.num_documents)[places[now] % shard.num_documents]
            jitter = np.random.default_rng((self.seed, index, epoch, 1)).random(count)
            shards.append(np.full(count, index))
            documents.append(chosen)
            times.append((np.arange(count) + jitter) / count)
        order = np.argsort(np.concatenate(times), kind="stable")
        return np.concatenate(shards)[order], np.concatenate(documents)[order]

    def _begins(self, shard_of: Places, document_of: Places) -> list[int]:
        """The place in the order of each full row's first document."""
        lengths = np.empty(len(shard_of), dtype=np.int64)
        for index, shard in enumerate(self.shards):
            mine = shard_of == index
            lengths[mine] = np.diff(shard.starts)[document_of[mine]]
        ends = np.cumsum(lengths)  # [D]
        begins, first, before = [], 0, 0
        while before + self.row_len <= ends[-1]:
            begins.append(first)
            last = int(np.searchsorted(ends, before + self.row_len))  # the document that fills the row
            whole = int(ends[last]) == before + self.row_len
            # A document longer than a row keeps only its beginning.
            first = last + 1 if whole or last == first else last
            before = int(ends[first - 1])
        if not begins:
            raise ConfigError(f"data: an epoch of {ends[-1]} tokens does not fill one row of {self.row_len}")
        return begins

    def _row(self, shard_of: Places, document_of: Places, first: int) -> NDArray[np.uint16]:
        row = np.empty(self.row_len, dtype=np.uint16)
        filled, place = 0, first
        while filled < self.row_len:
            shard, document = self.shards[shard_of[place]], document_of[place]
            start = shard.starts[document]
            take = min(int(shard.starts[document + 1] - start), self.row_len - filled)
            row[filled : filled + take] = shard.tokens[start : start + take]
            filled, place = filled + take, place + 1
        return row


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    stream = iter(items)
    while batch := list(islice(stream, size)):
        yield batch
