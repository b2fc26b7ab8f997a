"""Pages that come back from host memory change no token: any drafter, store, schedule, and copies that end late."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.late_copies import LateCopies
from peregrine.engine import memory
from peregrine.engine.engine import Engine
from peregrine.engine.output import Output
from peregrine.errors import ConfigError
from peregrine.sampling import SamplingParams
from spec.harness import Case, build, disturbed, eagle3_head, mla_model, noisy_model, prompts, run, tiny_model, tokens

PREFIXES = prompts(3, seed=4, low=90, high=100)
SAMPLED = SamplingParams(temperature=1.0, seed=9, max_tokens=12)
CASES = [Case((*PREFIXES[i % 3][: 30 + 5 * i], 7 + i), SAMPLED) for i in range(12)]
SMALL = {"page_size": 4, "max_rows": 2, "num_pages": 45}  # for two requests at the most
DRAFTERS: dict[str, dict[str, object]] = {
    "chain": {"drafter": str(noisy_model()), "num_drafts": 4},
    "tree": {"drafter": str(noisy_model()), "tree": (4, 3, 14)},
    "eagle3": {"drafter": str(eagle3_head())},
    "ngram": {"drafter": "ngram"},
    "none": {},
}


@cache
def plain(model: Path, kv_dtype: str = "auto") -> list[list[int]]:
    return tokens(run(build(model, kv_dtype=kv_dtype, prefix_cache=False).engine, CASES))


@contextmanager
def slots(count: int, late: bool) -> Iterator[None]:
    """Engines made here have host memory for `count` pages, whatever their pages' size; `late`: as on a GPU."""

    class Copies(LateCopies if late else memory.PageCopies):  # type: ignore[misc]
        def __init__(self, stores: list[memory.KVStore], num_slots: int) -> None:
            super().__init__(stores, count)

    with patch.object(memory, "PageCopies", Copies):
        yield


def check(outputs: list[Output], expected: list[list[int]]) -> None:
    for output, whole in zip(outputs, expected, strict=True):
        kept = output.token_ids
        assert kept == whole[: len(kept)]
        assert output.finish_reason == "abort" or kept == whole


@pytest.mark.parametrize(
    ("model", "options", "late"),
    [
        (tiny_model(), DRAFTERS["tree"], False),
        (tiny_model(), DRAFTERS["eagle3"] | {"lag": 1}, True),
        (tiny_model(), {"kv_dtype": "float8"}, True),
        (mla_model(), {"drafter": str(disturbed(mla_model(), 0.05)), "num_drafts": 3}, False),
    ],
    ids=["tree", "eagle3, one behind, late", "float8, late", "MLA"],
)
def test_pages_from_the_host_change_no_token(model: Path, options: dict[str, object], late: bool) -> None:
    with slots(200, late):
        built = build(model, host_cache=0.1, **SMALL, **options)
    twice = run(built.engine, CASES + CASES, arrivals=[2 * i for i in range(24)])
    check(twice, plain(model, str(options.get("kv_dtype", "auto"))) * 2)
    tier = built.engine.ledger.tier
    assert tier is not None
    assert tier.pages_in > 50
    assert tier.pages_out > 50
    # A prompt is found whole the second time, though the device has room for two of the twelve.
    assert sum(output.stats.cached_tokens for output in twice[12:]) > 0.8 * sum(len(c.prompt) for c in CASES)


SCHEDULES = st.fixed_dictionaries(
    {
        "order": st.lists(st.integers(0, 11), min_size=6, max_size=10),
        "gap": st.integers(0, 20),
        "aborts": st.dictionaries(st.integers(0, 9), st.integers(0, 40), max_size=3),
        "num_pages": st.integers(42, 80),
        "num_slots": st.integers(1, 60),
        "max_rows": st.integers(1, 5),
        "prefill_chunk": st.sampled_from([4, 16, 256]),
        "lag": st.integers(0, 2),
        "late": st.booleans(),
        "drafter": st.sampled_from(list(DRAFTERS)),
    }
)


