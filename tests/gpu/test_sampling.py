"""Sampling, the verdict and the round's bookkeeping on a GPU, at real sizes: kernels against their twins on the same
device, rows in any batch bit for bit, captured against eager, draws against the softmax."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.exact_sampling import Params, sampling_of
from peregrine.kernels.round.drafts import keep_drafts, keep_drafts_torch, move_path, move_path_torch
from peregrine.kernels.round.ngram import find_repeats, find_repeats_torch
from peregrine.kernels.round.places import (
    ahead_places,
    ahead_places_torch,
    path_places,
    path_places_torch,
    window_places,
    window_places_torch,
)
from peregrine.kernels.round.tree import Frontier, Growth, grow, grow_torch, select, select_torch
from peregrine.kernels.round.verdict import HEADER, Ends, Nodes, Verdict, commit, commit_torch
from peregrine.kernels.sampling import adjust_triton, reference
from peregrine.kernels.sampling.drafts import pick, pick_torch
from peregrine.kernels.sampling.filters import divisors, lowest_kept_torch
from peregrine.kernels.sampling.filters_triton import lowest_kept
from peregrine.kernels.sampling.params import Context, Features, SamplingTensors
from peregrine.kernels.sampling.reference import adjust, choose, choose_torch, logprobs, logprobs_torch
from peregrine.synthetic.accept import bend_choices, bend_choices_torch

VOCAB_SIZES = (128_256, 32_000, 151_936)
NODES = ((1, 1), (1, 4), (8, 4), (128, 1), (4, 32))  # rows, nodes
HALF = [torch.bfloat16, torch.float16]
VARIANTS = {
    "greedy": Features(),
    "sampled": Features(sampled=True),
    "filtered": Features(sampled=True, filtered=True),
    "penalties": Features(sampled=True, penalised=True),
    "everything": Features(sampled=True, filtered=True, penalised=True, biased=True, min_len=True),
}


def generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def logits_of(rows: int, nodes: int, vocab_size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    drawn = torch.randn(rows, nodes, vocab_size, device="cuda", generator=generator(seed + vocab_size))
    return (drawn * 3).to(dtype)


def on_gpu(values: Any) -> Any:
    """A copy of a dataclass with its tensors on the GPU."""
    given = {field.name: getattr(values, field.name) for field in fields(values)}
    return replace(values, **{name: value.cuda() for name, value in given.items() if value is not None})


def params_of(rows: int) -> list[Params]:
    """Parameters of `rows` rows that cycle through every sampling feature."""
    some = [
        Params(temperature=0.0),
        Params(temperature=0.7, top_p=0.9),
        Params(temperature=1.0, top_k=40),
        Params(temperature=1.3, min_p=0.05, bias={7: 2.0, 11: -3.0}),
        Params(temperature=1.0, top_k=50, top_p=0.95, repetition=1.2),
        Params(temperature=0.8, presence=0.5, frequency=0.3, stops=(5, 9), min_len=10_000),
        Params(temperature=1.0),
    ]
    return [replace(some[row % len(some)], seed=row * 7919 - 3) for row in range(rows)]


def gpu_sampling(rows: int) -> SamplingTensors:
    sampling: SamplingTensors = on_gpu(sampling_of(params_of(rows)))
    return sampling


def positions_of(rows: int, nodes: int) -> Tensor:
    return torch.arange(rows, device="cuda")[:, None] * 17 + torch.arange(1, nodes + 1, device="cuda")


def context_of(rows: int, nodes: int, vocab_size: int) -> Context:
    """A text of 200 tokens, half of it the prompt, and a chain of drafts."""
    history = torch.randint(0, vocab_size, (rows, 512), device="cuda", generator=generator(1))
    order = torch.arange(nodes, device="cuda")
    words = ((torch.ones_like(order) << (order + 1)) - 1).expand(rows, -1)
    lens = torch.full((rows,), 200, device="cuda")
    return Context(history, lens // 2, lens, history[:, 200 : 200 + nodes].contiguous(), words)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_greedy_choices_are_the_twins(vocab_size: int, dtype: torch.dtype) -> None:
    for rows, nodes in NODES:
        logits = logits_of(rows, nodes, vocab_size, dtype)  # 16 bits: ties at the top are common
        sampling, at = gpu_sampling(rows), positions_of(rows, nodes)
        for kind in (logits, logits.round(), torch.zeros_like(logits)):
            got = choose(kind, at, sampling, Features(), None)
            assert torch.equal(got, choose_torch(kind, at, sampling, Features(), None))
        for place, poison in ((0, torch.nan), (vocab_size // 2, torch.inf), (vocab_size - 1, -torch.inf)):
            broken = logits.clone()
            broken[0, -1, place] = poison
            got = choose(broken, at, sampling, Features(), None)
            assert torch.equal(got, choose_torch(broken, at, sampling, Features(), None))
            assert got[0, -1] == -1


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES[:2])
@pytest.mark.parametrize("name", list(VARIANTS)[1:])
def test_sampled_choices_are_the_twins(vocab_size: int, name: str) -> None:
    """The twin uses the device's noise and masses, so that every node must agree."""
    for dtype in (torch.bfloat16, torch.float32):
        for rows, nodes in NODES:
            logits, sampling = logits_of(rows, nodes, vocab_size, dtype), gpu_sampling(rows)
            context, at = context_of(rows, nodes, vocab_size), positions_of(rows, nodes)
            got, expected = (f(logits, at, sampling, VARIANTS[name], context) for f in (choose, choose_torch))
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_kept_sets_are_the_twins(dtype: torch.dtype) -> None:
    """By histogram and by digits; greedy rows and rows without a filter keep everything."""
    for rows, nodes in NODES:
        logits, sampling = logits_of(rows, nodes, 128_256, dtype), gpu_sampling(rows)
        for kind in (logits, logits.round()):
            scores = kind.float() / divisors(sampling)
            got, expected = lowest_kept(kind, sampling)[:, :, None], lowest_kept_torch(scores, sampling)
            sampled = sampling.temperature > 0
            assert torch.equal((scores >= got)[sampled], (scores >= expected)[sampled])
            by_digits = lowest_kept(kind.float(), sampling)[:, :, None]
            assert torch.equal(scores >= by_digits, scores >= got)


