"""Windows chosen on the device: twin and kernels take the drafts that a plain search takes, and lay them out alike."""

import random

import numpy as np
import pytest
import torch

from kernels.interpreted import needs_interpreter
from peregrine.kernels.round.allot import allot_windows_torch
from peregrine.spec.windows import WindowBuffer, places_of

EDGES = [0.25, 0.5, 0.75]


@pytest.fixture(params=["twin", pytest.param("triton", marks=needs_interpreter)])
def allot(request, monkeypatch):
    if request.param == "twin":
        return allot_windows_torch
    from peregrine.kernels.round import allot_triton

    monkeypatch.setattr(allot_triton, "ROWS", 4)  # several blocks of rows, the last one not whole
    return allot_triton.allot_windows


def search(said, odds, tokens, width):
    """Lengths of windows, by a list of all drafts."""
    drafts, rows = [], len(said)
    for row, line in enumerate(said):
        worth = np.float32(1)
        for depth in range(width - 1):
            chance = odds[row][depth][sum(line[depth] >= edge for edge in EDGES)] if depth < len(line) else 0.0
            worth = worth * np.float32(chance)
            drafts.append((-float(worth), row, depth))
    taken = [row for _, row, _ in sorted(drafts)[: tokens - rows]]
    return [1 + taken.count(row) for row in range(rows)]


@pytest.mark.parametrize(
    ("rows", "tokens", "width", "depth"), [(1, 3, 6, 5), (3, 3, 1, 4), (7, 20, 5, 4), (9, 40, 8, 3)]
)
def test_the_worthiest_drafts_fill_the_size(allot, rows, tokens, width, depth):
    dice = random.Random(rows)
    said = torch.tensor([[dice.random() for _ in range(depth)] for _ in range(rows)])
    odds = torch.rand(rows, depth, len(EDGES) + 1, generator=torch.Generator().manual_seed(rows))
    odds[rows // 2] = odds[0]  # equals, if they say the same
    said[rows // 2] = said[0]
    odds[-1] *= rows == 1  # a row that may not draft
    buffer = WindowBuffer(rows, tokens, width, torch.device("cpu"))
    allot(said, odds, torch.tensor(EDGES), *buffer.tensors)
    lens = search(said.tolist(), odds.tolist(), tokens, width)
    for line, more in ((0, 0), (1, 1)):
        expected = places_of([length + more for length in lens], width + more)
        assert buffer._buffer[line][: len(expected)].tolist() == expected.tolist()
