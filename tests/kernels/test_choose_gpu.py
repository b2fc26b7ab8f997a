"""The Triton choosing law against its twins, in the interpreter: the same tokens, spans and faults included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.exact_law import Params, context_of, law_of
from kernels.interpreted import needs_interpreter, send_to_triton
from peregrine.kernels.sampling.noise import gumbel
from peregrine.kernels.sampling.reference import Features, choose, choose_torch, pick, pick_scores_torch, pick_torch

pytestmark = needs_interpreter

GREEDY, SAMPLED = Features(), Features(sampled=True)
ROWS = [Params(temperature=t, seed=seed) for seed, t in enumerate([0.0, 0.3, 1.0, 1e-44])]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
VOCAB = 75  # with spans of 32: two whole ones and a part


@pytest.fixture(autouse=True)
def _short_spans(monkeypatch):
    """Cut small vocabularies as large ones are."""
    from peregrine.kernels.sampling import triton as choose_gpu

    send_to_triton(monkeypatch)
    for name, size in {"WHOLE": 64, "SPAN": 32, "NOISY_SPAN": 32}.items():
        monkeypatch.setattr(choose_gpu, name, size)


def logits_of(dtype, vocab_size=VOCAB, nodes=2):
    generator = torch.Generator().manual_seed(vocab_size)
    return (torch.randn(len(ROWS), nodes, vocab_size, generator=generator) * 3).to(dtype)


def positions_of(logits):
    return torch.arange(7, 7 + logits.shape[1]).expand(logits.shape[0], -1)


def assert_same(logits, law, features, context=None):
    """Greedy choices are the twin's; sampled ones may differ where two sums differ in the last places only."""
    positions = positions_of(logits)
    got, expected = (f(logits, positions, law, features, context) for f in (choose, choose_torch))
    assert got.dtype == expected.dtype
    apart = got != expected
    if apart.any():
        assert features.sampled
        sums = pick_scores_torch(logits, positions, None, law).double()
        gaps = sums.gather(2, expected[:, :, None]) - sums.gather(2, got[:, :, None])
        assert (gaps[:, :, 0].abs()[apart] < 1e-5).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("features", [GREEDY, SAMPLED])
@pytest.mark.parametrize("vocab_size", [1, 32, 64, VOCAB])
def test_choices_are_the_twins(dtype, features, vocab_size):
    assert_same(logits_of(dtype, vocab_size), law_of(ROWS), features)


@given(values=st.lists(st.sampled_from([-1.5, -0.0, 0.0, 1.0, 2.5]), min_size=1, max_size=100))
@settings(max_examples=25)
def test_the_lowest_id_wins_among_equals(values):
    logits = torch.tensor(values)[None, None]
    assert choose(logits, torch.zeros(1, 1).long(), law_of(ROWS[:1]), GREEDY, None).item() == values.index(max(values))


@pytest.mark.parametrize("features", [GREEDY, SAMPLED, Features(sampled=True, filtered=True)])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_broken_nodes_choose_nothing_and_harm_nobody(features, poison):
    logits, law = logits_of(torch.bfloat16), law_of(ROWS)
    expected = choose(logits, positions_of(logits), law, features, None)
    for place in (0, 40, VOCAB - 1):
        broken = logits.clone()
        broken[::2, 1, place] = poison
        tokens = choose(broken, positions_of(logits), law, features, None)
        assert (tokens[::2, 1] == -1).all()
        tokens[::2, 1] = expected[::2, 1]
        assert torch.equal(tokens, expected)
        picked = torch.empty_like(tokens)
        pick(broken, positions_of(logits), None, law, features, picked)
        assert ((picked >= 0) & (picked < VOCAB)).all()


@pytest.mark.parametrize("vocab_size", [64, VOCAB])
@pytest.mark.parametrize("features", [GREEDY, SAMPLED])
def test_a_row_is_chosen_alike_in_any_company(vocab_size, features):
    logits = logits_of(torch.float32, vocab_size)
    together = choose(logits, positions_of(logits), law_of(ROWS), features, None)
    for row, params in enumerate(ROWS):
        for node in range(2):
            alone = logits[row : row + 1, node : node + 1], positions_of(logits)[:1, node : node + 1]
            assert choose(*alone, law_of([params]), features, None).item() == together[row, node]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("features", [GREEDY, SAMPLED])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("vocab_size", [40, VOCAB])
def test_picks_are_target_ids(dtype, features, named, vocab_size):
    logits, law = logits_of(dtype, vocab_size, nodes=1), law_of(ROWS)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(1000, generator=generator)[:vocab_size].sort().values if named else None
    got, expected = torch.empty(2, len(ROWS), 1, dtype=torch.int64)
    pick(logits, positions_of(logits), ids, law, features, got)
    pick_torch(logits, positions_of(logits), ids, law, features, expected)
    assert torch.equal(got, expected)


def test_views_are_chosen_from_like_their_copies():
    wide = logits_of(torch.float32, 200, nodes=4)
    view, law = wide[:, ::2, 17:99], law_of(ROWS)
    got = choose(view, positions_of(view), law, SAMPLED, None)
    assert torch.equal(got, choose(view.clone(), positions_of(view).clone(), law, SAMPLED, None))


def test_every_part_of_the_law_at_once():
    rows = [
        Params(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, repetition=1.2, seed=1),
        Params(temperature=1.0, presence=0.5, frequency=0.2, bias={3: 4.0, 70: -2.0}, seed=2),
        Params(temperature=1.3, top_p=0.8, stops=(5, 6), min_len=100, seed=3),
        Params(temperature=0.0, repetition=1.5),
    ]
    everything = Features(sampled=True, filtered=True, penalised=True, biased=True, min_len=True)
    context = context_of([[1, 2, 3]] * 4, [[4, 5]] * 4, [[5, 6]] * 4, [[1, 3]] * 4)
    assert_same(logits_of(torch.float32), law_of(rows), everything, context)
    assert_same(logits_of(torch.bfloat16), law_of(rows), everything, context)


def test_noise_is_the_twins():
    """Where all logits are equal the sums are the noise: its largest is at the twin's place, nearly every time."""
    law = law_of([Params(seed=seed) for seed in (0, 2**62, -5)])
    positions = torch.tensor([[0, 1, 2**40]]).expand(3, -1)
    got = choose(torch.zeros(3, 3, VOCAB), positions, law, SAMPLED, None)
    assert torch.equal(got, gumbel(law.seeds, positions, torch.arange(VOCAB)).argmax(dim=2))
