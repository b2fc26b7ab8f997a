"""Keeping drafts and moving a path's KV entries: twin and kernel against a plain loop."""

import random

import pytest
import torch

from kernels.interpreted import needs_interpreter
from peregrine.kernels.round.drafts import keep_drafts, keep_drafts_torch, move_path, move_path_torch
from peregrine.kernels.round.verdict import HEADER, Verdict

PAGE_SIZE, PAGES, LAYERS, HEADS, DIM = 4, 8, 2, 3, 8


@pytest.fixture(params=["twin", "cpu", pytest.param("triton", marks=needs_interpreter)])
def by(request, monkeypatch):
    """The functions (keep, move) of the twin, of a CPU, or of the kernel."""
    if request.param == "twin":
        return keep_drafts_torch, move_path_torch
    if request.param == "cpu":
        return keep_drafts, move_path
    from peregrine.kernels.round import drafts_triton

    monkeypatch.setattr(drafts_triton, "MOVE_CHUNK", 16)  # an entry takes several blocks, the last one partial
    return drafts_triton.keep_drafts, drafts_triton.move_path


def whole(generator, *shape, high=99):
    return torch.randint(0, high, shape, generator=generator)


@pytest.mark.parametrize("nodes", [2, 5, 64])
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("same_depth", [False, True])
def test_drafts_are_kept(by, nodes, linked, same_depth):
    generator, rows = torch.Generator().manual_seed(nodes), 3
    tokens = whole(generator, nodes - 1, rows).T  # as a chain makes them
    caps, depths = whole(generator, rows, high=6), 3 if same_depth else whole(generator, rows, high=6)
    sources = [whole(generator, rows, nodes) for _ in range(3)] if linked else []
    targets = [torch.zeros(rows, nodes + 1, dtype=torch.int64)[:, :nodes] for _ in sources]
    window, offered = whole(generator, rows, nodes), torch.full((rows,), -1)
    roots = window[:, 0].tolist()
    by[0](window, offered, caps, tokens, depths, list(zip(sources, targets, strict=True)))
    assert window[:, 0].tolist() == roots
    assert torch.equal(window[:, 1:], tokens)
    assert offered.tolist() == [min(int(caps[r]), depths if same_depth else int(depths[r])) for r in range(rows)]
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("parts", [1, 2])  # keys that hold their values, keys and values
@pytest.mark.parametrize(("nodes", "width"), [(2, 2), (7, 3), (20, 6)])
def test_a_path_moves_to_the_front(by, nodes, width, parts, dtype):
    rng, generator, rows = random.Random(nodes), torch.Generator().manual_seed(width), 4
    table = 1 + torch.randperm(rows * PAGES, generator=generator).view(rows, PAGES)
    paths = [[0, *sorted(rng.sample(range(1, nodes), width - 1))] for _ in range(rows)]
    accept = [0, 1, width, rng.randint(1, width)]
    past = [rng.randint(0, PAGES * PAGE_SIZE - nodes) for _ in range(rows)]
    table_of_verdicts = torch.zeros(rows, HEADER + 2 * width, dtype=torch.int64)
    table_of_verdicts[:, 0] = torch.tensor(accept)
    table_of_verdicts[:, HEADER + width :] = torch.tensor(paths)
    size = (LAYERS, (rows * PAGES + 1) * PAGE_SIZE, HEADS, DIM)
    stores = [whole(generator, *size, high=200).to(dtype) for _ in range(parts)]
    expected = [store.clone() for store in stores]
    for store, moved in zip(stores, expected, strict=True):
        for row in range(rows):

            def slot(node, row=row):
                page, offset = divmod(past[row] + node, PAGE_SIZE)
                return int(table[row, page]) * PAGE_SIZE + offset

            for place in range(accept[row]):
                moved[:, slot(place)] = store[:, slot(paths[row][place])]
    by[1](stores, torch.tensor(past), Verdict(table_of_verdicts), table, PAGE_SIZE)
    for store, moved in zip(stores, expected, strict=True):
        assert torch.equal(store.view(torch.uint8), moved.view(torch.uint8))
