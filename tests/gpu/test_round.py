"""Rounds on a GPU: queued without a wait, equal with and without graphs, independent of pages outside the tables."""

import re
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from gpu.random_models import VOCAB, disturbed, llama, qwen3
from gpu.traffic import Traffic
from peregrine.attention import AttentionMetadata, Window
from peregrine.engine import engine as engine_module
from peregrine.engine.build import Built, build_engine
from peregrine.engine.engine import Engine
from peregrine.engine.output import Output
from peregrine.engine.runner import VARIANTS
from peregrine.errors import ConfigError
from peregrine.grammar import GRAMMARS_PRESENT
from peregrine.kernels.sampling.reference import Features
from peregrine.llm import engine_config
from peregrine.sampling import MAX_LOGPROBS, SamplingParams
from spec.harness import Case, check_pages, run

PAGE_SIZE, ROUNDS = 16, 2000
GUESSES: dict[str, dict[str, object]] = {"chain": {"num_drafts": 3, "windows": "fixed"}, "tree": {"tree": (3, 3, 10)}}
either_guess = pytest.mark.parametrize("guess", GUESSES)


def build(**options: object) -> Built:
    wanted: dict[str, object] = {"device": "cuda", "drafter": str(disturbed(llama())), "max_rows": 8}
    wanted |= {"max_len": 512, "num_pages": 400, "page_size": PAGE_SIZE, "row_sizes": (8,)}
    return build_engine(engine_config(str(llama()), wanted | options))


@pytest.fixture
def no_waits() -> Iterator[None]:
    """The host may not wait for the device, except for an event; torch raises where it would."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_the_guard_against_waits_works(no_waits: None) -> None:
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones((), device="cuda").item()


@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
@torch.inference_mode()
def test_the_host_never_waits(graphs: bool, request: pytest.FixtureRequest) -> None:
    """Requests join, leave, are aborted and preempted, with prompts in between and every sampling parameter."""
    sizes = (1, 4, 8) if graphs else None
    engine = build(graphs=graphs, row_sizes=sizes, num_pages=90, num_drafts=3).engine
    traffic = Traffic(engine, VOCAB, longest=200)
    for _ in traffic.rounds_of(300):  # kernels are compiled, and buffers made, at their first use
        pass
    before = len(traffic.finished)
    request.getfixturevalue("no_waits")
    rounds = ROUNDS if graphs else ROUNDS // 4
    for _ in traffic.rounds_of(rounds):
        pass
    torch.cuda.set_sync_debug_mode("default")
    traffic.drain()
    assert traffic.rounds >= 300 + rounds
    assert len(traffic.finished) - before >= 50
    assert {output.finish_reason for output in traffic.finished} == {"length", "stop", "abort"}
    assert sum(output.stats.preemptions for output in traffic.finished) > 0
    check_pages(engine)


def params_of(variant: Features) -> dict[str, object]:
    """Sampling parameters that use every feature of the variant."""
    params: dict[str, object] = {"temperature": 0.8 if variant.sampled else 0.0}
    if variant.filtered:
        params |= {"top_p": 0.9, "top_k": 50}
    if variant.penalised:
        params |= {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    if variant.biased:
        params |= {"logit_bias": {300: 2.0, 301: -3.0}}
    if variant.min_len:
        params |= {"min_tokens": 5, "stop_token_ids": [400]}
    if variant.logprobs is not None:
        params |= {"logprobs": MAX_LOGPROBS}
    return params


def cases_of(variant: Features, count: int = 5) -> list[Case]:
    """Fewer requests than rows, of different lengths: there are pads from the start, and more later."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, VOCAB, (7 + 30 * i,), generator=generator).tolist() for i in range(count)]
    params = params_of(variant) | {"detokenize": False}
    return [
        Case(tuple(prompt), SamplingParams(seed=i, max_tokens=20 + 10 * i, **params))  # type: ignore[arg-type]
        for i, prompt in enumerate(prompts)
    ]


def facts(outputs: Sequence[Output]) -> list[object]:
    """Everything a request's output holds, log-probabilities bit for bit."""
    return [(o.token_ids, o.logprobs, o.stats.accept_histogram, o.finish_reason) for o in outputs]


def held(engine: Engine) -> list[Tensor]:
    """The bytes of all pages but the scratch page, in all layers."""
    store = engine.runner.target.store
    return [x[:, PAGE_SIZE:].clone().view(torch.uint8) for x in (store.keys, store.values)]


