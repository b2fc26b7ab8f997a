"""Rows for training: mixture, whole documents, and an order that depends on the row's number alone."""

from itertools import islice

import numpy as np
import pytest

from peregrine.errors import ConfigError
from peregrine.train.merlin.token_rows import TokenRows, TokenShard
from peregrine.train.samples import Samples


def shard(name: str, share: float, num_documents: int, first_token: int, longest: int = 9) -> TokenShard:
    """Documents that count up from different starts and end with 0."""
    lengths = np.random.default_rng(first_token).integers(2, longest + 1, num_documents)
    rows = [[first_token + document] * (length - 1) + [0] for document, length in enumerate(lengths.tolist())]
    return TokenShard(name, share, Samples.pack(rows, [0] * len(rows)))


def rows_of(stream: TokenRows, count: int, skip: int = 0) -> np.ndarray:
    return np.concatenate([batch.numpy() for batch in islice(stream.batches(1, skip), count)])


def test_any_row_is_found_again_by_its_number():
    shards = [shard("a", 0.7, 40, 1000), shard("b", 0.3, 11, 5000)]
    whole = rows_of(TokenRows(shards, 16, 3, 300), 60)
    for skip in (0, 1, 17, 18, 43):
        np.testing.assert_array_equal(rows_of(TokenRows(shards, 16, 3, 300), 10, skip), whole[skip : skip + 10])


def test_a_batch_is_rows_in_their_order():
    shards = [shard("a", 1.0, 40, 1000)]
    single = rows_of(TokenRows(shards, 16, 3, 200), 12)
    batches = [batch.numpy() for batch in islice(TokenRows(shards, 16, 3, 200).batches(4), 3)]
    np.testing.assert_array_equal(np.concatenate(batches), single)


def test_another_seed_is_another_order():
    shards = [shard("a", 1.0, 40, 1000)]
    assert (rows_of(TokenRows(shards, 16, 3, 200), 12) != rows_of(TokenRows(shards, 16, 4, 200), 12)).any()


def test_rows_start_with_documents_and_every_document_is_seen_whole():
    source = shard("a", 1.0, 30, 1000)
    stream = TokenRows([source], 32, 0, len(source.documents.tokens))
    rows = rows_of(stream, len(stream.first_documents(*stream.order(0))))  # one epoch
    lengths = dict(zip(range(1000, 1030), source.documents.lens - 1, strict=True))
    whole = set()
    for row in rows:
        assert row[0] != 0
        for piece in np.split(row, np.flatnonzero(row == 0) + 1)[:-1]:
            assert len(piece) - 1 == lengths[piece[0]]  # its first and last tokens are there
            whole.add(int(piece[0]))
    assert len(whole) >= 26  # all but those after the last full row


def test_tokens_follow_the_shares_whatever_the_sizes():
    shards = [shard("a", 0.8, 50, 1000), shard("b", 0.2, 500, 5000)]
    rows = rows_of(TokenRows(shards, 64, 0, 8000), 400)
    text = rows[rows != 0]
    assert np.mean(text < 5000) == pytest.approx(0.8, abs=0.03)


def test_a_document_longer_than_a_row_keeps_its_beginning():
    source = shard("a", 1.0, 5, 1000, longest=100)
    rows = rows_of(TokenRows([source], 8, 0, len(source.documents.tokens)), 4)
    assert all(row[0] != 0 for row in rows)


def test_too_little_text_for_a_row_is_refused():
    with pytest.raises(ConfigError, match="does not fill one row of 4096"):
        next(TokenRows([shard("a", 1.0, 3, 1000)], 4096, 0, 10).batches(1))
