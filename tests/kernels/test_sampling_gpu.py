"""Triton sampling against its twins, in the interpreter: equal tokens, with several spans and with faults."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.exact_sampling import Params, context_of, masks_of, sampling_of
from kernels.interpreted import needs_interpreter, send_to_triton
from peregrine.kernels.sampling.drafts import pick, pick_torch
from peregrine.kernels.sampling.noise import gumbel_torch
from peregrine.kernels.sampling.params import Context, Features, Masks
from peregrine.kernels.sampling.reference import adjust, choose, choose_torch, logprobs, logprobs_torch

pytestmark = needs_interpreter

GREEDY, SAMPLED = Features(), Features(sampled=True)
ROWS = [Params(temperature=t, seed=seed) for seed, t in enumerate([0.0, 0.3, 1.0, 1e-44])]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
VOCAB = 75  # with spans of 32: two whole ones and a part


@pytest.fixture(autouse=True)
def _short_spans(monkeypatch):
    """Make spans short, so that small vocabularies have several."""
    from peregrine.kernels.sampling import adjust_triton as adjust_gpu
    from peregrine.kernels.sampling import scores_triton as scores_gpu
    from peregrine.kernels.sampling import triton as choose_gpu

    send_to_triton(monkeypatch)
    for name, size in {"WHOLE": 64, "SPAN": 32, "NOISY_SPAN": 32}.items():
        monkeypatch.setattr(choose_gpu, name, size)
    for module in (adjust_gpu, scores_gpu):
        monkeypatch.setattr(module, "COUNT_SPAN", 32)


def logits_of(dtype, vocab_size=VOCAB, nodes=2):
    generator = torch.Generator().manual_seed(vocab_size)
    return (torch.randn(len(ROWS), nodes, vocab_size, generator=generator) * 3).to(dtype)


def positions_of(logits):
    return torch.arange(7, 7 + logits.shape[1]).expand(logits.shape[0], -1)


def assert_same(logits, sampling, features, context=None):
    """Choices are the twin's, with the kernel's noise and masses."""
    positions = positions_of(logits)
    got, expected = (f(logits, positions, sampling, features, context) for f in (choose, choose_torch))
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("features", [GREEDY, SAMPLED])
@pytest.mark.parametrize("vocab_size", [1, 32, 64, VOCAB])
def test_choices_are_the_twins(dtype, features, vocab_size):
    assert_same(logits_of(dtype, vocab_size), sampling_of(ROWS), features)


@given(values=st.lists(st.sampled_from([-1.5, -0.0, 0.0, 1.0, 2.5]), min_size=1, max_size=100))
@settings(max_examples=25)
def test_the_lowest_id_wins_among_equals(values):
    logits = torch.tensor(values)[None, None]
    assert choose(logits, torch.zeros(1, 1).long(), sampling_of(ROWS[:1]), GREEDY, None).item() == values.index(
        max(values)
    )


@pytest.mark.parametrize("features", [GREEDY, SAMPLED, Features(sampled=True, filtered=True)])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_broken_nodes_choose_nothing_and_harm_no_other(features, poison):
    logits, sampling = logits_of(torch.bfloat16), sampling_of(ROWS)
    expected = choose(logits, positions_of(logits), sampling, features, None)
    for place in (0, 40, VOCAB - 1):
        broken = logits.clone()
        broken[::2, 1, place] = poison
        tokens = choose(broken, positions_of(logits), sampling, features, None)
        assert (tokens[::2, 1] == -1).all()
        tokens[::2, 1] = expected[::2, 1]
        assert torch.equal(tokens, expected)
        picked = torch.empty_like(tokens)
        pick(broken, positions_of(logits), None, sampling, features, picked)
        assert ((picked >= 0) & (picked < VOCAB)).all()


@pytest.mark.parametrize("vocab_size", [64, VOCAB])
@pytest.mark.parametrize("features", [GREEDY, SAMPLED])
def test_a_row_gets_the_same_tokens_in_any_batch(vocab_size, features):
    logits = logits_of(torch.float32, vocab_size)
    together = choose(logits, positions_of(logits), sampling_of(ROWS), features, None)
    for row, params in enumerate(ROWS):
        for node in range(2):
            alone = logits[row : row + 1, node : node + 1], positions_of(logits)[:1, node : node + 1]
            assert choose(*alone, sampling_of([params]), features, None).item() == together[row, node]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("features", [GREEDY, SAMPLED])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("vocab_size", [40, VOCAB])
def test_picks_are_target_ids(dtype, features, named, vocab_size):
    logits, sampling = logits_of(dtype, vocab_size, nodes=1), sampling_of(ROWS)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randperm(1000, generator=generator)[:vocab_size].sort().values if named else None
    got, expected = torch.empty(2, len(ROWS), 1, dtype=torch.int64)
    pick(logits, positions_of(logits), ids, sampling, features, got)
    pick_torch(logits, positions_of(logits), ids, sampling, features, expected)
    assert torch.equal(got, expected)


def test_views_give_the_tokens_of_their_copies():
    wide = logits_of(torch.float32, 200, nodes=4)
    view, sampling = wide[:, ::2, 17:99], sampling_of(ROWS)
    got = choose(view, positions_of(view), sampling, SAMPLED, None)
    assert torch.equal(got, choose(view.clone(), positions_of(view).clone(), sampling, SAMPLED, None))


EVERYTHING = Features(sampled=True, filtered=True, penalised=True, biased=True, min_len=True, masked=True)
MASKED_ROWS = [1, 0, 0, 1, 0, 0, 1, 0, 1]
DEMANDING = [
    Params(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01, repetition=1.2, seed=1),
    Params(temperature=1.0, presence=0.5, frequency=0.2, bias={3: 4.0, 70: -2.0}, seed=2),
    Params(temperature=1.3, top_p=0.8, stops=(5, 6), min_len=100, seed=3),
    Params(temperature=0.0, repetition=1.5),
    Params(temperature=0.9, top_p=0.7, bias={0: 2.0, 74: 3.0}, seed=4),
    Params(temperature=0.9, top_p=0.7, seed=5),
    Params(temperature=1.0, top_k=4, seed=6),
    Params(temperature=1.0, seed=7),
    Params(temperature=0.0),
]


def demanded(nodes=3):
    """The rows' parameters, some with masks."""
    return replace(sampling_of(DEMANDING), masks=masks_of(MASKED_ROWS, nodes, VOCAB))