@either_guess
def test_a_recorded_round_is_the_eager_one(guess: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant: equal tokens, log-probabilities, acceptance, keys and values; eager rounds have no pads."""
    options = GUESSES[guess] | {"prefix_cache": False}
    recorded = build(graphs=True, **options).engine
    eager = build(graphs=False, row_sizes=None, **options).engine
    for variant in VARIANTS:
        monkeypatch.setattr(engine_module, "features_of", lambda requests, variant=variant: variant)
        results = [facts(run(engine, cases_of(variant))) for engine in (recorded, eager)]
        assert results[0] == results[1], variant
        assert all(map(torch.equal, held(recorded), held(eager))), variant


@either_guess
def test_an_unused_feature_changes_nothing(guess: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy requests give the same tokens in every variant: other requests' features cost time only."""
    engine = build(graphs=True, prefix_cache=False, **GUESSES[guess]).engine
    plain = cases_of(Features())
    results = []
    for variant in VARIANTS:
        monkeypatch.setattr(engine_module, "features_of", lambda requests, variant=variant: variant)
        results.append([output.token_ids for output in run(engine, plain)])
    assert all(result == results[0] for result in results)


@either_guess
def test_a_request_gets_the_same_tokens_in_any_batch(guess: str) -> None:
    """Requests of every variant in one batch, then each alone: tokens, and log-probabilities bit for bit."""
    engine = build(graphs=True, row_sizes=(1, 8), prefix_cache=False, **GUESSES[guess]).engine
    mixed = [case for variant in VARIANTS for case in cases_of(variant, 2)]
    together = run(engine, mixed)
    alone = [output for case in mixed for output in run(engine, [case])]
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs


@either_guess
@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
def test_pages_outside_the_tables_change_nothing(guess: str, graphs: bool) -> None:
    """NaN on the scratch page, which pads use, and on every unwritten page."""
    engine = build(graphs=graphs, prefix_cache=False, **GUESSES[guess]).engine
    some = cases_of(VARIANTS[2])
    expected = facts(run(engine, some))
    for store in stores(engine):
        store.fill_(torch.nan)
    assert facts(run(engine, some)) == expected


def stores(engine: Engine) -> list[Tensor]:
    """Keys and values of the target and of its drafter."""
    target, draft = engine.runner.target, engine.runner.drafter.reader.model  # type: ignore[attr-defined]
    return [target.store.keys, target.store.values, draft.store.keys, draft.store.values]


@torch.inference_mode()
def test_fill_and_read_store_the_same_keys_and_values() -> None:
    """Otherwise a preempted request, or one that finds its own text in the cache, would continue from other keys."""
    options: dict[str, object] = {"drafter": "none", "graphs": False, "row_sizes": None}
    built = build_engine(engine_config(str(qwen3()), {"device": "cuda", "num_pages": 20, **options}))
    target, length = built.engine.runner.target, 200
    tokens = torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(1)).cuda()
    places = torch.arange(length, device="cuda")
    metadata = AttentionMetadata(
        window=Window.uniform(1, length),
        positions=places,
        q_starts=torch.tensor([0, length], device="cuda"),
        past_lens=torch.zeros(1, dtype=torch.int64, device="cuda"),
        page_table=torch.arange(1, 14, device="cuda")[None],
        page_size=PAGE_SIZE,
        slots=places + PAGE_SIZE,
        ancestors=None,
    )
    target.fill(tokens, metadata, ())
    filled = held(built.engine)
    target.store.keys.zero_()
    target.store.values.zero_()
    target.read(tokens, metadata, ())
    assert filled[0].any()
    assert all(map(torch.equal, filled, held(built.engine)))


def test_graphs_are_reported_with_their_memory() -> None:
    options: dict[str, object] = {"row_sizes": (1, 8), "num_drafts": 3, "windows": "fixed", "prefill_chunk": 128}
    made = {decision.field: decision for decision in build(**options).decisions}
    assert made["graphs"].value is True
    variants = len(VARIANTS) + (2 if GRAMMARS_PRESENT else 0)  # the two parts of a round with a grammar
    chunks, firsts = 3, len(VARIANTS)  # of 64 and 128 tokens, and of 128 of one prompt; first rounds of single requests
    assert made["recorded"].value == 2 * variants + chunks + firsts
    because = r"rounds of 1, 8 rows in \d+ variants; prompt chunks of 2 sizes, 64 to 128 tokens; \d+ MiB, [\d.]+ s"
    assert re.search(because, made["recorded"].because)


def test_a_store_that_does_not_fit_is_refused_with_sizes_and_remedy() -> None:
    with pytest.raises(ConfigError, match="num_pages=10000000") as raised:
        build(num_pages=10_000_000)
    text = str(raised.value)
    assert "GiB of keys and values" in text
    assert "GiB are free" in text
    assert "lower num_pages, max_rows or max_len" in text
