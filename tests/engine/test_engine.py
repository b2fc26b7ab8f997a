"""Outputs of a request: finish reasons, log-probabilities, provenance, timing; faults; simulated acceptance."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

from peregrine.engine.output import Output
from peregrine.engine.request import Request
from peregrine.sampling import SamplingParams
from peregrine.text.stream import TextStream
from peregrine.text.tokenizer import Tokenizer
from spec import reference
from spec.harness import Case, accept_length, build, cases, copy_model, noisy_model, prompts, run, tiny_model, tokens
from spec.test_identity import naive_logits
from text.conftest import byte_fallback, write_folder

TREE = {"drafter": str(noisy_model()), "tree": (3, 3, 10)}


def test_logprobs_are_of_the_models_own_distribution() -> None:
    params = SamplingParams(temperature=0.7, top_k=5, logit_bias={9: 5.0}, seed=2, max_tokens=20, logprobs=3)
    case = Case((4, 5, 6), params)
    engine = build(**TREE).engine
    output = run(engine, [case, *cases(3, max_tokens=20)])[0]
    logits = naive_logits(engine)
    text = list(case.prompt)
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        expected = torch.tensor(logits(text)).double().log_softmax(0)
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-4)
        assert [i for i, _ in entry.top] == expected.topk(3).indices.tolist()
        assert [v for _, v in entry.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)
        text.append(token)


def test_provenance_and_counters_add_up() -> None:
    for output in run(build(**TREE).engine, cases(6, max_tokens=80)):
        counted = output.stats
        assert counted.accepted == len(output.token_ids) == len(output.drafted)
        assert counted.correct == sum(output.drafted)
        assert sum(counted.accept_histogram) == counted.rounds
        assert sum(n * rounds for n, rounds in enumerate(counted.accept_histogram)) == counted.correct
        assert counted.accept_length == counted.accepted / counted.rounds
        assert counted.drafted == 9 * (counted.rounds - 1)  # the first round has no drafts
        assert not output.drafted[0]
        timing = output.timing
        assert 0 <= timing.queue_s <= timing.first_token_s <= timing.total_s


def test_a_request_without_a_seed_gets_one_and_reports_it() -> None:
    free = Case((3, 4), SamplingParams(temperature=1.0, max_tokens=30))
    first, second = (run(build().engine, [free])[0] for _ in range(2))
    assert first.seed != second.seed
    again = run(build().engine, [Case((3, 4), SamplingParams(temperature=1.0, max_tokens=30, seed=first.seed))])[0]
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize("options", [{}, TREE, {"drafter": "ngram", "lag": 1}], ids=["plain", "tree", "ngram"])
def test_logits_that_are_not_finite_end_one_request_alone(options: dict[str, object]) -> None:
    """Token 77 gives NaN logits; a request that contains it ends with an error, the others go on."""
    embedding = load_file(tiny_model() / "model.safetensors")["model.embed_tokens.weight"].clone()
    embedding[77] = float("nan")
    folder = copy_model("nan", {"model.embed_tokens.weight": embedding})
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias={77: -100.0})
    good = [Case((1, 2, 3), params), Case((9, 8, 7, 6), params)]
    bad = Case((5, 77), params)
    outputs = run(build(folder, **options).engine, [good[0], bad, good[1]])
    assert outputs[1].finish_reason == "error"
    assert outputs[1].token_ids == []
    assert "NaN or inf" in str(outputs[1].error)
    assert tokens([outputs[0], outputs[2]]) == tokens(run(build().engine, good))


@pytest.mark.parametrize("shape", [(3, 2, 6), (3, 3, 10)])
def test_trees_change_no_token_of_cold_requests(shape: tuple[int, int, int]) -> None:
    """Divided by a small temperature, log-probabilities are so far apart that a child ties with its parent."""
    some = [
        Case(prompt, SamplingParams(temperature=cold, seed=i, max_tokens=40, ignore_eos=True))
        for i, prompt in enumerate(prompts(12, seed=4))
        for cold in (1e-2, 1e-3, 1e-30)
    ]
    expected = tokens(run(build(max_rows=32).engine, some))
    assert tokens(run(build(drafter=str(noisy_model()), tree=shape, max_rows=32).engine, some)) == expected


class Panic(BaseException):
    """As a panic of the tokenizers library: no Exception."""


@pytest.mark.parametrize("part", ["pack", "push", "output"])
def test_a_fault_in_handling_one_request_ends_it_alone(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is seated, while its text is made, or when it ends."""
    some = cases(6, max_tokens=20)
    engine = build(max_rows=3, **TREE).engine
    owner: object = {"push": TextStream, "pack": engine.runner.seats.buffers, "output": Request}[part]
    method, calls = getattr(owner, part), 0

    def fail_once(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OverflowError("int too large to convert") if part == "pack" else Panic("index out of bounds")
        return method(*arguments)

    monkeypatch.setattr(owner, part, fail_once)
    outputs = run(engine, some)  # which checks that every page is given back
    failed = [i for i, output in enumerate(outputs) if output.finish_reason == "error"]
    assert len(failed) == 1
    assert "ended it alone" in str(outputs[failed[0]].error)
    others = [i for i in range(6) if i not in failed]
    assert tokens([outputs[i] for i in others]) == tokens(run(build().engine, [some[i] for i in others]))


def test_a_fault_while_one_request_is_aborted_ends_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All text of a request that is awaited as a whole is made when it ends."""
    engine = build().engine
    bad, good = (engine.prepare([1, 2, n], SamplingParams(temperature=0, max_tokens=9)) for n in (3, 4))
    bad.wait_for_end()
    assert bad.stream is not None
    monkeypatch.setattr(bad.stream, "push", lambda _: (_ for _ in ()).throw(Panic("index out of bounds")))
    engine.enqueue(bad)
    engine.enqueue(good)
    with torch.inference_mode():
        engine.step()
        engine.abort(bad)
        deltas = [delta for _ in range(20) for delta in engine.step()]
    reasons = {delta.request_id: delta.output.finish_reason for delta in deltas if delta.output is not None}
    assert reasons == {bad.id: "error", good.id: "length"}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_k": 6},
        {"temperature": 1.4, "top_p": 0.6},
        {"temperature": 0.8, "min_p": 0.1, "logit_bias": {21: 3.0}},
        {"temperature": 1.0, "top_k": 8, "repetition_penalty": 1.5, "presence_penalty": 1.0},
    ],
    ids=["top_k", "top_p", "min_p and bias", "penalties"],
)
def test_trees_draw_from_the_exact_distribution(sampling: dict[str, object]) -> None:
    """Chi-square of the first and of the second token, over many seeds, through the engine with trees."""
    prompt, count = (11, 12, 13), 800
    some = [Case(prompt, SamplingParams(seed=s, max_tokens=2, **sampling)) for s in range(count)]  # type: ignore[arg-type]
    engine = build(max_rows=32, **TREE).engine
    pairs = tokens(run(engine, some))
    logits = naive_logits(engine)
    first = exact(logits, list(prompt), [], some[0].params)
    second = np.zeros_like(first)
    for token in np.flatnonzero(first):
        second += first[token] * exact(logits, [*prompt, int(token)], [int(token)], some[0].params)
    for place, expected in ((0, first), (1, second)):
        counts = np.bincount([pair[place] for pair in pairs], minlength=len(expected))
        assert counts[expected == 0].sum() == 0
        common = expected * count >= 5
        observed = np.append(counts[common], counts[~common].sum())
        wanted = np.append(expected[common], expected[~common].sum()) * count
        keep = wanted > 0
        assert stats.chisquare(observed[keep], wanted[keep]).pvalue > 1e-4


def exact(logits: reference.Logits, text: list[int], made: list[int], params: SamplingParams) -> np.ndarray:
    """The exact distribution of the next token."""
    scores = reference.process(logits(text).astype(np.float64), text, made, params, set())
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@pytest.mark.parametrize("options", [{"drafter": str(noisy_model())}, TREE], ids=["chain", "tree"])
def test_simulated_acceptance_has_the_mean_it_was_asked_for(options: dict[str, object]) -> None:
    def run_all(count: int) -> list[Output]:
        some = [
            Case((1, 2, s + 3), SamplingParams(temperature=0, seed=s, max_tokens=count, ignore_eos=True))
            for s in range(8)
        ]
        return run(build(simulate_accept=2.6, **options).engine, some)

    outputs = run_all(180)
    assert all(o.simulated for o in outputs)
    assert accept_length(outputs) == pytest.approx(2.6, abs=0.08)
    assert [made[:60] for made in tokens(outputs)] == tokens(run_all(60))


def test_a_stop_string_does_not_end_a_request_before_min_tokens() -> None:
    """Speculation or not, the first stop string completed by a token after the first `min_tokens` ends the request."""
    plain, chain = build(), {"drafter": str(tiny_model()), "num_drafts": 5}
    often = {plain.tokenizer.encode(letter)[-1]: 6.0 for letter in "abcdefgh"}
    free = SamplingParams(temperature=1.0, seed=4, max_tokens=60, ignore_eos=True, logit_bias=often)
    ids = run(plain.engine, [Case((5, 9, 200), free)])[0].token_ids
    pieces = [plain.tokenizer.decode([token]) for token in ids]
    stops = [letter for letter in "abcdefgh" if letter in "".join(pieces[:12])]
    assert len(stops) >= 3
    some = [replace(free, min_tokens=least, stop=stop) for least in (0, 12, 60) for stop in stops]
    for options in ({}, chain, {**chain, "lag": 1}, TREE):
        outputs = run(build(max_rows=32, **options).engine, [Case((5, 9, 200), params) for params in some])
        for params, output in zip(some, outputs, strict=True):
            stop = str(params.stop)
            count = next((n for n, piece in enumerate(pieces, 1) if n > params.min_tokens and stop in piece), 0)
            assert output.finish_reason == ("stop" if count else "length")
            assert output.token_ids == ids[: count or 60]
            text = plain.tokenizer.decode(output.token_ids)
            assert output.text == (text[: text.rindex(stop)] if count else text)


def test_a_stop_string_in_a_run_of_bytes_ends_at_the_same_token_in_any_rounds(tmp_path: Path) -> None:
    """A byte-fallback tokenizer holds the text of a run of bytes back until it ends, which may be rounds later."""
    tokenizer = Tokenizer.read(write_folder(tmp_path, byte_fallback()))
    byte = {value: token for token, value in tokenizer.byte_ids.items()}
    newline, letter = byte[ord("\n")], max(byte.values()) + 4  # ids of text follow those of bytes
    often = {newline: 96.0, byte[ord("a")]: 100.0, byte[ord("c")]: 100.0, letter: 96.0}
    params = [SamplingParams(seed=s, max_tokens=40, logit_bias=often, stop="\n", ignore_eos=True) for s in range(8)]
    seen = []
    for options in ({}, {"drafter": str(tiny_model()), "num_drafts": 5}, TREE):
        engine = build(**options).engine
        engine.tokenizer = tokenizer
        seen.append(run(engine, [Case((5, letter), one) for one in params]))
        assert all(o.token_ids.index(newline) == len(o.token_ids) - 1 for o in seen[-1] if o.finish_reason == "stop")
    assert tokens(seen[0]) == tokens(seen[1]) == tokens(seen[2])
    assert [o.text for o in seen[0]] == [o.text for o in seen[1]] == [o.text for o in seen[2]]
    assert any(o.finish_reason == "stop" and len(o.token_ids) > 5 for o in seen[0])


def test_abort_before_the_first_token_and_after_the_last() -> None:
    engine = build().engine
    with torch.inference_mode():
        request = engine.prepare([1, 2], SamplingParams(max_tokens=3))
        engine.enqueue(request)
        engine.abort(request)
        deltas = engine.step()
        assert [d.finish_reason for d in deltas] == ["abort"]
        engine.abort(request)
        assert not engine.has_work


def test_waiting_requests_start_in_order_of_arrival() -> None:
    some = [Case((n + 1,), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)) for n in range(5)]
    outputs = run(build(max_rows=1).engine, some)
    ends = [o.timing.total_s for o in outputs]
    assert ends == sorted(ends)


def test_a_request_that_found_no_pages_is_not_matched_again_until_pages_change(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(num_pages=20, page_size=16, max_rows=4, prefill_chunk=64).engine
    tree = engine.ledger.tree
    assert tree is not None
    matched: list[int] = []  # lengths of the token lists that were looked up
    match = tree.match
    monkeypatch.setattr(tree, "match", lambda tokens: (matched.append(len(tokens)), match(tokens))[1])
    greedy = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    some = [Case((1, 2, 3), greedy), Case(tuple(range(1, 291)), replace(greedy, max_tokens=4))]
    waited, step = list[bool](), engine.step
    monkeypatch.setattr(engine, "step", lambda: (waited.append(bool(engine.waiting)), step())[1])
    outputs = run(engine, some, arrivals=[0, 20])
    assert sum(waited) > outputs[0].stats.rounds / 2, "it waited for most of the first one's rounds"
    assert len(matched) <= 4
    assert tokens(outputs) == tokens([run(build().engine, [case])[0] for case in some])


def test_prefill_copies_a_prompt_a_few_times_not_once_per_chunk() -> None:
    copied = 0

    class Tokens(list[int]):
        def __add__(self, other: list[int]) -> list[int]:  # type: ignore[override]
            nonlocal copied
            copied += len(self) + len(other)
            return [*self, *other]

        def __getitem__(self, key: int | slice) -> int | list[int]:  # type: ignore[override]
            nonlocal copied
            taken = super().__getitem__(key)
            copied += len(taken) if isinstance(taken, list) else 0
            return taken

    engine = build(prefill_chunk=8, prefix_cache=False).engine
    request = engine.prepare(Tokens(range(1, 290)), SamplingParams(temperature=0, max_tokens=2))
    if request.tokens is request.tokens:  # one list, not a copy per access
        request.tokens = Tokens(request.tokens)
    engine.enqueue(request)
    with torch.inference_mode():
        while engine.has_work:
            engine.step()
    assert 0 < copied <= 3 * 290  # the tokens, the tokens after them, and the seat's
