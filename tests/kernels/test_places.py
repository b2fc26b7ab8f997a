"""Places, positions and slots: twin and kernels against a plain loop."""

import importlib
import random
from dataclasses import fields

import pytest
import torch

from kernels.interpreted import needs_interpreter
from peregrine.kernels.round.places import (
    AheadPlaces,
    PathPlaces,
    WindowPlaces,
    ahead_places_torch,
    path_places_torch,
    window_places_torch,
)

PAGES, MOST = 24, 300  # pages of a row, and its maximum number of places


@pytest.fixture(params=["twin", "cpu", pytest.param("triton", marks=needs_interpreter)])
def by(request):
    """The functions (window, path, ahead) of the twin or of a kernel."""
    if request.param == "twin":
        return window_places_torch, path_places_torch, ahead_places_torch
    if request.param == "cpu":
        pytest.importorskip("numba")
    kernels = importlib.import_module(f"peregrine.kernels.round.places_{request.param}")
    return (
        lambda *arguments: WindowPlaces(*kernels.window_places(*arguments)),
        lambda *arguments: PathPlaces(*kernels.path_places(*arguments)),
        lambda *arguments: AheadPlaces(*kernels.ahead_places(*arguments)),
    )


def draw(seed, rows):
    """(page size, page table, past lengths before and after, history); tables and histories are strided views."""
    generator, page_size = torch.Generator().manual_seed(seed), random.Random(seed).choice([16, 32, 64])
    table = torch.randint(0, 999, (rows + 2, PAGES + 3), generator=generator)[:rows, :PAGES]
    past = torch.randint(0, MOST, (rows,), generator=generator)
    new = past + torch.randint(0, 5, (rows,), generator=generator)
    history = torch.randint(0, 500, (rows, PAGES * page_size + 7), generator=generator)[:, : PAGES * page_size]
    return page_size, table, past, new, history


def slot(table, page_size, row, place):
    return int(table[row, place // page_size]) * page_size + place % page_size


def check(got, **expected):
    for field in fields(got):
        value = getattr(got, field.name)
        assert value.dtype == torch.int64
        assert value.tolist() == expected[field.name], field.name


@pytest.mark.parametrize(("rows", "nodes"), [(1, 1), (3, 4), (50, 7)])
@pytest.mark.parametrize("max_len", [100, 10_000])
def test_a_window(by, rows, nodes, max_len):
    page_size, table, past, _, _ = draw(nodes, rows)
    depths = torch.randint(0, nodes, (rows, nodes), generator=torch.Generator().manual_seed(1))
    for links in (depths, depths[:1].expand(rows, -1)):  # a chain has one row of links for all rows
        at = [[int(past[r] + links[r, i]) for i in range(nodes)] for r in range(rows)]
        check(
            by[0](past, links, table, page_size, max_len),
            past_lens=past.tolist(),
            positions=[[min(p, max_len - 1) for p in row] for row in at],
            next_positions=[[p + 1 for p in row] for row in at],
            slots=[slot(table, page_size, r, int(past[r]) + i) for r in range(rows) for i in range(nodes)],
        )


def test_a_copy_of_the_past_lengths_stays(by):
    page_size, table, past, _, _ = draw(0, 3)
    places = by[0](past, torch.zeros(3, 2, dtype=torch.int64), table, page_size, 100)
    before = past.tolist()
    past += 1
    assert places.past_lens.tolist() == before


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (4, 5), (60, 3)])
@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("max_len", [100, 10_000])
def test_a_path(by, rows, width, behind, max_len):
    page_size, table, past, new, history = draw(width, rows)
    live = [max(int(new[r] - past[r]) - behind, 0) for r in range(rows)]
    check(
        by[1](past, new, history, table, page_size, width, behind, max_len),
        tokens=[int(history[r, past[r] + i + behind]) for r in range(rows) for i in range(width)],
        positions=[[min(int(past[r]) + i, max_len - 1) for i in range(width)] for r in range(rows)],
        slots=[slot(table, page_size, r, int(past[r]) + i) for r in range(rows) for i in range(width)],
        live=[r * width + live[r] for r in range(rows)],
        live_positions=[[min(int(past[r]) + live[r], max_len - 1)] for r in range(rows)],
    )


@pytest.mark.parametrize(("rows", "depth", "width"), [(1, 1, 1), (1, 3, 1), (5, 4, 3), (40, 2, 4)])
@pytest.mark.parametrize("first_place", [0, 1])
@pytest.mark.parametrize("max_len", [100, 10_000])
def test_guesses_ahead(by, rows, depth, width, first_place, max_len):
    page_size, table, _, new, _ = draw(depth, rows)
    base = [int(new[r]) + first_place for r in range(rows)]
    steps = range(depth - 1)
    check(
        by[2](new, table, page_size, first_place, depth, width, max_len),
        base_lens=base,
        positions=[[[min(base[r] + s, max_len - 1)] * width for r in range(rows)] for s in steps],
        slots=[
            [slot(table, page_size, r, base[r] + s * width + j) for r in range(rows) for j in range(width)]
            for s in steps
        ],
        next_positions=[[[int(new[r]) + 1 + s] * width for r in range(rows)] for s in range(depth)],
    )