def demanding(dtype, nodes=3):
    """Logits, positions and context for the rows above; a prompt, an output and a tree in every row."""
    count = len(DEMANDING)
    logits = (torch.randn(count, nodes, VOCAB, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    context = context_of([[1, 2, 3]] * count, [[4, 5, 5]] * count, [[5, 6, 70]] * count, [[1, 3, 5]] * count)
    return logits, positions_of(logits), context


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_part_of_sampling_at_once(dtype):
    logits, positions, context = demanding(dtype)
    got, expected = (f(logits, positions, demanded(), EVERYTHING, context) for f in (choose, choose_torch))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_adjusted_scores_are_the_twins(dtype):
    from peregrine.kernels.sampling import adjust_triton as adjust_gpu

    logits, positions, context = demanding(dtype)
    found = adjust_gpu.adjust(logits, positions, demanded(), EVERYTHING, context)
    expected = adjust(logits, positions, demanded(), EVERYTHING, context)
    assert found.rows.tolist() == [1, 1, 1, 1, 1, 0, 1, 0, 1]
    adjusted = found.rows.bool()
    assert torch.equal(found.scores.view_as(expected)[adjusted], expected[adjusted])
    assert (expected == -torch.inf).any(dim=2)[MASKED_ROWS.index(1)].all()


@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_a_rows_token_does_not_depend_on_other_rows_features(dtype):
    """A row alone runs only the kernels it needs; beside the others it runs all of them."""
    logits, positions, context = demanding(dtype)
    together = choose(logits, positions, demanded(), EVERYTHING, context)
    for row, params in enumerate(DEMANDING):
        one = slice(row, row + 1)
        own = Features(
            sampled=params.temperature > 0,
            filtered=bool(params.temperature and (params.top_k or params.top_p < 1 or params.min_p)),
            penalised=bool(params.repetition != 1 or params.presence or params.frequency),
            biased=bool(params.bias),
            min_len=params.min_len > 0,
            masked=bool(MASKED_ROWS[row]),
        )
        masks = masks_of(MASKED_ROWS, 3, VOCAB)
        params_alone = replace(sampling_of([params]), masks=Masks(masks.rows[one], masks.words[one]))
        before = Context(*(getattr(context, field.name)[one] for field in fields(context)))
        alone = choose(logits[one], positions[one], params_alone, own, before)
        assert torch.equal(alone, together[one])


def test_masks_may_be_the_first_of_longer_windows():
    logits, positions, context = demanding(torch.bfloat16)
    expected = choose(logits, positions, demanded(), EVERYTHING, context)
    masks = demanded().masks
    longer = torch.cat((masks.words, torch.zeros_like(masks.words)), dim=1)
    part = replace(demanded(), masks=Masks(masks.rows, longer[:, : masks.words.shape[1]]))
    assert torch.equal(choose(logits, positions, part, EVERYTHING, context), expected)


def test_adjusted_rows_that_are_not_finite_choose_nothing():
    logits, positions, context = demanding(torch.bfloat16)
    expected = choose(logits, positions, demanded(), EVERYTHING, context)
    logits[::2, 1, 44] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan, torch.inf], dtype=torch.bfloat16)
    got = choose(logits, positions, demanded(), EVERYTHING, context)
    assert (got[::2, 1] == -1).all()
    got[::2, 1] = expected[::2, 1]
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("on_path", [False, True])
def test_logprobs_are_the_twins_in_rows_that_request_them(dtype, on_path):
    logits, _, _ = demanding(dtype, nodes=3 if on_path else 2)
    count, asked = len(DEMANDING), torch.tensor([3, -1, 0, 7, -1, 7, 1, 2, -1])
    path = torch.tensor([[0, 2]]).expand(count, -1) if on_path else None
    tokens = torch.arange(2 * count).view(count, 2)
    got, expected = logprobs(logits, tokens, path, asked, 7), logprobs_torch(logits, tokens, path, 7)
    for row, num in enumerate(asked.tolist()):
        if num >= 0:
            torch.testing.assert_close(got[0][row], expected[0][row], atol=1e-6, rtol=0)
            assert torch.equal(got[1][row, :, :num], expected[1][row, :, :num])
            torch.testing.assert_close(got[2][row, :, :num], expected[2][row, :, :num], atol=1e-6, rtol=0)
    alone = logprobs(logits[3:4], tokens[3:4], None if path is None else path[3:4], None, 7)
    assert all(torch.equal(one[0], all_rows[3]) for one, all_rows in zip(alone, got, strict=True))


def test_noise_is_the_twins():
    """With equal logits the chosen token is the one with the largest noise: the twin's."""
    sampling = sampling_of([Params(seed=seed) for seed in (0, 2**62, -5)])
    positions = torch.tensor([[0, 1, 2**40]]).expand(3, -1)
    got = choose(torch.zeros(3, 3, VOCAB), positions, sampling, SAMPLED, None)
    assert torch.equal(got, gumbel_torch(sampling.seeds, positions, torch.arange(VOCAB)).argmax(dim=2))