@pytest.mark.parametrize("dtype", HALF)
def test_adjusted_scores_are_the_twins(dtype: torch.dtype) -> None:
    features = VARIANTS["everything"]
    for rows, nodes in NODES:
        logits, sampling = logits_of(rows, nodes, 128_256, dtype), gpu_sampling(rows)
        context, at = context_of(rows, nodes, 128_256), positions_of(rows, nodes)
        found = adjust_triton.adjust(logits, at, sampling, features, context)
        expected = adjust(logits, at, sampling, features, context)
        adjusted = found.rows != 0
        assert torch.equal(found.scores.view_as(expected)[adjusted], expected[adjusted])
        assert torch.equal(logits.float()[~adjusted], expected[~adjusted])


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_logprobs_are_the_twins(dtype: torch.dtype) -> None:
    for rows, nodes in NODES:
        logits = logits_of(rows, nodes, 128_256, dtype)
        tokens = torch.randint(0, 128_256, (rows, nodes), device="cuda", generator=generator(rows))
        asked = torch.tensor([5, -1, 0, 64, 1], device="cuda").repeat(rows)[:rows]
        got, expected = logprobs(logits, tokens, None, asked, 64), logprobs_torch(logits, tokens, None, 64)
        for row, count in enumerate(asked.tolist()):
            if count >= 0:
                torch.testing.assert_close(got[0][row], expected[0][row], atol=2e-6, rtol=0)
                assert torch.equal(got[1][row, :, :count], expected[1][row, :, :count])
                torch.testing.assert_close(got[2][row, :, :count], expected[2][row, :, :count], atol=2e-6, rtol=0)
        for row in range(0, rows, 5):  # a row alone gives the same bits
            alone = logprobs(logits[row : row + 1], tokens[row : row + 1], None, asked[row : row + 1], 64)
            assert torch.equal(alone[0][0], got[0][row])
            assert torch.equal(alone[2][0, :, :5], got[2][row, :, :5])


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_gets_the_same_tokens_in_any_batch(name: str, dtype: torch.dtype) -> None:
    rows, nodes, vocab_size, features = 32, 4, 128_256, VARIANTS[name]
    logits, at = logits_of(rows, nodes, vocab_size, dtype), positions_of(rows, nodes)
    params, context = params_of(rows), context_of(rows, nodes, vocab_size)
    together = choose(logits, at, gpu_sampling(rows), features, context)
    for row in range(0, rows, 3):
        sampling: SamplingTensors = on_gpu(sampling_of([params[row]]))
        one = slice(row, row + 1)
        beside = replace(context, **{f.name: getattr(context, f.name)[one] for f in fields(context)})
        assert torch.equal(choose(logits[one], at[one], sampling, features, beside), together[one])
        root = replace(beside, window_tokens=beside.window_tokens[:, :1], ancestors=beside.ancestors[:, :1])
        alone = choose(logits[one, :1], at[one, :1], sampling, features, root)
        assert torch.equal(alone, together[one, :1])


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("params", [Params(temperature=0.9), Params(temperature=0.9, top_p=0.9, min_p=0.01, top_k=900)])
def test_features_of_other_rows_change_nothing(params: Params, dtype: torch.dtype) -> None:
    """Penalised or biased rows add kernels to the batch, and change no token of sampled or filtered rows."""
    sampling: SamplingTensors = on_gpu(sampling_of([replace(params, seed=seed) for seed in range(64)]))
    logits, at = logits_of(64, 4, 128_256, dtype), positions_of(64, 4)
    own = Features(sampled=True, filtered=params.top_p < 1)
    expected = choose(logits, at, sampling, own, None)
    for features in VARIANTS.values():
        if features.covers(own):
            got = choose(logits, at, sampling, features, context_of(64, 4, 128_256))
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", HALF)
def test_a_histogram_and_digits_choose_the_same_tokens(dtype: torch.dtype) -> None:
    """A bias of 0 makes a row use adjusted scores without changing any."""
    plain = [
        replace(params, bias={}, repetition=1.0, presence=0.0, frequency=0.0, min_len=0) for params in params_of(64)
    ]
    logits, at = logits_of(64, 4, 128_256, dtype), positions_of(64, 4)
    features = Features(sampled=True, filtered=True, biased=True)
    samplings = [on_gpu(sampling_of(rows)) for rows in (plain, [replace(params, bias={3: 0.0}) for params in plain])]
    assert torch.equal(*(choose(logits, at, sampling, features, None) for sampling in samplings))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_picks_are_the_twins(sampled: bool, named: bool) -> None:
    apart = 0
    for rows in (1, 3, 64):
        for vocab_size in (32_000, 128_256):
            logits, sampling = logits_of(rows, 1, vocab_size, torch.bfloat16), gpu_sampling(rows)
            drawn = torch.randperm(151_936, device="cuda", generator=generator(2))[:vocab_size]
            ids, features = drawn.sort().values if named else None, Features(sampled=sampled)
            got, expected = torch.empty(2, rows, 1, dtype=torch.int64, device="cuda")
            pick(logits, positions_of(rows, 1), ids, sampling, features, got)
            pick_torch(logits, positions_of(rows, 1), ids, sampling, features, expected)
            apart += int((got != expected).sum())
    assert apart == 0


