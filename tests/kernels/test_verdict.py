"""Verdict and commit: the kernels against the twin, and the twin against a walk down the tree in plain Python."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.interpreted import needs_interpreter
from peregrine.kernels.round.verdict import (
    FINISH_FAULT,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    Ends,
    Nodes,
    Verdict,
    commit_torch,
    judge_nodes,
)
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT

VOCAB = 5
PLACES = 32
Commit = Callable[[torch.Tensor, Nodes, Ends, torch.Tensor, int], torch.Tensor]


def by_numba() -> Commit:
    from peregrine.kernels.round import cpu

    return cpu.commit


def by_triton() -> Commit:
    from peregrine.kernels.round import verdict_triton

    return verdict_triton.commit


KERNELS = [
    pytest.param(by_numba, marks=pytest.mark.skipif(not NUMBA_PRESENT, reason="needs numba")),
    pytest.param(by_triton, marks=needs_interpreter),
]


def draw(seed: int, num_nodes: int, depth: int) -> tuple[torch.Tensor, Nodes, Ends]:
    """Random trees in which agreement is common; some rows are done, near their limit, or faulty."""
    rng = random.Random(seed)
    rows = [draw_row(rng, num_nodes, depth) for _ in range(6)]
    choices, tokens, parents, depths, words = (torch.tensor(part) for part in zip(*rows, strict=True))
    offered = torch.tensor([rng.randint(0, depth) for _ in rows])
    past = torch.tensor([rng.randint(0, 9) for _ in rows])
    room = torch.tensor([rng.choice([1, 2, 3, 50]) for _ in rows])
    stops = torch.tensor([[rng.choice([-1, -1, rng.randrange(VOCAB)]) for _ in range(3)] for _ in rows])
    done = torch.tensor([rng.random() < 0.15 for _ in rows])
    return choices, Nodes(tokens, parents, depths, words, offered), Ends(past, past + 1 + room, stops, done)


def draw_row(rng: random.Random, num_nodes: int, depth: int) -> tuple[list[int], ...]:
    parents, depths, tokens = [0], [0], [rng.randrange(VOCAB)]
    taken: set[tuple[int, int]] = set()
    while len(parents) < num_nodes:
        parent, token = rng.randrange(len(parents)), rng.randrange(VOCAB)
        if depths[parent] < depth and (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            depths.append(depths[parent] + 1)
            tokens.append(token)
    words = []
    for node in range(num_nodes):
        word, step = 1, node
        while step:
            word, step = word | 1 << step, parents[step]
        words.append(word - (1 << 64) if word >= 1 << 63 else word)
    choices = [rng.choice([-1, *range(VOCAB)] if rng.random() < 0.1 else range(VOCAB)) for _ in parents]
    return choices, tokens, parents, depths, words


def walk(row: int, choices: torch.Tensor, nodes: Nodes, ends: Ends) -> tuple[list[int], int, int]:
    """(accepted tokens, correct drafts, finish) by going down the tree."""
    if ends.done[row]:
        return [], 0, FINISH_NONE
    node, made, correct = 0, [], 0
    room = int(ends.limits[row] - ends.past_lens[row] - 1)
    while True:
        token = int(choices[row, node])
        if token < 0:
            return made, min(correct, len(made)), FINISH_FAULT
        made.append(token)
        if len(made) == room:
            stopped = token in ends.stop_ids[row].tolist()
            return made, min(correct, len(made)), FINISH_STOP if stopped else FINISH_LENGTH
        if token in ends.stop_ids[row].tolist():
            return made, min(correct, len(made)), FINISH_STOP
        children = [
            i
            for i in range(1, nodes.tokens.shape[1])
            if nodes.parents[row, i] == node
            and nodes.tokens[row, i] == token
            and nodes.depths[row, i] <= nodes.offered[row]
        ]
        if not children:
            return made, correct, FINISH_NONE
        node, correct = children[0], correct + 1


@pytest.mark.parametrize(("num_nodes", "depth"), [(1, 0), (2, 1), (4, 3), (7, 2), (16, 4), (64, 6)])
def test_verdicts_agree_with_a_walk(num_nodes: int, depth: int) -> None:
    for seed in range(60):
        choices, nodes, ends = draw(seed, num_nodes, depth)
        verdict: Verdict = judge_nodes(choices, nodes, ends, depth)
        for row in range(len(choices)):
            made, correct, finish = walk(row, choices, nodes, ends)
            accept = int(verdict.accept_lens[row])
            assert verdict.tokens[row, :accept].tolist() == made
            # A draft that lies past the end was right, but became no output.
            assert int(verdict.correct_lens[row]) == min(int(verdict.correct_lens[row]), accept)
            assert int(verdict.correct_lens[row]) >= correct
            assert int(verdict.finish[row]) == finish


def committed(commit: Commit, choices: torch.Tensor, nodes: Nodes, ends: Ends, depth: int) -> tuple[torch.Tensor, ...]:
    """The table, and all that a commit writes: history, past lengths, ends, windows."""
    history = torch.arange(100, 100 + PLACES).repeat(len(choices), 1)
    history.scatter_(1, ends.past_lens[:, None], nodes.tokens[:, :1])  # the root is the newest token
    nodes = replace(nodes, tokens=nodes.tokens.clone())
    ends = replace(ends, past_lens=ends.past_lens.clone(), done=ends.done.clone())
    table = commit(choices, nodes, ends, history, depth)
    return table, history, ends.past_lens, ends.done, nodes.tokens


def by_twin(choices: torch.Tensor, nodes: Nodes, ends: Ends, history: torch.Tensor, depth: int) -> torch.Tensor:
    return commit_torch(choices, nodes, ends, history, depth).table


@pytest.mark.parametrize(("num_nodes", "depth"), [(1, 0), (4, 3), (16, 4)])
def test_a_commit_moves_rows_past_what_they_accepted(num_nodes: int, depth: int) -> None:
    for seed in range(30):
        choices, nodes, ends = draw(seed, num_nodes, depth)
        _, history, past_lens, done, windows = committed(by_twin, choices, nodes, ends, depth)
        for row in range(len(choices)):
            made, _, finish = walk(row, choices, nodes, ends)
            past = int(ends.past_lens[row])
            assert history[row, past + 1 : past + 1 + len(made)].tolist() == made
            assert history[row, :past].tolist() == list(range(100, 100 + past))
            assert past_lens[row] == past + len(made)
            assert windows[row, 0] == (made[-1] if made else nodes.tokens[row, 0])
            assert done[row] == (bool(ends.done[row]) or finish != FINISH_NONE)
        assert torch.equal(windows[:, 1:], nodes.tokens[:, 1:])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("num_nodes", "depth"), [(1, 0), (5, 4), (9, 3), (64, 5)])
def test_kernel_and_twin_write_the_same(kernel: Callable[[], Commit], num_nodes: int, depth: int) -> None:
    for seed in range(15):
        drawn = draw(seed, num_nodes, depth)
        expected = committed(by_twin, *drawn, depth)
        for got, wanted in zip(committed(kernel(), *drawn, depth), expected, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_row_of_links_may_serve_all_rows(kernel: Callable[[], Commit]) -> None:
    choices, nodes, ends = draw(3, 4, 3)
    order = torch.arange(4)
    shared = [x[None].expand(len(choices), -1) for x in ((order - 1).clamp(min=0), order, (2 << order) - 1)]
    nodes = Nodes(nodes.tokens, *shared, nodes.offered)
    expected = committed(by_twin, choices, nodes, ends, 3)
    for got, wanted in zip(committed(kernel(), choices, nodes, ends, 3), expected, strict=True):
        assert torch.equal(got, wanted)
