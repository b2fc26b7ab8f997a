"""Speculation never changes a token: every drafter, all sampling parameters, any batch, against plain decoding and
against a naive recompute. A difference here is a bug to be found, not a tolerance to be widened.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peregrine.attention.metadata import AttentionMetadata
from peregrine.attention.window import Window
from peregrine.cache.store import KVStore
from peregrine.engine.engine import Engine
from peregrine.sampling import SamplingParams
from spec import reference
from spec.harness import (
    CONTEXT,
    Case,
    accept_length,
    build,
    cases,
    eagle3_head,
    eagle_head,
    mtp_model,
    noisy_model,
    prompts,
    run,
    tiny_model,
    tokens,
    with_params,
)

# 100 requests, spread over the tests below. Any five in a row read up to 36, 72, 108, 144 and 180 tokens and write 64:
# every test has rows that grow past 64, 128 and 192 keys, the ends of attention's blocks.
MATRIX = with_params(prompts(100, high=37, bands=5), max_tokens=64)
PROMPTS = prompts(100)
known: dict[str, list[int]] = {}


def plain(wanted: Sequence[Case]) -> list[list[int]]:
    """The tokens of plain decoding, computed once per case."""
    missing = [case for case in wanted if repr(case) not in known]
    for case, made in zip(missing, tokens(run(build().engine, missing)), strict=True):
        known[repr(case)] = made
    return [known[repr(case)] for case in wanted]


def naive_logits(engine: Engine) -> reference.Logits:
    """Logits of the next token from the whole text, read at once into an empty store with pages in order."""
    target = engine.runner.target
    config = target.decoder.config

    @torch.inference_mode()
    def logits(text: list[int]) -> np.ndarray:
        count = len(text)
        store = KVStore(config.num_layers, 1, CONTEXT, config.kv_shape, torch.float32, "cpu")
        places = torch.arange(count)
        zero = torch.zeros(1, dtype=torch.int64)
        metadata = AttentionMetadata(
            Window.ragged([count]), places, torch.tensor([0, count]), zero, zero[None], CONTEXT, places, None
        )
        attend = target.backend.bind(store, target.layers, metadata)
        hidden, _ = target.decoder(torch.tensor(text), places, attend)
        return target.decoder.logits(hidden[-1:])[0].numpy()

    return logits


@pytest.mark.parametrize("index", range(10))
def test_plain_decoding_equals_a_naive_recompute(index: int) -> None:
    case, engine = MATRIX[index], build().engine
    assert run(engine, [case])[0].token_ids == reference.generate(
        naive_logits(engine), case.prompt, case.params, engine.limits.eos_ids
    )


def drafters() -> dict[str, dict[str, object]]:
    itself, noisy = {"drafter": str(tiny_model())}, {"drafter": str(noisy_model())}
    options: dict[str, dict[str, object]] = {f"noisy chain of {k}": {**noisy, "num_drafts": k} for k in (1, 2, 3, 5, 8)}
    options |= {f"noisy tree {t}": {**noisy, "tree": t} for t in ((2, 2, 5), (3, 3, 13), (5, 4, 24), (3, 8, 64))}
    options |= {"itself, chain": {**itself, "num_drafts": 5}, "itself, tree": {**itself, "tree": (4, 2, 10)}}
    options |= {f"ngram {k}": {"drafter": "ngram", "num_drafts": k} for k in (1, 5)}
    for name, folder in (
        ("eagle3", eagle3_head()),
        ("eagle3, whole vocabulary", eagle3_head(300)),
        ("eagle", eagle_head()),
    ):
        options |= {
            f"{name} chain": {"drafter": str(folder)},
            f"{name} tree": {"drafter": str(folder), "tree": (4, 3, 16)},
        }
    mtp = {"drafter": "mtp", "model": mtp_model()}
    return options | {"mtp chain": mtp, "mtp tree": {**mtp, "tree": (3, 2, 8)}}


DRAFTERS = drafters()


@pytest.mark.parametrize("name", DRAFTERS)
def test_speculation_changes_no_token(name: str) -> None:
    first = 10 + 4 * list(DRAFTERS).index(name)
    some = (MATRIX[first:] + MATRIX)[:5]
    assert tokens(run(build(**DRAFTERS[name]).engine, some)) == plain(some)  # type: ignore[arg-type]


NOISY_TREE = {"drafter": str(noisy_model()), "tree": (4, 3, 14)}
NOISY_CHAIN = {"drafter": str(noisy_model()), "num_drafts": 4}
SETTINGS: dict[str, dict[str, object]] = {
    "page size 1": {"page_size": 1, "num_pages": 4000, **NOISY_TREE},
    "page size 64": {"page_size": 64, **NOISY_TREE},
    "chunks of 8": {"prefill_chunk": 8, **NOISY_CHAIN},
    "chunks of 32": {"prefill_chunk": 32, **NOISY_TREE},
    "one behind": {"lag": 1, **NOISY_TREE},
    "two behind": {"lag": 2, **NOISY_CHAIN},
    "padded rows": {"row_sizes": (3, 8), **NOISY_TREE},
    "no prefix cache": {"prefix_cache": False, **NOISY_CHAIN},
    "few rows": {"max_rows": 2, **NOISY_TREE},
    "torch attention": {"attention": "torch", "drafter": "ngram", "num_drafts": 3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_engine_settings_change_no_token(name: str) -> None:
    some = MATRIX[40:46]
    arrivals = [0, 0, 0, 3, 9, 20]
    assert tokens(run(build(**SETTINGS[name]).engine, some, arrivals)) == plain(some)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [NOISY_TREE, NOISY_CHAIN | {"lag": 1}], ids=["tree", "chain, one behind"])
def test_preemption_changes_no_token(options: dict[str, object]) -> None:
    some = MATRIX[50:56]
    outputs = run(build(page_size=8, num_pages=90, **options).engine, some)
    assert sum(o.stats.preemptions for o in outputs) > 0
    assert tokens(outputs) == plain(some)


def test_aborts_of_neighbours_change_no_token() -> None:
    some = MATRIX[60:68]
    outputs = run(build(lag=1, **NOISY_TREE).engine, some, aborts={1: 0, 3: 7, 4: 8, 6: 15})
    expected = plain(some)
    for index in (0, 2, 5, 7):
        assert outputs[index].token_ids == expected[index]
    for index in (1, 3, 4, 6):
        made = outputs[index].token_ids
        assert outputs[index].finish_reason == "abort"
        assert made == expected[index][: len(made)]


@pytest.mark.parametrize(
    "options", [NOISY_TREE, NOISY_CHAIN, {"drafter": str(eagle3_head())}], ids=["tree", "chain", "eagle3"]
)
def test_a_prefix_hit_changes_no_token(options: dict[str, object]) -> None:
    engine = build(**options).engine
    long = tuple(range(1, 100))
    some = [
        Case((*long[:n], 7, 7), SamplingParams(temperature=t, seed=n, max_tokens=40))
        for n in (60, 90, 99)
        for t in (0, 1)
    ]
    outputs = run(engine, some, range(0, 600, 100))  # one after another, each with a hit on the pages of those before
    assert tokens(outputs) == plain(some)
    assert [output.stats.cached_tokens for output in outputs[1:]] == [48, 48, 80, 80, 96]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [NOISY_TREE, {"drafter": str(tiny_model()), "num_drafts": 5}], ids=["tree", "itself"]
)
def test_budgets_that_end_inside_a_window(options: dict[str, object], max_tokens: int) -> None:
    some = cases(8, max_tokens=max_tokens)
    outputs = run(build(**options).engine, some)
    assert tokens(outputs) == plain(some)
    assert all(len(o.token_ids) == max_tokens and o.finish_reason == "length" for o in outputs)


@pytest.mark.parametrize("lag", [0, 1])
def test_stop_ids_and_strings_inside_a_window(lag: int) -> None:
    base = Case((5, 9, 200), SamplingParams(temperature=1.0, seed=4, max_tokens=60))
    text = plain([base])[0]
    built = build(drafter=str(tiny_model()), num_drafts=5, lag=lag)
    pieces = [built.tokenizer.decode([t]) for t in text]
    for end in range(4, 14):
        by_id = Case(base.prompt, SamplingParams(temperature=1.0, seed=4, max_tokens=60, stop_token_ids=[text[end]]))
        first = text.index(text[end])
        output = run(built.engine, [by_id])[0]
        assert output.token_ids == text[: first + 1]
        assert (output.finish_reason, output.stop_reason) == ("stop", text[end])
        stop = pieces[end]
        if "\ufffd" in stop or not stop:
            continue
        by_text = Case(base.prompt, SamplingParams(temperature=1.0, seed=4, max_tokens=60, stop=stop))
        output = run(built.engine, [by_text])[0]
        whole = built.tokenizer.decode(text)
        assert output.text == whole[: whole.index(stop)]
        assert output.token_ids == text[: len(output.token_ids)]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_min_tokens_holds_stop_ids_back_inside_drafts() -> None:
    free = Case((5, 9, 200), SamplingParams(temperature=0, max_tokens=40))
    often = max(set(plain([free])[0]), key=plain([free])[0].count)
    held = [
        Case((5, 9, 200), SamplingParams(temperature=t, seed=1, max_tokens=40, min_tokens=25, stop_token_ids=[often]))
        for t in (0.0, 1.0)
    ]
    outputs = run(build(**NOISY_TREE).engine, held)
    assert tokens(outputs) == plain(held)
    assert all(often not in o.token_ids[:25] for o in outputs)


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_a_model_that_drafts_for_itself_is_always_right(depth: int) -> None:
    some = [
        Case(c.prompt, SamplingParams(temperature=t, seed=3, max_tokens=200)) for c in MATRIX[:3] for t in (0.0, 1.0)
    ]
    outputs = run(build(drafter=str(tiny_model()), num_drafts=depth).engine, some)
    # The first round has no drafts, and the budget cuts the last one.
    for output in outputs:
        inner = output.stats.rounds - 2
        assert output.stats.accepted - 1 - (depth + 1) <= inner * (depth + 1)
        full = output.stats.accept_histogram[depth]
        assert full >= 0.98 * inner


def test_num_drafts_caps_each_request_on_its_own() -> None:
    itself = {"drafter": str(tiny_model()), "num_drafts": 4}
    some = [Case((7, 8, 9), SamplingParams(temperature=0, max_tokens=60, num_drafts=cap)) for cap in (0, 1, 4, None)]
    outputs = run(build(**itself).engine, some)
    assert len({tuple(o.token_ids) for o in outputs}) == 1
    assert [len(o.stats.accept_histogram) - 1 for o in outputs] == [0, 1, 4, 4]
    assert outputs[0].stats.drafted == 0
    assert outputs[0].stats.accept_length == 1.0


def test_drafts_resume_where_a_capped_neighbour_kept_the_cache_warm() -> None:
    """A request without speculation leaves draft KV that a later request can use."""
    engine = build(drafter=str(tiny_model()), num_drafts=4).engine
    prompt = tuple(range(1, 60))
    with torch.inference_mode():
        for cap in (0, None):
            request = engine.prepare(list(prompt), SamplingParams(temperature=0, max_tokens=64, num_drafts=cap))
            engine.enqueue(request)
            while engine.has_work:
                outputs = [d.output for d in engine.step() if d.output is not None] or [None]
    assert outputs[0] is not None
    assert outputs[0].stats.cached_tokens == 48
    assert outputs[0].stats.accept_histogram[4] >= outputs[0].stats.rounds - 2


def test_noise_as_a_drafter_changes_only_speed() -> None:
    some = MATRIX[70:74]
    outputs = run(build(drafter=str(eagle3_head(300)), num_drafts=6).engine, some)
    assert tokens(outputs) == plain(some)
    assert 1.0 <= accept_length(outputs) < 1.3


@pytest.mark.parametrize(
    "options", [NOISY_TREE, {"drafter": str(eagle3_head()), "num_drafts": 4}], ids=["tree", "eagle3"]
)
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_poisoned_pages_change_nothing(options: dict[str, object], attention: str) -> None:
    """NaN in every unwritten slot, including the scratch page and all table tails."""
    some = [Case(c.prompt, SamplingParams(temperature=1.0, seed=i, max_tokens=16)) for i, c in enumerate(MATRIX[80:84])]
    engine = build(row_sizes=(3, 8), attention=attention, **options).engine
    reader = engine.runner.drafter.reader
    for store in (engine.runner.target.store, reader.model.store if "model" in vars(reader) else reader.store):
        store.keys.fill_(float("nan"))
        store.values.fill_(float("nan"))
    assert tokens(run(engine, some)) == plain(some)


SCHEDULES = st.fixed_dictionaries(
    {
        "first": st.integers(0, 92),
        "arrivals": st.lists(st.integers(0, 25), min_size=5, max_size=5),
        "aborts": st.dictionaries(st.integers(0, 4), st.integers(0, 30), max_size=2),
        "page_size": st.sampled_from([1, 4, 16, 64]),
        "prefill_chunk": st.sampled_from([4, 16, 256]),
        "max_rows": st.integers(1, 5),
        "lag": st.integers(0, 2),
        "scarce": st.booleans(),
        "drafter": st.sampled_from(["chain", "tree", "ngram", "eagle3", "none"]),
    }
)
KINDS: dict[str, dict[str, object]] = {
    "chain": NOISY_CHAIN,
    "tree": NOISY_TREE,
    "ngram": {"drafter": "ngram"},
    "eagle3": {"drafter": str(eagle3_head())},
    "none": {},
}


@settings(max_examples=15)
@given(SCHEDULES)
def test_any_schedule_changes_no_token(plan: dict[str, object]) -> None:
    first = int(plan["first"])  # type: ignore[call-overload]
    some = [Case(p, SamplingParams(temperature=1.0, seed=9, max_tokens=24)) for p in PROMPTS[first : first + 5]]
    size = int(plan["page_size"])  # type: ignore[call-overload]
    pages = 2 + (190 if plan["scarce"] else 1200) // size
    engine = build(
        num_pages=pages,
        page_size=size,
        prefill_chunk=plan["prefill_chunk"],
        max_rows=plan["max_rows"],
        lag=plan["lag"],
        **KINDS[str(plan["drafter"])],
    ).engine
    aborts: dict[int, int] = plan["aborts"]  # type: ignore[assignment]
    outputs = run(engine, some, plan["arrivals"], aborts)  # type: ignore[arg-type]
    for output, expected in zip(outputs, plain(some), strict=True):
        kept = output.token_ids
        assert kept == expected[: len(kept)]
        assert output.finish_reason == "abort" or kept == expected


def test_the_cases_vary() -> None:
    """Greedy text varies, and the noisy drafter is sometimes right and sometimes wrong."""
    made = plain(MATRIX[:10])
    assert all(len(set(text)) > 8 for text in made)
    outputs = run(build(**NOISY_CHAIN).engine, MATRIX[:10])
    assert 1.2 < accept_length(outputs) < 4.5
    assert Path(tiny_model()).exists()
