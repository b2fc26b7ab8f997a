"""Simulated acceptance: twin and kernel accept the drawn number of drafts, in chains and trees."""

import pytest
import torch

from kernels.interpreted import needs_interpreter
from kernels.test_verdict import draw
from peregrine.kernels.round.verdict import Ends, Nodes, judge_nodes
from peregrine.synthetic.accept import bend_choices_torch

VOCAB = 5


def same(accept):
    """One mean for all seeds."""
    return torch.tensor([accept, accept]).double()


@pytest.fixture(params=["twin", pytest.param("triton", marks=needs_interpreter)])
def bend(request):
    if request.param == "twin":
        return bend_choices_torch
    from peregrine.synthetic import accept_triton as simulated_gpu

    return simulated_gpu.bend_choices


def open_ended(nodes, ends):
    """Rows that never end."""
    rows = len(ends.done)
    free = Ends(ends.past_lens, ends.past_lens + 100, torch.full((rows, 1), -1), torch.zeros(rows).bool())
    return nodes, free


def first_chain(nodes, row):
    """How many drafts the chain of first children offers."""
    node, length = 0, 0
    while True:
        children = [
            i
            for i in range(1, nodes.tokens.shape[1])
            if nodes.parents[row, i] == node and nodes.depths[row, i] <= nodes.offered[row]
        ]
        if not children:
            return length
        node, length = children[0], length + 1


@pytest.mark.parametrize("accept", [1.0, 2.0, 3.0, 2.4])
@pytest.mark.parametrize(("num_nodes", "depth"), [(4, 3), (9, 3), (16, 4)])
def test_the_first_chain_is_accepted_as_far_as_drawn(bend, num_nodes, depth, accept):
    for seed in range(4):
        choices, *window = draw(seed, num_nodes, depth)
        nodes, ends = open_ended(*window)
        choices = choices.clamp(min=0)
        seeds = torch.arange(len(choices)) + seed
        bent = bend(choices, nodes, ends.past_lens, seeds, same(accept), VOCAB * 20)
        assert torch.equal(bent, bend_choices_torch(choices, nodes, ends.past_lens, seeds, same(accept), VOCAB * 20))
        verdict = judge_nodes(bent, nodes, ends, depth)
        for row in range(len(choices)):
            got, most = int(verdict.accept_lens[row]), first_chain(nodes, row) + 1
            assert got in {min(int(accept), most), min(-int(-accept // 1), most)}


def test_a_fault_stays_a_fault(bend):
    choices, *window = draw(1, 4, 3)
    nodes, ends = open_ended(*window)
    bent = bend(torch.full_like(choices, -1), nodes, ends.past_lens, ends.past_lens, same(1.0), VOCAB)
    assert (bent[:, 0] == -1).all()


@pytest.mark.parametrize(("seed", "mean"), [(7, 2.6), (8, 1.2)])
def test_the_mean_is_the_requested_one(bend, seed, mean):
    rows, order = 300, torch.arange(4)
    links = [x[None].expand(rows, -1) for x in ((order - 1).clamp(min=0), order, (2 << order) - 1)]
    nodes = Nodes(torch.zeros(rows, 4).long(), *links, torch.full((rows,), 3))
    past, seeds, means = torch.arange(rows), torch.full((rows,), seed), torch.tensor([1.2, 2.6]).double()
    ends = Ends(past, past + 100, torch.full((rows, 1), -1), torch.zeros(rows).bool())
    bent = bend(torch.ones(rows, 4).long(), nodes, past, seeds, means, VOCAB)
    # A standard deviation of 0.49 over 300 draws: 0.028 of the mean.
    assert judge_nodes(bent, nodes, ends, 3).accept_lens.double().mean() == pytest.approx(mean, abs=0.11)
