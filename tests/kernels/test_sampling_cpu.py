"""Compiled sampling against its twins: equal noise bits, kept sets and choices."""

import numpy as np
import pytest
import torch

from kernels.exact_sampling import Params, sampling_of
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.kernels.sampling.drafts import (
    pick,
    pick_scores,
    pick_scores_torch,
    ranked,
    ranked_torch,
    top_chances,
    top_chances_torch,
)
from peregrine.kernels.sampling.filters import MASS, lowest_kept, lowest_kept_torch, masses, masses_torch
from peregrine.kernels.sampling.noise import gumbel
from peregrine.kernels.sampling.reference import Features, choose, choose_torch

if not NUMBA_PRESENT:
    pytest.skip("numba is not installed", allow_module_level=True)

from numba import njit

from peregrine.kernels.sampling import cpu as choose_cpu
from peregrine.kernels.sampling.noise_cpu import noise_bound, noise_of

SAMPLED, FILTERED = Features(sampled=True), Features(sampled=True, filtered=True)
WIDTHS = (1, 2, 15, 63, 64, 65, 129, 1003)  # blocks are of 64
FILTERS = [
    Params(temperature=0.7, top_k=1, seed=1),
    Params(temperature=1.3, top_k=5, seed=2),
    Params(temperature=1.0, top_k=40, top_p=0.9, min_p=0.05, seed=3),
    Params(temperature=0.3, top_p=0.5, seed=4),
    Params(temperature=2.0, top_p=0.95, seed=5),
    Params(temperature=1.0, top_p=1e-6, seed=6),
    Params(temperature=1.0, min_p=0.1, seed=7),
    Params(temperature=0.0, top_k=3, seed=8),
    Params(temperature=1.0, seed=9),
    Params(temperature=5.0, top_k=10_000, top_p=0.3, seed=10),
]


@njit
def noise_of_hash(hashed):
    return noise_of(hashed)


@njit
def bound_of_hash(hashed):
    return noise_bound(hashed)


def picked_of(logits, positions, ids, sampling, features):
    """The tokens that `pick` writes."""
    out = torch.empty(positions.shape, dtype=torch.int64)
    pick(logits, positions, ids, sampling, features, out)
    return out


def rows_of(kind, num_rows, num_nodes, width, seed=0):
    """Logits [R, T, V] of a kind."""
    generator = torch.Generator().manual_seed(seed + width)
    logits = torch.randn(num_rows, num_nodes, width, generator=generator) * 3
    match kind:
        case "ties":
            return logits.round()
        case "flat":
            return torch.full_like(logits, -1.5)
        case "two values":
            return torch.where(logits > 1, 2.0, -1.0)
        case "peaked":
            return logits + 12 * (torch.rand(logits.shape, generator=generator) > 0.97)
        case "wide":
            return logits * torch.logspace(-20, 3, width)
        case "far":  # so large that the noise is lost in rounding
            return logits + 1e9
    return logits


KINDS = ["normal", "ties", "flat", "two values", "peaked", "wide", "far"]


def positions_of(num_rows, num_nodes):
    return torch.arange(7, 7 + num_nodes).expand(num_rows, -1)


def assert_same_choices(logits, positions, sampling, features):
    """The kernel's tokens are the twin's, except where two sums differ by rounding of the logarithm."""
    got, expected = (function(logits, positions, sampling, features, None) for function in (choose, choose_torch))
    apart = got != expected
    if apart.any():
        sums = pick_scores_torch(logits, positions, None, sampling).double()
        gaps = sums.gather(2, expected[:, :, None]) - sums.gather(2, got[:, :, None])
        assert apart.double().mean() < 1e-3
        assert (gaps[:, :, 0].abs()[apart] < 1e-5).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_kept_sets_are_the_twins(kind, width):
    """The twin adds up the kernel's masses, so that the sets must be equal."""
    scores = rows_of(kind, len(FILTERS), 20, width)
    sampling = sampling_of(FILTERS)
    got, expected = (scores >= function(scores, sampling) for function in (lowest_kept, lowest_kept_torch))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("poison", [torch.nan, -torch.nan, torch.inf])
def test_filters_end_on_rows_that_are_not_numbers(poison):
    scores = rows_of("normal", len(FILTERS), 4, 200)
    scores[:, :, ::7] = poison
    scores[:, 1] = poison
    scores.view(torch.int32)[:, 2, ::5] = -1  # NaN with the sign set, which orders below all numbers
    lowest_kept(scores, sampling_of(FILTERS))
    assert (choose(scores, positions_of(len(FILTERS), 4), sampling_of(FILTERS), FILTERED, None) == -1).all()


