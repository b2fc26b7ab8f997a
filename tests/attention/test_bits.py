"""A query's output depends bit for bit on its query, mask and visible keys alone: not on layout, batch or window."""

import itertools

import pytest
import torch
from torch import Tensor

from attention.cases import BACKENDS
from peregrine.attention import AttentionBackend, LayerAttention
from peregrine.attention.conformance.paging import Layout, attend
from peregrine.attention.conformance.problem import Row, chain, tree

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
every_shape = pytest.mark.parametrize("heads", [(5, 1, 64), (6, 2, 16), (8, 1, 128), (3, 3, 80), (4, 2, 8)])
some_shapes = pytest.mark.parametrize("heads", [(6, 2, 16), (8, 1, 128)])  # where pages lie has little to do with them
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 7, 8, 0, 10]


def layers(heads: tuple[int, int, int]) -> list[LayerAttention]:
    sinks = torch.linspace(-1, 2, heads[0])
    return [LayerAttention(0.2, None, None), LayerAttention(0.2, 20, sinks), LayerAttention(0.2, 3, None)]


def alone(backend: AttentionBackend, row: Row, layer: LayerAttention) -> Tensor:
    """Each query of a row in a forward of its own. -> [Q, Hq, D]"""
    return torch.cat([attend(backend, [row.at(i)], layer)[0] for i in range(len(row.positions))])


@every_backend
@every_shape
@pytest.mark.parametrize("past", [0, 13, 60, 64, 200])
def test_a_window_equals_its_queries_one_by_one(
    backend: AttentionBackend, heads: tuple[int, int, int], past: int
) -> None:
    row = chain(past, 9, heads)
    for layer in layers(heads):
        single = alone(backend, row, layer)
        for q_len in (2, 3, 5, 9):
            assert torch.equal(attend(backend, [row.at(*range(q_len))], layer)[0], single[:q_len])


@every_backend
@every_shape
def test_a_prompt_at_once_equals_the_prompt_in_chunks(backend: AttentionBackend, heads: tuple[int, int, int]) -> None:
    row = chain(0, 150, heads)
    for layer in layers(heads):
        whole = attend(backend, [row], layer)[0]
        cuts = [0, 1, 48, 64, 65, 133, 150]
        chunks = [attend(backend, [row.at(*range(a, b))], layer)[0] for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(chunks), whole)


@every_backend
@every_shape
def test_other_rows_change_nothing(backend: AttentionBackend, heads: tuple[int, int, int]) -> None:
    row = chain(70, 4, heads)
    others = [chain(past, 4, heads, seed=1) for past in (0, 5, 63, 190)]
    ragged = [chain(3, 1, heads, seed=2), chain(0, 33, heads, seed=2)]
    for layer in layers(heads):
        single = attend(backend, [row], layer)[0]
        assert torch.equal(attend(backend, [*others, row], layer)[-1], single)
        assert torch.equal(attend(backend, [row, *others * 4], layer)[0], single)
        assert torch.equal(attend(backend, [ragged[0], row, ragged[1]], layer)[1], single)


@every_backend
@some_shapes
def test_layout_changes_nothing(backend: AttentionBackend, heads: tuple[int, int, int]) -> None:
    rows = [chain(past, 4, heads) for past in (0, 5, 63, 130)]
    trees = [tree(past, PARENTS, heads) for past in (0, 5, 63, 130)]
    layouts = [Layout(1), Layout(32), Layout(64), Layout(16, spare_pages=40), Layout(64, spare_pages=1)]
    for layer in layers(heads):
        for batch in (rows, trees):
            reference = attend(backend, batch, layer)
            for layout in layouts:
                results = attend(backend, batch, layer, layout)
                assert all(map(torch.equal, results, reference)), layout


@every_backend
@every_shape
@pytest.mark.parametrize("past", [0, 5, 58, 64, 130])
def test_a_tree_path_equals_its_chain(backend: AttentionBackend, heads: tuple[int, int, int], past: int) -> None:
    row = tree(past, PARENTS, heads)
    assert row.words is not None
    layer = LayerAttention(0.2, 40, None)
    out = attend(backend, [row], layer)[0]
    for i in range(len(row.words)):
        assert torch.equal(attend(backend, [row.path_to(i)], layer)[0], out[i : i + 1])


@every_backend
@every_shape
def test_tree_nodes_do_not_depend_on_other_branches(backend: AttentionBackend, heads: tuple[int, int, int]) -> None:
    row = tree(37, PARENTS, heads)
    for layer in layers(heads):
        assert torch.equal(attend(backend, [row], layer)[0], alone(backend, row, layer))


@every_backend
@some_shapes
def test_nan_in_slots_of_other_rows_and_later_positions_is_not_read(
    backend: AttentionBackend, heads: tuple[int, int, int]
) -> None:
    rows = [chain(past, 4, heads) for past in (0, 5, 63, 130)]
    trees = [tree(past, PARENTS, heads) for past in (0, 5, 63, 130)]
    ragged = [chain(past, q_len, heads) for past, q_len in ((0, 20), (7, 1), (60, 6))]
    for layer in layers(heads):
        for batch in (rows, trees, ragged):
            for layout in (Layout(16, spare_pages=5), Layout(64)):
                clean = attend(backend, batch, layer, layout)
                poisoned = attend(backend, batch, layer, Layout(layout.page_size, layout.spare_pages, poison=True))
                assert all(map(torch.equal, poisoned, clean))


@every_backend
@pytest.mark.parametrize("bad", [float("nan")])
@pytest.mark.parametrize("part", ["k", "v"])
def test_nan_in_a_window_reaches_only_queries_that_see_it(backend: AttentionBackend, bad: float, part: str) -> None:
    row, layer = chain(61, 6, (5, 1, 64)), LayerAttention(0.2, None, None)
    clean = attend(backend, [row], layer)[0]
    (row.k if part == "k" else row.v)[61 + 3, 0, 2] = bad
    out = attend(backend, [row], layer)[0]
    assert torch.equal(out[:3], clean[:3])
    assert not out[3:].isfinite().all(dim=-1).any()
    tree_row = tree(61, [-1, 0, 0, 1], (5, 1, 64))
    clean = attend(backend, [tree_row], layer)[0]
    (tree_row.k if part == "k" else tree_row.v)[61 + 1, 0, 2] = bad
    out = attend(backend, [tree_row], layer)[0]
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    assert not out[[1, 3]].isfinite().all(dim=-1).any()
