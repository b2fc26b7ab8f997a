"""Tensors of an arena never overlap while they are in use, and their memory is used again afterwards."""

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from peregrine.kernels.activation.reference import silu_mul
from peregrine.kernels.linear import pack_weight
from peregrine.kernels.norm import rms_norm
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.kernels.runtime.cpu_arena import ALIGNED, CHUNK, Arena
from peregrine.kernels.runtime.cpu_graph import CpuGraphs


def place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def test_tensors_in_use_never_overlap() -> None:
    arena, dice, held = Arena(), random.Random(0), list[Tensor]()
    for number in range(400):
        made = arena.like(torch.empty(dice.randrange(1, 8_000), dtype=dice.choice([torch.float32, torch.int64])))
        assert made.data_ptr() % ALIGNED == 0
        held.append(made.fill_(number).view(1, -1))  # a view is enough to keep it
        if len(held) > 12:
            del held[dice.randrange(12)]
        assert all(len(line.unique()) == 1 for line in held)
        places = sorted(map(place, held))
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
    assert len(arena._blocks) == len(held)
    assert arena.num_bytes <= 6 * CHUNK


def test_memory_is_used_again() -> None:
    arena = Arena()
    first = arena.like(torch.empty(100))
    where = first.data_ptr()
    second = arena.like(torch.empty(100))
    assert second.data_ptr() != where
    del first
    assert arena.like(torch.empty(100)).data_ptr() == where
    arena.share([second.view(10, 10)])
    assert arena.like(torch.empty(100, dtype=torch.int64)).data_ptr() in (where, second.data_ptr())
    assert arena.num_bytes == CHUNK
    turned = arena.like(torch.empty(6, 4).T)
    assert turned.stride() == (1, 4), "what is not dense has its place, too: recorded kernels write there"
    assert place(turned)[0] in arena._blocks
    empty = torch.empty(0)
    assert arena.like(empty) is empty


@pytest.mark.skipif(not NUMBA_PRESENT, reason="needs numba")
def test_graphs_of_many_layers_and_sizes_have_the_memory_of_one() -> None:
    """Ten layers need the memory of one, and the sizes that are recorded that of the largest."""
    up, down, ones = pack_weight(torch.randn(1024, 256) / 16), pack_weight(torch.randn(256, 512) / 16), torch.ones(256)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        for _ in range(10):
            x = down.linear(silu_mul(up.linear(rms_norm(x, ones, 1e-5))).flatten(1))
        return (x,)

    graphs, apart = CpuGraphs(64, 640, shares_outputs=True), CpuGraphs(64, 640)
    with torch.inference_mode():
        for rows in (20, 16, 12, 8, 4, 2, 1):
            for number in range(3):
                x = torch.randn(rows, 256)
                assert step(x)[0].isfinite().all()
                assert torch.equal(graphs.run("mlp", step, x)[0], step(x)[0]), number
                assert torch.equal(apart.run("mlp", step, x)[0], step(x)[0]), number
    assert graphs.arena.num_bytes <= 2 * CHUNK
    outputs = [graph.outputs[0] for sizes in apart._graphs.values() for graph in sizes.values()]
    places = sorted(map(place, outputs))
    assert all(end <= start for (_, end), (start, _) in pairwise(places)), "each has its own"