def test_kept_sets_of_rows_with_impossible_tokens_are_the_twins():
    scores = rows_of("normal", len(FILTERS), 20, 97)
    scores[:, :10, ::2] = -torch.inf
    scores[:, 10:, 3:] = -torch.inf
    sampling = sampling_of(FILTERS)
    got, expected = (scores >= function(scores, sampling) for function in (lowest_kept, lowest_kept_torch))
    assert torch.equal(got, expected)
    tokens = choose_cpu.choose(scores, positions_of(len(FILTERS), 20), None, sampling, FILTERED, False)
    assert (scores.gather(2, tokens[:, :, None]) > -torch.inf).all()


def test_masses_are_the_twins_but_for_the_last_place():
    scores = -torch.rand(3, 5, 1003, generator=torch.Generator().manual_seed(0)) * 40
    best = scores.amax(dim=2, keepdim=True)
    got, expected = masses(scores, best), masses_torch(scores, best)
    assert ((got - expected).abs() <= expected * 2.0**-22 + 1).all()
    assert (got.amax(dim=2) == MASS).all()
    assert torch.equal(masses(scores[1:2, 3:4], best[1:2, 3:4])[0, 0], got[1, 3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("features", [Features(), SAMPLED, FILTERED])
def test_choices_are_the_twins(kind, width, features):
    logits = rows_of(kind, len(FILTERS), 30, width)
    assert_same_choices(logits, positions_of(len(FILTERS), 30), sampling_of(FILTERS), features)


@pytest.mark.parametrize("temperature", [1e-44, 0.2, 1.0, 30.0])
def test_choices_at_any_temperature_are_the_twins(temperature):
    logits = rows_of("normal", 3, 40, 4099)
    sampling = sampling_of([Params(temperature=temperature, seed=seed) for seed in (0, 2**62, -5)])
    assert_same_choices(logits, positions_of(3, 40), sampling, SAMPLED)


@pytest.mark.parametrize("kind", ["normal", "ties", "flat", "far"])
def test_skipping_tokens_changes_no_choice(kind):
    """The kernel with every noise value computed gives exactly the same: the largest sum, lowest id on ties."""
    logits = rows_of(kind, 4, 300, 517)
    sampling = sampling_of([Params(temperature=t, seed=seed) for seed, t in enumerate([0.0, 0.5, 1.0, 4.0])])
    positions = positions_of(4, 300)
    sums = pick_scores(logits, positions, None, sampling, SAMPLED)
    assert torch.equal(choose(logits, positions, sampling, SAMPLED, None), sums.max(dim=2).indices)
    assert torch.equal(picked_of(logits, positions, None, sampling, SAMPLED), sums.max(dim=2).indices)


def test_noise_has_the_twins_bits_but_for_the_last_places():
    generator = torch.Generator().manual_seed(3)
    seeds = torch.randint(-(2**62), 2**62, (50,), generator=generator)
    sampling = sampling_of([Params(seed=seed) for seed in seeds.tolist()])
    positions = torch.randint(0, 2**40, (50, 4), generator=generator)
    ids = torch.randint(0, 2**31, (2003,), generator=generator)
    got = pick_scores(torch.zeros(50, 4, 2003), positions, ids, sampling, SAMPLED)
    expected = gumbel(seeds, positions, ids)
    torch.testing.assert_close(got, expected, rtol=5e-7, atol=5e-7)
    named = picked_of(torch.zeros(50, 4, 2003), positions, ids, sampling, SAMPLED)
    assert torch.equal(named, ids[got.max(dim=2).indices])


@pytest.mark.parametrize("bits", [0, 1, 2, 1000, 2**31, 2**32 - 129, 2**32 - 1])
def test_the_ends_of_the_noise_are_finite_and_right(bits):
    hashed = np.float32(bits) + np.float32(0.5)
    v = min(float(hashed) * 2.0**-32, 1 - 2.0**-24)
    got = noise_of_hash(hashed)
    assert got == pytest.approx(-np.log(-np.log1p(-v)), rel=4e-7, abs=4e-7)
    assert got <= bound_of_hash(hashed)
    assert got < 22.9


def test_the_bound_is_above_the_noise_everywhere():
    rng = np.random.default_rng(0)
    spread = 2.0 ** rng.uniform(-1, 32, 20_000)
    for hashed in spread.astype(np.float32):
        assert noise_of_hash(hashed) <= bound_of_hash(hashed)


@pytest.mark.parametrize("features", [Features(), SAMPLED, FILTERED])
@pytest.mark.parametrize("width", [1, 64, 131])
@pytest.mark.parametrize("poison", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_broken_rows_choose_nothing_and_harm_no_other(features, width, poison):
    logits = rows_of("normal", len(FILTERS), 2, width)
    positions, sampling = positions_of(len(FILTERS), 2), sampling_of(FILTERS)
    expected = choose(logits, positions, sampling, features, None)
    for place in {0, width // 2, width - 1}:
        broken = logits.clone()
        broken[::2, 1, place] = poison
        tokens = choose(broken, positions, sampling, features, None)
        assert (tokens[::2, 1] == -1).all()
        tokens[::2, 1] = expected[::2, 1]
        assert torch.equal(tokens, expected)
        picked = picked_of(broken, positions, None, sampling, features)
        assert ((picked >= 0) & (picked < width)).all()
    whole = torch.full_like(logits, poison)
    assert (choose(whole, positions, sampling, features, None) == -1).all()
    assert (picked_of(whole, positions, None, sampling, features) == 0).all()


@pytest.mark.parametrize("width", [65, 5000])  # below and above the work that more threads share
def test_a_node_gets_the_same_token_in_any_batch(width):
    logits = rows_of("normal", len(FILTERS), 6, width)
    positions, sampling = positions_of(len(FILTERS), 6), sampling_of(FILTERS)
    tokens = choose(logits, positions, sampling, FILTERED, None)
    sums = pick_scores(logits, positions, None, sampling, SAMPLED)
    lowest = lowest_kept(logits, sampling)
    for row, params in enumerate(FILTERS):
        for node in range(6):
            alone = logits[row : row + 1, node : node + 1], positions[row : row + 1, node : node + 1]
            assert choose(*alone, sampling_of([params]), FILTERED, None)[0, 0] == tokens[row, node]
            assert torch.equal(pick_scores(*alone, None, sampling_of([params]), SAMPLED)[0, 0], sums[row, node])
            assert torch.equal(lowest_kept(alone[0], sampling_of([params]))[0, 0], lowest[row, node])


def test_threads_change_nothing():
    logits = rows_of("peaked", len(FILTERS), 7, 3001)
    positions, sampling = positions_of(len(FILTERS), 7), sampling_of(FILTERS)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = choose(logits, positions, sampling, FILTERED, None)
        torch.set_num_threads(3)
        assert torch.equal(choose(logits, positions, sampling, FILTERED, None), alone)
    finally:
        torch.set_num_threads(before)


def test_views_give_the_tokens_of_their_copies():
    wide = rows_of("normal", len(FILTERS), 4, 300)
    positions, sampling = positions_of(len(FILTERS), 4), sampling_of(FILTERS)
    view = wide[:, ::2, 17:211]
    got = choose(view, positions[:, ::2], sampling, FILTERED, None)
    assert torch.equal(got, choose(view.clone(), positions[:, ::2].clone(), sampling, FILTERED, None))


@pytest.mark.parametrize("features", [Features(), SAMPLED])
def test_half_precision_takes_the_twin(features):
    logits = rows_of("normal", 2, 3, 40).bfloat16()
    sampling, positions = sampling_of([Params(seed=1), Params(seed=2)]), positions_of(2, 3)
    expected = choose_torch(logits, positions, sampling, features, None)
    assert torch.equal(choose(logits, positions, sampling, features, None), expected)
    assert torch.equal(picked_of(logits, positions, None, sampling, features), expected)


@pytest.mark.parametrize("width", [3, 16, 300, 4097])
def test_ranked_tokens_are_the_twins(width):
    """Falling, the lowest id of equals first, by target ids; the first is what is picked."""
    logits = 4 * torch.randn(5, 1, width, generator=torch.Generator().manual_seed(width))
    logits[1] = logits[1].round()  # with ties
    logits[2] = 0.0
    ids = torch.randperm(width, generator=torch.Generator().manual_seed(1)) + 7
    sampling = sampling_of([Params(seed=seed, temperature=0.8 * (seed % 2)) for seed in range(5)])
    for features, target_ids in ((Features(), None), (SAMPLED, ids)):
        positions = positions_of(5, 1)
        tokens, shares = ranked(logits, positions, target_ids, sampling, features, 3)
        scores = pick_scores(logits, positions, target_ids, sampling, features)[:, 0]
        expected = ranked_torch(scores, target_ids, 3)
        assert torch.equal(tokens, expected[0])
        torch.testing.assert_close(shares, expected[1], rtol=1e-4, atol=1e-7)
        assert torch.equal(tokens[:, :1], picked_of(logits, positions, target_ids, sampling, features))
    logits[3, 0, 1] = torch.nan
    tokens, shares = ranked(logits, positions, None, sampling, Features(), 3)
    assert shares[3].tolist() == [0.0, 0.0, 0.0]
    assert tokens.min() >= 0
    assert tokens.max() < width


@pytest.mark.parametrize("width", [1, 15, 16, 300, 4097])
def test_top_chances_are_the_twins(width):
    """One row or many, any width; what is not a number has no chance."""
    scores = 4 * torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    scores[2] = scores[2] * 1e-3
    scores[3, 0] = 1e30
    got = top_chances(scores)
    torch.testing.assert_close(got, top_chances_torch(scores), rtol=1e-5, atol=0)
    assert torch.equal(top_chances(scores[1:2]), got[1:2])
    scores[4, width // 2] = torch.nan
    assert top_chances(scores)[4] == top_chances_torch(scores)[4] == 0
    assert torch.equal(top_chances(scores)[:4], got[:4])