@settings(max_examples=10)
@given(SCHEDULES)
def test_any_schedule_with_few_pages_changes_no_token(plan: dict[str, object]) -> None:
    order: list[int] = plan.pop("order")  # type: ignore[assignment]
    gap, aborts, num_slots, late = (plan.pop(name) for name in ("gap", "aborts", "num_slots", "late"))
    with slots(int(num_slots), bool(late)):  # type: ignore[call-overload]
        engine = build(page_size=4, host_cache=0.1, **plan | DRAFTERS[str(plan["drafter"])]).engine  # type: ignore[arg-type]
    arrivals = [int(gap) * i for i in range(len(order))]  # type: ignore[call-overload]
    wanted = {index: when for index, when in aborts.items() if index < len(order)}  # type: ignore[attr-defined]
    outputs = run(engine, [CASES[i] for i in order], arrivals, wanted)
    check(outputs, [plain(tiny_model())[i] for i in order])
    tier = engine.ledger.tier
    assert tier is not None
    assert tier.num_pages <= tier.copies.num_slots


def test_running_requests_do_not_wait_for_pages_from_the_host() -> None:
    """A copy that does not end holds back its own request; rounds and other prompts go on."""
    with slots(200, late=True):
        engine = build(page_size=4, max_rows=3, num_pages=90, host_cache=0.1).engine
    tier = engine.ledger.tier
    assert tier is not None
    with torch.inference_mode():
        run_one(engine, CASES[9])
        tier.save(engine.ledger.tree.take(99))  # type: ignore[union-attr]
        first, second, third = (engine.prepare(list(CASES[i].prompt), CASES[i].params) for i in (0, 9, 4))
        engine.enqueue(first)
        engine.step()
        engine.enqueue(second)
        engine.enqueue(third)
        engine.step()
        assert second.arriving is not None
        assert second.arriving.ready is not None
        for event in tier.copies.queue:  # type: ignore[attr-defined]
            event.patience = 10**6
        ended = []
        while len(ended) < 2:
            ended += [delta.output for delta in engine.step() if delta.output is not None]
        assert {output.request_id for output in ended} == {first.id, third.id}
        assert second.num_generated == 0
        # Nothing else can be done, so the engine waits for the copy rather than spin.
        engine.step()
        assert second.arriving is None
        while engine.has_work:
            ended += [delta.output for delta in engine.step() if delta.output is not None]
    assert tokens(ended[-1:]) == [plain(tiny_model())[9]]


def run_one(engine: Engine, case: Case) -> None:
    engine.enqueue(engine.prepare(list(case.prompt), case.params))
    while engine.has_work:
        engine.step()


def test_a_flushed_cache_is_empty_on_the_host_too() -> None:
    built = build(host_cache=0.01, **SMALL)
    with torch.inference_mode():
        for case in CASES[:6]:
            run_one(built.engine, case)
        tier = built.engine.ledger.tier
        assert tier is not None
        assert tier.num_pages > 0
        assert built.engine.drop_cached()
        assert tier.num_pages == 0
        brought = tier.pages_in
        run_one(built.engine, CASES[0])
    assert tier.pages_in == brought


def test_the_decision_says_what_fits_and_bad_sizes_are_refused() -> None:
    made = {decision.field: decision for decision in build(host_cache=0.5, page_size=16).decisions}
    size = 4 * 16 * 2 * 2 * 16 * 4  # layers, tokens, keys and values, heads, entries, bytes
    assert made["host_cache"].value == "0.5 GiB"
    assert made["host_cache"].because == f"{2**29 // size} evicted pages of {size} bytes"
    assert "host_cache" not in {decision.field for decision in build().decisions}
    with pytest.raises(ConfigError, match=f"host_cache=1e-09: less than a page of {size} bytes; give it more, or 0"):
        build(host_cache=1e-9)
    with pytest.raises(ConfigError, match="cpu has no room for host_cache=1e"):
        build(host_cache=1e7)
