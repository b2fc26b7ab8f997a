"""Growing a draft tree: the twin against a plain search, and the kernel against the twin."""

import numpy as np
import pytest
import torch

from kernels.exact_sampling import Params, sampling_of
from kernels.interpreted import needs_interpreter
from peregrine.kernels.round.tree import LEAST, STEP_COST, Frontier, Growth, grow_torch, select_torch
from peregrine.kernels.sampling.params import Features

STEP = STEP_COST, LEAST
VOCAB, ROWS = 30, [Params(temperature=0.7, seed=3), Params(temperature=0.0)]
SHAPES = [(1, 3, 4), (2, 2, 5), (3, 3, 13), (3, 4, 30)]


def logits_at(path):
    """Draft logits after a path of tokens, a function of the path alone."""
    generator = torch.Generator().manual_seed(hash(tuple(path)) % 2**31)
    return torch.randn(VOCAB, generator=generator) * 2


def search(depth, width, nodes):
    """[(path, joint score)] of the window's nodes, level by level in the order they were found."""
    seen, frontier = [], [((), 0.0)]
    for _ in range(depth):
        level = []
        for path, score in frontier:
            weights = logits_at(path).double().numpy()
            weights = weights - np.log(np.exp(weights).sum())
            for token in np.argsort(-weights, kind="stable")[:width]:
                level.append(((*path, int(token)), score + weights[token] - STEP_COST))
        seen += level
        frontier = sorted(level, key=lambda entry: -entry[1])[:width]
    best = sorted(range(len(seen)), key=lambda i: -seen[i][1])[: nodes - 1]
    return [seen[i] for i in sorted(best)]


@pytest.mark.parametrize(("depth", "width", "nodes"), SHAPES)
def test_the_window_is_that_of_a_plain_search(depth, width, nodes):
    growth = Growth.begin(1, depth, width, None, sampling_of(ROWS[1:]), Features())
    frontier, paths = None, [()]
    for level in range(depth):
        if frontier is not None:
            origins, picked = frontier.origins.tolist(), frontier.tokens.tolist()
            paths = [(*paths[origin], token) for origin, token in zip(origins, picked, strict=True)]
        logits = torch.stack([logits_at(path) for path in paths])[None]
        frontier = grow_torch(growth, logits, torch.zeros(1, len(paths)).long(), frontier, level)
    tokens, parents, depths, words = (x[0].tolist() for x in select_torch(growth, nodes, depth))
    made = [()]
    for node in range(1, nodes):
        made.append((*made[parents[node]], tokens[node - 1]))
        assert depths[node] == len(made[node])
        assert words[node] == words[parents[node]] | 1 << node
    assert (depths[0], parents[0], words[0]) == (0, 0, 1)
    assert made[1:] == [path for path, _ in search(depth, width, nodes)]


def test_a_node_sees_its_own_ancestors():
    growth = Growth.begin(1, 3, 2, None, sampling_of(ROWS[1:]), Features())
    frontier, lines = None, [()]
    for level in range(3):
        logits = torch.randn(1, len(lines), VOCAB, generator=torch.Generator().manual_seed(level))
        frontier = grow_torch(growth, logits, torch.zeros(1, len(lines)).long(), frontier, level)
        lines = [(*lines[origin], level * 2 + j) for j, origin in enumerate(frontier.origins.tolist())]
        assert frontier.words[0].tolist() == [sum(1 << bit for bit in line) for line in lines]


@needs_interpreter
@pytest.mark.parametrize(("depth", "width", "nodes"), SHAPES)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_the_kernel_grows_the_twins_tree(depth, width, nodes, sampled, named, monkeypatch):
    from peregrine.kernels.round import tree_triton

    monkeypatch.setattr(tree_triton, "SPAN", 16)
    generator = torch.Generator().manual_seed(depth)
    ids = torch.randperm(90, generator=generator)[:VOCAB].sort().values if named else None
    twin, kernel = (
        Growth.begin(len(ROWS), depth, width, ids, sampling_of(ROWS), Features(sampled=sampled)) for _ in range(2)
    )
    expected = got = None
    for level in range(depth):
        count = width if level else 1
        logits = torch.randn(len(ROWS), count, VOCAB, generator=generator) * 2
        positions = torch.tensor([[5], [9]]).expand(-1, count) + level
        expected = grow_torch(twin, logits, positions, expected, level)
        got = Frontier(*tree_triton.grow(kernel, logits, positions, got, level, STEP))
        for name in ("tokens", "origins", "numbers", "words"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
        torch.testing.assert_close(got.scores, expected.scores)
    assert torch.equal(kernel.tokens, twin.tokens)
    assert torch.equal(kernel.parents, twin.parents)
    windows = zip(tree_triton.select(kernel, nodes, depth), select_torch(twin, nodes, depth), strict=True)
    for one, other in windows:
        assert torch.equal(one, other)


@needs_interpreter
def test_a_nan_score_is_never_a_child():
    from peregrine.kernels.round import tree_triton

    growth = Growth.begin(2, 2, 3, None, sampling_of(ROWS), Features())
    logits = torch.randn(2, 1, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, 0, ::2] = torch.nan
    tokens, *_ = tree_triton.grow(growth, logits, torch.zeros(2, 1).long(), None, 0, STEP)
    assert (tokens[:3] % 2 == 1).all()
    logits[0] = torch.nan
    tokens, *_ = tree_triton.grow(growth, logits, torch.zeros(2, 1).long(), None, 0, STEP)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


def extreme_logits(kind, count):
    """Draft logits whose log-probabilities are far apart, equal, or no numbers at all."""
    logits = torch.randn(len(ROWS), count, VOCAB, generator=torch.Generator().manual_seed(count)) * 2
    match kind:
        case "cold":
            return logits * 1e30
        case "tied":
            return logits.sign() * 1e6
        case "nan":
            return logits.masked_fill(logits > 1, torch.nan)
        case "all nan":
            return torch.full_like(logits, torch.nan)
    return torch.full_like(logits, -torch.inf)


@needs_interpreter
@pytest.mark.parametrize("by_kernel", [False, True], ids=["twin", "kernel"])
@pytest.mark.parametrize("kind", ["cold", "tied", "nan", "all nan", "-inf"])
@pytest.mark.parametrize(("depth", "width", "nodes"), [(3, 2, 6), (4, 3, 13)])
def test_a_kept_nodes_parent_is_kept_whatever_the_scores_are(depth, width, nodes, kind, by_kernel):
    """A node whose parent was dropped would be judged at another depth than it was read at."""
    from peregrine.kernels.round import tree_triton

    growth = Growth.begin(len(ROWS), depth, width, None, sampling_of(ROWS), Features())
    frontier = None
    for level in range(depth):
        logits = extreme_logits(kind, 1 if frontier is None else width)
        places = torch.zeros(len(ROWS), logits.shape[1], dtype=torch.int64)
        if by_kernel:
            frontier = Frontier(*tree_triton.grow(growth, logits, places, frontier, level, STEP))
        else:
            frontier = grow_torch(growth, logits, places, frontier, level)
    _, parents, depths, words = (tree_triton.select if by_kernel else select_torch)(growth, nodes, depth)
    assert torch.equal(depths[:, 1:], depths.gather(1, parents)[:, 1:] + 1)
    assert ((growth.tokens >= 0) & (growth.tokens < VOCAB)).all()
    assert torch.equal(words[:, 1:], words.gather(1, parents)[:, 1:] | (1 << torch.arange(1, nodes)))
