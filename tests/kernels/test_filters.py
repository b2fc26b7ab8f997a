"""top-k, top-p and min-p keep the sets of a plain loop, with ties and edge cases."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.exact_sampling import Params, kept_tokens, sampling_of
from peregrine.kernels.sampling import filters
from peregrine.kernels.sampling.filters import MASS, filter_scores, lowest_kept_torch, masses, masses_torch

FILTERS = [
    Params(),
    Params(top_k=1),
    Params(top_k=3),
    Params(top_k=1000),
    Params(top_p=0.5),
    Params(top_p=0.05),
    Params(top_p=0.999),
    Params(min_p=0.2),
    Params(min_p=1.0),
    Params(top_k=5, top_p=0.7),
    Params(top_k=5, top_p=0.9, min_p=0.1),
    Params(top_p=0.8, min_p=0.3),
]


def kept(scores, rows):
    """Which tokens the kernel keeps: [R, T, V] -> [R, T, V] bool; kept scores are unchanged."""
    filtered = filter_scores(scores, sampling_of(rows))
    stays = filtered > -torch.inf
    assert torch.equal(filtered[stays], scores[stays])
    return stays.numpy()


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.parametrize("vocab_size", [2, 17, 400])
def test_sets_are_those_of_a_plain_loop(vocab_size):
    scores = torch.randn(len(FILTERS), 3, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    got = kept(scores, FILTERS)
    for row, params in enumerate(FILTERS):
        for node in range(3):
            expected = kept_tokens(softmax(scores[row, node].double().numpy()), params)
            assert got[row, node].tolist() == expected.tolist()


# Weights are powers of 4 and shares odd sixty-fourths, so that no sum equals a share by rounding.
@given(
    powers=st.lists(st.integers(-4, 0), min_size=1, max_size=12),
    top_k=st.integers(0, 13),
    share=st.integers(0, 31),
    min_power=st.integers(-5, 1),
)
def test_ties_are_kept(powers, top_k, share, min_power):
    params = Params(
        top_k=top_k, top_p=(2 * share + 1) / 64 + 1e-4, min_p=0.7 * 4.0**min_power if min_power < 1 else 0.0
    )
    weights = 4.0 ** np.array(powers)
    scores = torch.from_numpy(np.log(weights)).float()
    expected = kept_tokens(weights / weights.sum(), params)
    assert kept(scores[None, None], [params])[0, 0].tolist() == expected.tolist()


def test_top_k_keeps_all_ties_of_the_last():
    scores = torch.tensor([[[1.0, 3.0, 2.0, 2.0, 0.0]]])
    assert kept(scores, [Params(top_k=2)])[0, 0].tolist() == [False, True, True, True, False]


def test_top_p_is_a_share_of_what_top_k_leaves():
    scores = torch.tensor([[[0.4, 0.3, 0.2, 0.1]]]).log()
    # 0.4 / 0.7 of the two that are left is 0.571; of all four, 0.4.
    assert kept(scores, [Params(top_k=2, top_p=0.55)])[0, 0].tolist() == [True, False, False, False]
    assert kept(scores, [Params(top_p=0.55)])[0, 0].tolist() == [True, True, False, False]


def test_neutral_row_keeps_its_bits():
    scores = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    scores[0, :, :4] = torch.tensor([-0.0, 0.0, -300.0, -torch.inf])  # likely, unlikely, impossible
    filtered = filter_scores(scores, sampling_of([Params(), Params(top_k=2)]))
    assert torch.equal(filtered[0].view(torch.int32), scores[0].view(torch.int32))
    assert torch.isinf(filtered[1]).any()


def test_a_broken_row_harms_no_other():
    scores = torch.randn(3, 2, 33, generator=torch.Generator().manual_seed(0))
    rows = [Params(top_k=4, top_p=0.8)] * 3
    expected = filter_scores(scores, sampling_of(rows))
    scores[1] = torch.nan
    got = filter_scores(scores, sampling_of(rows))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[2], expected[2])


@pytest.mark.parametrize("vocab_size", [7, 1003])
def test_bits_do_not_depend_on_the_batch(vocab_size):
    scores = torch.randn(len(FILTERS), 4, vocab_size, generator=torch.Generator().manual_seed(3))
    together = filter_scores(scores, sampling_of(FILTERS))
    for row, params in enumerate(FILTERS):
        for node in range(4):
            alone = filter_scores(scores[row : row + 1, node : node + 1], sampling_of([params]))
            assert torch.equal(alone[0, 0], together[row, node])


@pytest.mark.parametrize("function", [masses, masses_torch])
def test_masses_are_whole_and_fit(function):
    scores = torch.tensor([[0.0, -1.0, -20.0, -100.0, -torch.inf]])
    got = function(scores, scores[:, :1])[0]
    assert got.numpy() == pytest.approx(MASS * np.exp(scores[0].double().numpy()), rel=1e-4, abs=1)
    assert got[0] * 2**22 > 0


def test_top_p_stops_where_its_share_is_reached(monkeypatch):
    monkeypatch.setattr(filters, "masses", lambda *_: torch.tensor([[[4, 2, 1, 1]]]))
    scores = torch.tensor([[[4.0, 3.0, 2.0, 1.0]]])
    for top_p, lowest in [(0.5, 4.0), (0.51, 3.0), (0.75, 3.0), (0.76, 2.0)]:
        assert lowest_kept_torch(scores, sampling_of([Params(top_p=top_p)])).item() == lowest