def test_draws_follow_the_softmax() -> None:
    """Chi-square over 160,000 draws; its normal approximation stays below five standard deviations."""
    vocab_size, rows, nodes = 400, 2500, 64
    row = torch.randn(vocab_size, device="cuda", generator=generator(3)) * 1.5
    temperature = 0.8
    sampling: SamplingTensors = on_gpu(
        sampling_of([Params(temperature=temperature, seed=seed) for seed in range(rows)])
    )
    logits = row.expand(rows, nodes, -1)
    tokens = choose(logits, positions_of(1, nodes).expand(rows, -1), sampling, Features(sampled=True), None)
    counts = torch.bincount(tokens.flatten(), minlength=vocab_size).double()
    expected = (row.double() / temperature).softmax(dim=0) * tokens.numel()
    common = expected >= 5
    counts, expected = counts[common], expected[common]
    degrees = int(common.sum()) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(statistic.item() - degrees) < 5 * (2 * degrees) ** 0.5


def window_of(rows: int, nodes: int, depth: int, seed: int) -> tuple[Tensor, Nodes, Ends, Tensor]:
    """Random trees over four tokens, in which agreement is common: choices, nodes, ends, history."""
    drawn = generator(seed)

    def whole(high: int, *size: int) -> Tensor:
        return torch.randint(0, high, size, device="cuda", generator=drawn)

    parents = torch.zeros(rows, nodes, dtype=torch.int64, device="cuda")
    depths, words = torch.zeros_like(parents), torch.ones_like(parents)
    for node in range(1, nodes):
        wanted = whole(node, rows, 1)
        parent = torch.where(depths.gather(1, wanted) < depth, wanted, 0)
        parents[:, node : node + 1] = parent
        depths[:, node : node + 1] = depths.gather(1, parent) + 1
        words[:, node : node + 1] = words.gather(1, parent) | (1 << node if node < 63 else -(1 << 63))
    tokens = torch.arange(nodes, device="cuda").expand(rows, -1) % 4  # siblings may have equal tokens
    past, choices = whole(400, rows), whole(4, rows, nodes) - (whole(20, rows, nodes) == 0).long() * 9
    ends = Ends(past, past + 2 + whole(8, rows), whole(30, rows, 32) - 10, whole(9, rows) == 0)
    history = whole(99, rows, 512).scatter_(1, past[:, None], tokens[:, :1])
    return (choices.clamp(min=-1), Nodes(tokens.clone(), parents, depths, words, whole(depth + 1, rows)), ends, history)


