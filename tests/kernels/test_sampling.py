"""Sampling through its public functions: draws, order of steps, neutral values, faults, and independence of rows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.exact_sampling import Params, assert_drawn_from, context_of, distribution, legal_at, masks_of, sampling_of
from peregrine.errors import EngineFault
from peregrine.kernels.sampling.drafts import pick_scores
from peregrine.kernels.sampling.reference import Context, Features, choose, choose_torch, logprobs, process

ALL = Features(sampled=True, filtered=True, penalised=True, biased=True, min_len=True)
LOGITS = np.array([1.0, 2.5, -0.5, 0.3, 2.0, 1.5, -2.0, 0.9, 1.1])
PROMPT, OUTPUT, DRAFT = [1, 4, 7], [5, 5, 4, 0], 5  # DRAFT is an ancestor of every sampled node

PARAMS = {
    "cold": Params(temperature=0.5),
    "plain": Params(),
    "hot": Params(temperature=2.0),
    "top_k": Params(top_k=3),
    "top_p": Params(top_p=0.7),
    "min_p": Params(min_p=0.3),
    "repetition": Params(repetition=1.8),
    "presence": Params(presence=1.2),
    "frequency": Params(frequency=0.6),
    "bias": Params(bias={3: 2.0, 1: -1.5}),
    "min_len": Params(stops=(1, 4), min_len=10**6),
    "filters": Params(temperature=0.8, top_k=6, top_p=0.9, min_p=0.05),
    "penalties": Params(temperature=1.3, repetition=1.2, presence=0.4, frequency=0.3),
    "all": Params(1.1, 7, 0.93, 0.02, 1.3, 0.3, 0.2, bias={0: 0.7, 8: 1.0}, stops=(5,), min_len=10**6),
}


def window(num_rows, num_nodes, vocab_size, seed=0):
    """Random logits, positions and a chain context for R rows of T nodes."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, num_nodes, vocab_size, generator=generator) * 2
    past = torch.randint(5, 50, (num_rows, 1), generator=generator)
    context = Context(
        history=torch.randint(0, vocab_size, (num_rows, 60), generator=generator),
        prompt_lens=past[:, 0] // 2,
        lens=past[:, 0] + 1,
        window_tokens=torch.randint(0, vocab_size, (num_rows, num_nodes), generator=generator),
        ancestors=((2 << torch.arange(num_nodes)) - 1).expand(num_rows, num_nodes),
    )
    return logits, past + 1 + torch.arange(num_nodes), context


def mixed_rows():
    """One row per entry of PARAMS and two greedy rows, each with its own seed."""
    rows = [*PARAMS.values(), Params(temperature=0.0), Params(temperature=0.0, repetition=1.4, bias={2: 3.0})]
    return [replace(params, seed=11 * index, min_len=min(params.min_len, 30)) for index, params in enumerate(rows)]


def draws(params, num_rows=400, num_nodes=50):
    """20,000 tokens chosen from LOGITS under other seeds and positions."""
    rows = [replace(params, seed=seed if seed % 2 else seed * 0x1F3_5A7B_9C2D) for seed in range(num_rows)]
    context = context_of(
        [PROMPT] * num_rows,
        [OUTPUT] * num_rows,
        [[OUTPUT[-1], DRAFT] + [2] * (num_nodes - 2)] * num_rows,
        [[0b11] * num_nodes] * num_rows,
    )
    logits = torch.from_numpy(LOGITS).float().expand(num_rows, num_nodes, -1)
    positions = torch.arange(100, 100 + num_nodes).expand(num_rows, -1)
    return choose(logits, positions, sampling_of(rows), ALL, context)


@pytest.mark.parametrize("name", PARAMS)
def test_tokens_are_drawn_from_the_exact_distribution(name):
    expected = distribution(LOGITS, PARAMS[name], 100, PROMPT, [*OUTPUT, DRAFT])
    assert_drawn_from(draws(PARAMS[name]), expected)


@pytest.mark.parametrize(("num_rows", "num_nodes"), [(1, 20_000), (20_000, 1)])
def test_one_seed_or_one_position_is_enough(num_rows, num_nodes):
    sampling = sampling_of([Params(seed=seed) for seed in range(num_rows)])
    logits = torch.from_numpy(LOGITS).float().expand(num_rows, num_nodes, -1)
    positions = torch.arange(num_nodes).expand(num_rows, -1)
    tokens = choose(logits, positions, sampling, Features(sampled=True), None)
    assert_drawn_from(tokens, distribution(LOGITS, Params()))


