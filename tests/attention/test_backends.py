"""Every backend agrees with an unpaged float64 computation on every shape."""

import pytest
import torch

from attention.cases import BACKENDS, check
from peregrine.attention import AttentionBackend, LayerAttention
from peregrine.attention.conformance.paging import Layout, lay_out
from peregrine.attention.conformance.problem import answer, chain, tree

PASTS = [0, 1, 15, 16, 17, 31, 64, 130]
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 7]  # depth 5, with siblings

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


def plain(head_dim: int, window: int | None = None) -> LayerAttention:
    return LayerAttention(scale=head_dim**-0.5, window=window, sinks=None)


@every_backend
@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
@pytest.mark.parametrize("past", PASTS)
def test_page_edges(backend: AttentionBackend, past: int, page_size: int) -> None:
    check(backend, [chain(past, 3, (4, 2, 16))], plain(16), Layout(page_size))


@every_backend
@pytest.mark.parametrize("q_len", range(1, 10))
def test_window_lengths(backend: AttentionBackend, q_len: int) -> None:
    check(backend, [chain(past, q_len, (5, 1, 64)) for past in (0, 40, 63, 64)], plain(64))


@every_backend
@pytest.mark.parametrize("heads", [(1, 1, 64), (3, 1, 80), (6, 2, 16), (5, 1, 64), (16, 2, 128), (4, 4, 8)])
def test_heads(backend: AttentionBackend, heads: tuple[int, int, int]) -> None:
    rows = [chain(70, 4, heads), chain(3, 4, heads)]
    check(backend, rows, plain(heads[2]))


@every_backend
def test_ragged_rows(backend: AttentionBackend) -> None:
    lens = [(0, 37), (16, 1), (130, 5), (1, 64)]
    check(backend, [chain(past, q_len, (6, 2, 16)) for past, q_len in lens], plain(16))


@every_backend
def test_one_long_prompt(backend: AttentionBackend) -> None:
    check(backend, [chain(64, 256, (5, 1, 64))], plain(64))


@every_backend
@pytest.mark.parametrize("window", [1, 5, 100])
def test_sliding_windows(backend: AttentionBackend, window: int) -> None:
    layer = plain(16, window)
    check(backend, [chain(past, 6, (6, 2, 16)) for past in PASTS], layer)
    check(backend, [chain(0, 150, (6, 2, 16)), chain(8, 2, (6, 2, 16))], layer)


@every_backend
@pytest.mark.parametrize("shift", [-4.0, 0.0, 30.0, float("-inf")])
def test_sinks(backend: AttentionBackend, shift: float) -> None:
    sinks = torch.linspace(-1, 1, 6) + shift
    layer = LayerAttention(scale=0.25, window=None, sinks=sinks)
    check(backend, [chain(70, 5, (6, 2, 16)), chain(0, 2, (6, 2, 16))], layer)
    check(backend, [chain(70, 3, (6, 2, 16))], LayerAttention(scale=0.25, window=3, sinks=sinks))


@every_backend
@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("window", [None, 5])
def test_trees(backend: AttentionBackend, past: int, window: int | None) -> None:
    rows = [tree(past, PARENTS, (5, 1, 64)), tree(40, PARENTS, (5, 1, 64)), tree(63, PARENTS, (5, 1, 64))]
    check(backend, rows, plain(64, window))


@every_backend
def test_random_trees_of_64_nodes(backend: AttentionBackend) -> None:
    rng = torch.Generator().manual_seed(3)
    for past in (0, 1, 50, 64, 127):
        parents = [-1] + [int(torch.randint(i, (), generator=rng)) for i in range(1, 64)]
        check(backend, [tree(past, parents, (3, 1, 16))], plain(16))
    check(backend, [tree(50, list(range(-1, 63)), (3, 1, 16))], plain(16))  # a chain of 64: bit 63 is used


@every_backend
def test_there_may_be_fewer_queries_than_new_keys(backend: AttentionBackend) -> None:
    rows = [chain(past, 5, (6, 2, 16)).at(live) for past, live in ((0, 4), (15, 0), (130, 2))]
    check(backend, rows, plain(16))


@every_backend
def test_large_scores_do_not_overflow(backend: AttentionBackend) -> None:
    row = chain(70, 3, (3, 1, 16))
    check(backend, [row], LayerAttention(scale=12.0, window=None, sinks=None))


@every_backend
def test_strided_queries_and_keys(backend: AttentionBackend) -> None:
    """q, k and v may be views of one fused projection."""
    row, layer = chain(20, 4, (6, 2, 16)), plain(16)
    forward = lay_out([row], Layout())
    q, k, v = torch.cat([row.q, forward.k, forward.v], dim=1).split([6, 2, 2], dim=1)
    out = backend.bind(forward.store, [layer, layer], forward.metadata)(1, q, k, v)
    right = answer(row, layer, torch.float32)
    assert bool(((out.double() - right.out).abs() <= right.bound).all())