def chain_links(nodes: Nodes) -> Nodes:
    order = torch.arange(nodes.tokens.shape[1], device="cuda")
    links = ((order - 1).clamp(min=0), order, (torch.ones_like(order) << (order + 1)) - 1)
    return Nodes(nodes.tokens, *(x.expand_as(nodes.tokens) for x in links), nodes.offered)


@pytest.mark.parametrize(("rows", "nodes", "depth"), [(1, 1, 0), (1, 4, 3), (32, 4, 3), (128, 16, 15)])
def test_commits_are_the_twins(rows: int, nodes: int, depth: int) -> None:
    for seed in range(10):
        choices, drawn, ends, history = window_of(rows, nodes, depth, seed)
        results = []
        for function in (commit, commit_torch):
            window = replace(chain_links(drawn), tokens=drawn.tokens.clone())
            reach = replace(ends, past_lens=ends.past_lens.clone(), done=ends.done.clone())
            text = history.clone()
            table = function(choices, window, reach, text, depth).table
            results.append((table, text, reach.past_lens, reach.done, window.tokens))
        for got, expected in zip(*results, strict=True):
            assert torch.equal(got, expected)


def test_bookkeeping_is_the_twins() -> None:
    for rows, nodes, depth, width in ((1, 4, 3, 1), (32, 4, 3, 1), (8, 32, 6, 4), (128, 8, 7, 2)):
        choices, drawn, ends, history = window_of(rows, nodes, depth, rows)
        past, new = ends.past_lens, ends.past_lens + 1 + choices[:, 0].clamp(min=0)
        table = torch.randint(0, 9999, (rows, 64), device="cuda", generator=generator(0))
        pairs: list[tuple[Any, Any]] = [
            (f(past, drawn.depths, table, 16, 300), t(past, drawn.depths, table, 16, 300))
            for f, t in ((window_places, window_places_torch),)
        ]
        for behind in (0, 1):
            at = (past, new, history, table, 16, depth + 1, behind, 300)
            pairs.append((path_places(*at), path_places_torch(*at)))
            ahead = (new, table, 16, behind, depth, width, 300)
            pairs.append((ahead_places(*ahead), ahead_places_torch(*ahead)))
        for got, expected in pairs:
            for field in fields(got):
                assert torch.equal(getattr(got, field.name), getattr(expected, field.name)), field.name
        at = (choices, drawn, past, past, torch.tensor([2.6, 1.2], device="cuda").double(), 128_256)
        assert torch.equal(bend_choices(*at), bend_choices_torch(*at))

        outcomes = []
        for keep in (keep_drafts, keep_drafts_torch):
            windows, offered = torch.zeros_like(drawn.tokens), torch.zeros_like(past)
            linked = [torch.zeros_like(drawn.tokens) for _ in range(3)]
            copies = list(zip((drawn.parents, drawn.depths, drawn.ancestors), linked, strict=True))
            keep(windows, offered, past % 5, choices[:, 1:], 3, copies)
            outcomes.append((windows, offered, *linked))
        assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


