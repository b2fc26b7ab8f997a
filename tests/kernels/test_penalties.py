"""Penalties: counted at every tree node as by a plain loop; neutral values change no bit."""

import numpy as np
import pytest
import torch

from kernels.exact_sampling import Params, context_of, penalised, sampling_of
from peregrine.kernels.sampling.reference import count_tokens, penalise

VOCAB = 13


def random_tree(rng, num_nodes):
    """Parents before children; returns the ancestor lists (root first, the node itself last) and words."""
    paths = [[0]]
    for node in range(1, num_nodes):
        paths.append([*paths[rng.integers(0, node)], node])
    words = [sum(1 << node for node in path) for path in paths]
    return paths, [word - (1 << 64) if word >> 63 else word for word in words]


def random_case(rng, num_rows, num_nodes):
    """Prompts, outputs that end with the root token, windows, paths and words."""
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 6)).tolist() for _ in range(num_rows)]
    outputs = [rng.integers(0, VOCAB, rng.integers(0, 6)).tolist() for _ in range(num_rows)]
    roots = [(p + o)[-1] for p, o in zip(prompts, outputs, strict=True)]
    windows = [[root, *rng.integers(0, VOCAB, num_nodes - 1).tolist()] for root in roots]
    paths, words = zip(*[random_tree(rng, num_nodes) for _ in range(num_rows)], strict=True)
    return prompts, outputs, windows, paths, words


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 64])
@pytest.mark.parametrize("garbage", [0, -5, 10**12])
def test_every_node_counts_its_own_path(num_nodes, garbage):
    rng = np.random.default_rng(num_nodes)
    rows = [
        Params(repetition=1.3, presence=0.7, frequency=0.4),
        Params(repetition=0.8, presence=-0.5, frequency=-0.25),
        Params(repetition=2.0),
        Params(presence=1.5),
        Params(frequency=0.125),
    ]
    prompts, outputs, windows, paths, words = random_case(rng, len(rows), num_nodes)
    logits = torch.from_numpy(rng.normal(size=(len(rows), num_nodes, VOCAB))).float()
    context = context_of(prompts, outputs, windows, words, garbage)
    got = penalise(logits, sampling_of(rows), context)
    for row, params in enumerate(rows):
        for node, path in enumerate(paths[row]):
            output = outputs[row] + [windows[row][step] for step in path[1:]]
            expected = penalised(logits[row, node].numpy(), params, prompts[row], output)
            assert got[row, node].numpy() == pytest.approx(expected, abs=1e-5)


def test_siblings_do_not_see_each_other():
    context = context_of([[1]], [[]], [[1, 4, 5]], [[0b001, 0b011, 0b101]])
    in_prompt, counts = count_tokens(context, VOCAB)
    assert in_prompt[0, 0].nonzero().ravel().tolist() == [1]
    assert [counts[0, node].nonzero().ravel().tolist() for node in range(3)] == [[], [4], [5]]


def test_root_is_counted_once():
    """The root token is in the history and in the window."""
    context = context_of([[1]], [[3]], [[3, 3]], [[0b01, 0b11]])
    _, counts = count_tokens(context, VOCAB)
    assert counts[0, :, 3].tolist() == [1.0, 2.0]


def test_neutral_row_keeps_its_bits():
    rng = np.random.default_rng(5)
    prompts, outputs, windows, _, words = random_case(rng, 2, 4)
    logits = torch.randn(2, 4, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[0, :, :3] = torch.tensor([0.0, -0.0, 1e-42])
    given = logits.clone()
    got = penalise(
        logits, sampling_of([Params(), Params(repetition=1.7)]), context_of(prompts, outputs, windows, words)
    )
    assert torch.equal(got[0].view(torch.int32), given[0].view(torch.int32))
    assert not torch.equal(got[1], given[1])
    assert torch.equal(logits, given)


@pytest.mark.parametrize("vocab_size", [13, 1003])
def test_bits_do_not_depend_on_the_batch(vocab_size):
    rng = np.random.default_rng(9)
    rows = [Params(repetition=1.1 + 0.1 * r, presence=0.3 * r, frequency=0.17 * r) for r in range(4)]
    prompts, outputs, windows, _, words = random_case(rng, 4, 5)
    logits = torch.randn(4, 5, vocab_size, generator=torch.Generator().manual_seed(0))
    together = penalise(logits, sampling_of(rows), context_of(prompts, outputs, windows, words))
    for row in range(4):
        context = context_of(
            prompts[row : row + 1], outputs[row : row + 1], windows[row : row + 1], words[row : row + 1]
        )
        alone = penalise(logits[row : row + 1], sampling_of(rows[row : row + 1]), context)
        assert torch.equal(alone[0], together[row])