def test_one_after_the_other_is_independent():
    """Pairs of tokens at neighbouring positions are draws from the product distribution."""
    tokens = draws(Params(temperature=1.5), num_rows=800).numpy()
    single = distribution(LOGITS, Params(temperature=1.5))
    assert_drawn_from(tokens[:, 0::2] * len(LOGITS) + tokens[:, 1::2], np.outer(single, single).ravel())


@pytest.mark.parametrize("features", [Features(), ALL])
def test_greedy_takes_the_largest_and_the_lowest_id_on_ties(features):
    logits = torch.zeros(1, 3, 1003)
    logits[0, 0, [900, 17, 500]] = 2.0
    logits[0, 1, 1002] = 1.0
    _, positions, context = window(1, 3, 1003)
    tokens = choose(logits, positions, sampling_of([Params(temperature=0.0)]), features, context)
    assert tokens.tolist() == [[17, 1002, 0]]


@pytest.mark.parametrize("features", [Features(), Features(sampled=True), ALL])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_chooses_nothing_and_harms_no_other(features, poison):
    logits, positions, context = window(3, 4, 37)
    sampling = sampling_of([Params(seed=3, top_k=5, top_p=0.9, repetition=1.2)] * 3)
    expected = choose(logits, positions, sampling, features, context)
    assert (expected >= 0).all()
    for token in (0, 20, 36):
        broken = logits.clone()
        broken[1, 2, token] = poison
        tokens = choose(broken, positions, sampling, features, context)
        assert tokens[1, 2] == -1
        tokens[1, 2] = expected[1, 2]
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("by_torch", [False, True], ids=["kernel", "twin"])
def test_masks_drop_illegal_tokens_before_filters_and_leave_other_rows_alone(by_torch):
    """Greedy: the best legal token. Sampled with filters: as if the others' logits were far below."""
    logits, positions, context = window(4, 3, 101)
    chooses = choose_torch if by_torch else choose
    rows = [Params(temperature=0.0), Params(temperature=0.0), Params(seed=4, top_k=3, top_p=0.9), Params(seed=5)]
    masks = masks_of([1, 0, 1, 0], 3, 101)
    sampling = sampling_of(rows)
    masked = replace(ALL, masked=True)
    tokens = chooses(logits, positions, replace(sampling, masks=masks), masked, context)
    legal = torch.tensor([[legal_at(masks, row, node, 101) for node in range(3)] for row in range(4)])
    far = torch.where(legal, logits, torch.tensor(-1e30))
    assert torch.equal(tokens, chooses(far, positions, sampling, ALL, context))
    assert tokens[0].tolist() == far[0].argmax(dim=1).tolist()
    assert torch.equal(tokens[[1, 3]], chooses(logits, positions, sampling, ALL, context)[[1, 3]])
    assert not legal.all()
    logits[2, 1, 7] = torch.nan  # faults are judged on raw logits, legal or not
    assert chooses(logits, positions, replace(sampling, masks=masks), masked, context)[2, 1] == -1


@pytest.mark.parametrize("function", [choose, choose_torch])
@pytest.mark.parametrize("poison", [0x7FC00000, -0x400000, 0x7F800000, -0x800000], ids=["nan", "-nan", "inf", "-inf"])
def test_rows_that_are_partly_not_finite_end_under_every_parameter(function, poison):
    """NaN with its sign set orders below all numbers, and once kept the search for top-p going for ever."""
    rows = mixed_rows()
    logits, positions, context = window(len(rows), 4, 300)
    sampling = sampling_of(rows)
    expected = function(logits, positions, sampling, ALL, context)
    broken = logits.clone()
    bits = broken.view(torch.int32)
    bits[:, 1, ::3] = poison
    bits[:, 2, context.history[0, :20]] = poison
    bits[:, 3, 299] = poison
    tokens = function(broken, positions, sampling, ALL, context)
    assert (tokens[:, 1:] == -1).all()
    assert torch.equal(tokens[:, 0], expected[:, 0])


@pytest.mark.parametrize("function", [choose, choose_torch])
@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 3}, {"top_k": 9, "top_p": 0.5, "min_p": 0.1}, {}])
def test_scores_that_overflow_end_with_a_token(function, filters):
    """A logit over a tiny penalty is inf, and a stop id is kept from being chosen all the same."""
    logits, positions, context = window(1, 4, 300)
    stops = tuple(context.history[0, :4].tolist())
    sampling = sampling_of([Params(repetition=1e-45, stops=stops, min_len=10**6, **filters)])
    tokens = function(logits, positions, sampling, ALL, context)
    assert ((tokens >= 0) & (tokens < 300)).all()
    assert not set(tokens.flatten().tolist()) & set(stops)