def test_look_up_is_the_twins() -> None:
    for rows, places in ((1, 2112), (32, 2112), (4, 32_832)):
        history = torch.randint(0, 12, (rows, places), device="cuda", generator=generator(rows))
        newest = torch.randint(places // 2, places, (rows,), device="cuda", generator=generator(rows))
        for got, expected in zip(find_repeats(history, newest, 5), find_repeats_torch(history, newest, 5), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_paths_are_moved_as_by_the_twins(dtype: torch.dtype) -> None:
    """Twenty times, since a race between a row's reads and writes would show only sometimes."""
    rows, nodes, width, page_size = 16, 32, 7, 16
    size = (4, (rows * 4 + 1) * page_size, 8, 128)
    drawn = [torch.randint(0, 100, size, device="cuda", generator=generator(i)) for i in range(2)]
    table = 1 + torch.arange(rows * 4, device="cuda").view(rows, 4)
    for seed in range(20):
        wanted = torch.rand(rows, nodes - 1, device="cuda", generator=generator(seed))
        path = wanted.argsort(dim=1)[:, : width - 1].sort(dim=1).values + 1
        verdicts = torch.zeros(rows, HEADER + 2 * width, dtype=torch.int64, device="cuda")
        verdicts[:, 0] = torch.randint(0, width + 1, (rows,), device="cuda", generator=generator(seed))
        verdicts[:, HEADER + width + 1 :] = path
        past = torch.randint(0, 30, (rows,), device="cuda", generator=generator(seed))
        stores = [[x.to(dtype) for x in drawn] for _ in range(2)]
        move_path(stores[0], past, Verdict(verdicts), table, page_size)
        move_path_torch(stores[1], past, Verdict(verdicts), table, page_size)
        for got, expected in zip(*stores, strict=True):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("depth", "width", "nodes"), [(6, 4, 32), (3, 8, 64), (2, 2, 5)])
def test_trees_are_the_twins(depth: int, width: int, nodes: int, sampled: bool) -> None:
    rows, vocab_size = 3, 32_000
    ids = torch.randperm(128_256, device="cuda", generator=generator(4))[:vocab_size].sort().values
    trees = [Growth.begin(rows, depth, width, ids, gpu_sampling(rows), Features(sampled=sampled)) for _ in range(2)]
    fronts: list[Frontier | None] = [None, None]
    for level in range(depth):
        count = width if level else 1
        logits = logits_of(rows, count, vocab_size, torch.float32, seed=level)  # 32 bits: no ties
        at = positions_of(rows, 1).expand(-1, count) + level
        fronts = [f(t, logits, at, front, level) for f, t, front in zip((grow, grow_torch), trees, fronts, strict=True)]
        got, expected = fronts
        assert got is not None
        assert expected is not None
        torch.testing.assert_close(got.scores, expected.scores, atol=1e-4, rtol=1e-4)
        assert torch.equal(got.tokens, expected.tokens)
        assert torch.equal(got.words, expected.words)
    for one, other in zip(select(trees[0], nodes, depth), select_torch(trees[1], nodes, depth), strict=True):
        assert torch.equal(one, other)


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """Capture `step` as a graph; returns a function that replays it and returns the same tensors each time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_captured_choice_is_the_eager_one(name: str, dtype: torch.dtype) -> None:
    rows, nodes, vocab_size, features = 4, 4, 128_256, VARIANTS[name]
    sampling, context, at = gpu_sampling(rows), context_of(rows, nodes, vocab_size), positions_of(rows, nodes)
    logits = logits_of(rows, nodes, vocab_size, dtype)

    def step() -> tuple[Tensor, ...]:
        tokens = choose(logits, at, sampling, features, context)
        return tokens, *logprobs(logits, tokens, None, None, 5)

    replay = captured(step)
    for seed in range(3):
        logits.copy_(logits_of(rows, nodes, vocab_size, dtype, seed))
        at += 1
        for got, expected in zip(replay(), step(), strict=True):
            assert torch.equal(got, expected)


def test_a_captured_round_of_bookkeeping_is_the_eager_one() -> None:
    """Window, commit, path, look-ahead, picks and kept drafts, on buffers that each replay advances."""
    rows, nodes, depth, vocab_size = 8, 4, 3, 32_000
    choices, drawn, ends, history = window_of(rows, nodes, depth, 5)
    sampling, table = gpu_sampling(rows), torch.randint(0, 99, (rows, 32), device="cuda", generator=generator(1))
    logits, features = logits_of(rows, 1, vocab_size, torch.bfloat16), Features(sampled=True)

    def start() -> tuple[Nodes, Ends, Tensor]:
        window = replace(chain_links(drawn), tokens=drawn.tokens.clone(), offered=drawn.offered.clone())
        moved = replace(ends, past_lens=ends.past_lens % 50, done=ends.done.clone(), limits=ends.limits + 400)
        return window, moved, history.clone()

    def step_on(window: Nodes, moved: Ends, text: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        def step() -> tuple[Tensor, ...]:
            places = window_places(moved.past_lens, window.depths, table, 16, 500)
            verdict = commit(choices, window, moved, text, depth)
            path = path_places(places.past_lens, moved.past_lens, text, table, 16, depth + 1, 1, 500)
            ahead = ahead_places(moved.past_lens, table, 16, 0, depth, 1, 500)
            drafts = torch.empty(depth, rows, dtype=torch.int64, device="cuda")
            for at in range(depth):
                pick(logits, ahead.next_positions[at], None, sampling, features, drafts[at, :, None])
            keep_drafts(window.tokens, window.offered, drawn.offered, drafts.T, depth, [])
            return verdict.table, places.slots, path.live, ahead.slots, drafts

        return step

    one, other = start(), start()
    graph, eager = captured(step_on(*one)), step_on(*other)
    eager()  # as often as the capture's warm-up ran
    for _ in range(5):
        for got, expected in zip(graph(), eager(), strict=True):
            assert torch.equal(got, expected)
    for got, expected in zip(
        (one[0].tokens, one[1].past_lens, one[2]), (other[0].tokens, other[1].past_lens, other[2]), strict=True
    ):
        assert torch.equal(got, expected)


def test_nothing_waits_for_the_device() -> None:
    """The host queues every variant without a wait."""
    rows, nodes, vocab_size = 4, 4, 128_256
    logits, at = logits_of(rows, nodes, vocab_size, torch.bfloat16), positions_of(rows, nodes)
    sampling, context = gpu_sampling(rows), context_of(rows, nodes, vocab_size)
    for features in VARIANTS.values():
        choose(logits, at, sampling, features, context)  # compiled now
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for features in VARIANTS.values():
            choose(logits, at, sampling, features, context)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert reference.triton_ready(logits)