def test_finite_extremes_are_not_a_fault():
    logits = torch.tensor([[[3.4e38, -3.4e38, 0.0]]])
    positions = torch.zeros(1, 1, dtype=torch.int64)
    assert choose(logits, positions, sampling_of([Params(temperature=0.0)]), Features(), None).tolist() == [[0]]


@pytest.mark.parametrize("part", ["sampled", "filtered", "penalised", "biased", "min_len"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_unused_feature_changes_no_bit(part, temperature):
    logits, positions, context = window(4, 3, 101)
    logits[:, :, 0] = -0.0
    base = Features(sampled=temperature > 0)
    sampling = sampling_of([Params(temperature=temperature, seed=5)] * 4)
    before = process(logits, positions, sampling, base, context)
    after = process(logits, positions, sampling, replace(base, **{part: True}), context)
    assert torch.equal(before.view(torch.int32), after.view(torch.int32))
    expected = choose(logits, positions, sampling, base, context)
    assert torch.equal(choose(logits, positions, sampling, replace(base, **{part: True}), context), expected)


@pytest.mark.parametrize("vocab_size", [9, 64, 1003])
def test_bits_do_not_depend_on_the_batch(vocab_size):
    rows = mixed_rows()
    logits, positions, context = window(len(rows), 5, vocab_size)
    scores = process(logits, positions, sampling_of(rows), ALL, context)
    tokens = choose(logits, positions, sampling_of(rows), ALL, context)
    picks = pick_scores(logits, positions, None, sampling_of(rows), ALL)
    for row, params in enumerate(rows):
        for node in range(5):
            # The node alone: its drafted ancestors are committed, and it is the root.
            output = context.window_tokens[row : row + 1, 1 : node + 1]
            history = torch.cat([context.history[row : row + 1, : context.lens[row]], output], dim=1)
            lens = torch.tensor([history.shape[1]])
            root = torch.ones(1, 1, dtype=torch.int64)
            before = Context(history, context.prompt_lens[row : row + 1], lens, history[:, -1:], root)
            alone = (logits[row : row + 1, node : node + 1], positions[row : row + 1, node : node + 1])
            assert torch.equal(process(*alone, sampling_of([params]), ALL, before)[0, 0], scores[row, node])
            assert choose(*alone, sampling_of([params]), ALL, before)[0, 0] == tokens[row, node]
            assert torch.equal(pick_scores(*alone, None, sampling_of([params]), ALL)[0, 0], picks[row, node])


def test_the_seed_and_the_position_decide():
    logits = torch.zeros(2, 8, 1000)
    positions = torch.arange(8).expand(2, -1)
    sampled = Features(sampled=True)
    tokens = choose(logits, positions, sampling_of([Params(seed=1), Params(seed=2)]), sampled, None)
    assert len(set(tokens.ravel().tolist())) > 12
    moved = choose(logits, positions + 3, sampling_of([Params(seed=1), Params(seed=2)]), sampled, None)
    assert torch.equal(moved[:, :5], tokens[:, 3:])


def test_stop_ids_wait_for_min_len():
    logits = torch.zeros(2, 4, 10)
    logits[:, :, 7] = 9.0
    logits[:, :, 2] = 8.0
    logits[:, :, 5] = 1.0
    positions = torch.arange(10, 14).expand(2, -1)
    greedy = Params(temperature=0.0, stops=(7, 2))
    sampling = sampling_of([replace(greedy, min_len=12), greedy])
    tokens = choose(logits, positions, sampling, Features(min_len=True), None)
    assert tokens.tolist() == [[5, 5, 7, 7], [7, 7, 7, 7]]


def test_bias_comes_before_penalties_and_temperature():
    logits = torch.tensor([[[1.0, 3.0, 0.0, 0.0]]])
    context = context_of([[0, 1]], [[2]], [[2]], [[1]])
    sampling = sampling_of([Params(temperature=0.5, repetition=2.0, presence=0.25, bias={0: -5.0, 3: 1.0})])
    got = process(logits, torch.tensor([[3]]), sampling, ALL, context)
    assert got.tolist() == [[[(1 - 5) * 2 / 0.5, 3 / 2 / 0.5, -0.25 / 0.5, 1 / 0.5]]]


def test_the_lowest_temperatures_take_the_largest():
    logits, positions, _ = window(1, 6, 50)
    rows = [Params(temperature=temperature) for temperature in (1e-6, 1e-38, 1e-44)]
    tokens = choose(
        logits.expand(3, -1, -1),
        positions.expand(3, -1),
        sampling_of(rows),
        Features(sampled=True, filtered=True),
        None,
    )
    assert torch.equal(tokens, logits.argmax(dim=2).expand(3, -1))


def test_penalties_without_a_context_are_refused():
    logits, positions, _ = window(1, 1, 5)
    with pytest.raises(EngineFault, match="context=None"):
        choose(logits, positions, sampling_of([Params()]), Features(penalised=True), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_left_as_they_were(dtype):
    rows = mixed_rows()
    logits, positions, context = window(len(rows), 3, 40)
    logits = logits.to(dtype)
    given = logits.clone()
    choose(logits, positions, sampling_of(rows), ALL, context)
    pick_scores(logits, positions, None, sampling_of(rows), ALL)
    logprobs(logits, torch.zeros(len(rows), 3, dtype=torch.int64), None, None, 2)
    assert torch.equal(logits, given)
    assert process(logits, positions, sampling_of(rows), ALL, context).dtype == torch.float32


def test_picks_are_the_targets_choices_when_the_logits_are():
    rows = [Params(temperature=t, seed=seed) for seed, t in enumerate([0.0, 0.3, 1.0, 2.0])]
    logits, positions, _ = window(4, 30, 211)
    sampled = Features(sampled=True)
    chosen = choose(logits, positions, sampling_of(rows), sampled, None)
    picks = pick_scores(logits, positions, None, sampling_of(rows), sampled)
    assert torch.equal(picks.argmax(dim=2), chosen)
    assert torch.equal(picks[0], logits[0])
    order = torch.randperm(211, generator=torch.Generator().manual_seed(2))
    picks = pick_scores(logits[:, :, order], positions, order, sampling_of(rows), sampled)
    assert torch.equal(order[picks.argmax(dim=2)], chosen)


def test_picks_from_half_a_vocabulary_agree_where_they_can():
    logits, positions, _ = window(1, 200, 100)
    sampling, sampled = sampling_of([Params(seed=4)]), Features(sampled=True)
    chosen = choose(logits, positions, sampling, sampled, None)
    half = torch.arange(0, 100, 2)
    picks = half[pick_scores(logits[:, :, half], positions, half, sampling, sampled).argmax(dim=2)]
    even = chosen % 2 == 0
    assert 50 < even.sum() < 150
    assert torch.equal(picks[even], chosen[even])


def test_greedy_picks_are_the_logits():
    logits, positions, _ = window(2, 3, 9)
    assert torch.equal(pick_scores(logits, positions, None, sampling_of([Params()] * 2), Features()), logits)


@pytest.mark.parametrize("top_n", [0, 1, 5])
def test_logprobs_are_those_of_the_raw_logits(top_n):
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 3
    chosen = torch.arange(6)
    got, top_ids, top = (x[:, 0] for x in logprobs(logits[:, None], chosen[:, None], None, None, top_n))
    exact = logits.double().log_softmax(dim=1)
    assert torch.allclose(got.double(), exact[chosen, chosen], atol=1e-6)
    assert (top_ids.shape, top.shape) == ((6, top_n), (6, top_n))
    assert torch.equal(top_ids, logits.topk(top_n).indices)
    assert torch.allclose(top.double(), exact.gather(1, top_ids), atol=1e-6)
    for row in range(6):
        alone = logprobs(logits[None, row : row + 1], chosen[None, row : row + 1], None, None, top_n)
        assert torch.equal(alone[0][0, 0], got[row])
        assert torch.equal(alone[2][0, 0], top[row])


def test_logprobs_put_the_lowest_id_first_among_equals():
    logits = torch.tensor([[0.0, -1.0, 2.0, -0.0, 2.0, 0.0, -1.0]])
    _, ids, _ = logprobs(logits[None], torch.tensor([[0]]), None, None, 7)
    assert ids.tolist() == [[[2, 4, 0, 3, 5, 1, 6]]]


def test_logprobs_are_those_of_the_nodes_on_the_path():
    logits = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(1))
    path, tokens = torch.tensor([[0, 3, 4], [0, 1, 2]]), torch.tensor([[7, 8, 9], [1, 2, 3]])
    straight = torch.stack([logits[0, path[0]], logits[1, path[1]]])
    got, expected = logprobs(logits, tokens, path, None, 4), logprobs(straight, tokens, None, None, 4)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_logprobs_of_a_fault_stay_in_bounds():
    logits = torch.tensor([[1.0, torch.nan, 0.0], [1.0, 2.0, 0.0]])
    got, ids, _ = (x[0] for x in logprobs(logits[None], torch.tensor([[-1, 1]]), None, None, 2))
    assert torch.isnan(got[0])
    assert ids[1].tolist() == [1, 0]
    assert ((ids >= 0) & (ids < 3)).all()
