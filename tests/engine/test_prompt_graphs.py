"""Prompt chunks by recorded forwards, padded to a recorded size: the same tokens as without."""

from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import accumulate, product
from typing import Any, cast

import pytest
import torch

from kernels.interpreted import needs_interpreter
from peregrine.attention.metadata import AttentionMetadata, LayerAttention
from peregrine.attention.triton_backend import TritonBackend
from peregrine.attention.window import Window
from peregrine.bench.roofline import stores_of
from peregrine.cache.store import KVShape, KVStore
from peregrine.engine.engine import Engine
from peregrine.engine.first_round import FirstRound
from peregrine.engine.graphs import Graphs
from peregrine.engine.prompt_graphs import PromptGraphs, chunk_sizes, rows_of, size_for
from peregrine.engine.runner import VARIANTS
from peregrine.sampling import SamplingParams
from spec.any_plans import plan_anything
from spec.cached_keys import check_cached_keys
from spec.harness import Case, build, cases, eagle3_head, eagle_head, noisy_model, run


class CalledGraphs:
    """Stands for CUDA graphs on a CPU: a replay is the recorded call, whose results go to the memory they had."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, Callable[[], Any]] = {}
        self.results: dict[Hashable, Any] = {}
        self.replayed: list[Hashable] = []

    def record(self, key: Hashable, call: Callable[[], Any]) -> int:
        self.calls[key], self.results[key] = call, call()
        return 0

    def replay(self, key: Hashable) -> Any:
        self.replayed.append(key)
        write_over(self.results[key], self.calls[key]())
        return self.results[key]


def write_over(old: Any, new: Any) -> None:
    """Copy tensors, also those in dataclasses and tuples, over those of an earlier call."""
    if isinstance(old, torch.Tensor):
        old.copy_(new)
    elif isinstance(old, tuple):
        for one, other in zip(old, new, strict=True):
            write_over(one, other)
    elif is_dataclass(old):
        for name in (field.name for field in fields(old)):
            write_over(getattr(old, name), getattr(new, name))


def recorded(engine: Engine) -> CalledGraphs:
    """Let the engine read its prompts, and run the first rounds of single requests, by recorded forwards."""
    graphs, seats, runner = CalledGraphs(), engine.runner.seats, engine.runner
    pages = -(-seats.max_places // seats.page_size)
    most = engine.policy.prefill_chunk
    parts: Any = runner.target, runner.drafter
    ahead = None if runner.ahead is None else runner.ahead[1]
    runner.first = FirstRound(*parts, runner.judge, seats, cast("Graphs[Any]", graphs), VARIANTS, ahead)
    prompts = PromptGraphs(runner.rounds, cast("Graphs[Any]", graphs), most, pages, runner.first)
    with torch.inference_mode():
        assert list(prompts.record()) == [0] * (len(prompts.sizes) + 1)
        assert not any(runner.first.record())
        for depth, sampled in product(() if ahead is None else ahead.drafter.depths[1:], (False, True)):
            assert ahead is not None
            graphs.record(("draft", 1, depth, sampled), partial(ahead.draft, 1, depth, sampled))
    engine.replay_chunks = prompts.replay
    return graphs


def long_cases(count: int) -> list[Case]:
    """Requests whose prompts have odd lengths, some of them longer than a chunk."""
    return [
        Case((case.prompt * 60)[: 37 * (number + 1)], case.params)
        for number, case in enumerate(cases(count, max_tokens=12))
    ]


@pytest.mark.parametrize(
    "options", [{}, {"drafter": str(noisy_model()), "num_drafts": 2}], ids=["plain", "draft model"]
)
@pytest.mark.parametrize("chunk", [96, 256])
def test_padded_chunks_change_no_token(options: dict[str, object], chunk: int) -> None:
    sizes = {"page_size": 8, "prefill_chunk": chunk, "max_rows": 4, **options}
    asked = long_cases(6)
    expected = run(build(**sizes).engine, asked)
    engine = build(**sizes).engine
    graphs = recorded(engine)
    outputs = run(engine, asked)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.stats for o in outputs] == [o.stats for o in expected]
    assert ("chunk", chunk, rows_of(chunk) + 1) in graphs.replayed
    assert (("chunk", chunk, 1) in graphs.replayed) == (chunk == 96), "whole chunks of one prompt have no padding"


DRAFTERS: dict[str, tuple[bool, dict[str, Any]]] = {  # whether rounds are planned, and options
    "plain": (False, {}),
    "eagle3": (False, {"drafter": str(eagle3_head()), "num_drafts": 3}),
    "ngram": (False, {"drafter": "ngram", "num_drafts": 3}),
    "noisy model": (True, {"drafter": str(noisy_model()), "num_drafts": 3}),
    "eagle": (True, {"drafter": str(eagle_head()), "num_drafts": 2}),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_request_alone_has_its_first_token_from_the_prompts_last_chunk(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it asks for; tokens, verdicts and stores are those of a round that reads the newest token itself."""
    planned, options = DRAFTERS[name]
    shapes = check_cached_keys(monkeypatch)
    sizes: dict[str, Any] = {"page_size": 8, "prefill_chunk": 96, "max_rows": 3, "row_sizes": (1, 3)}
    engines = [build(**sizes, **options, prefix_cache=False).engine for _ in range(2)]
    for engine in engines if planned else ():
        plan_anything(engine, 3)
    graphs = recorded(engines[1])
    asked = [*long_cases(4), Case((7, 8, 9), SamplingParams(temperature=0.0, max_tokens=6, logprobs=2))]
    expected, alone = ([run(engine, [case])[0] for case in asked] for engine in engines)
    assert [(o.token_ids, o.logprobs, o.stats) for o in alone] == [(o.token_ids, o.logprobs, o.stats) for o in expected]
    assert len(firsts(graphs)) == len(asked)
    for one, other in zip(*(map(written, engines)), strict=True):
        assert torch.equal(one, other), "keys or values differ"
    assert True in shapes, "the last layer has no other queries than the prompt's newest token"
    together = run(engines[1], asked, arrivals=[0, 1, 2, 0, 0])
    assert [o.token_ids for o in together] == [o.token_ids for o in expected]
    before = len(firsts(graphs))
    shown = Case(asked[0].prompt, replace(asked[0].params, report_drafts=True))
    assert run(engines[1], [shown])[0].token_ids == expected[0].token_ids
    assert len(firsts(graphs)) == before, "drafts are reported by whole rounds"


def firsts(graphs: CalledGraphs) -> list[Hashable]:
    """The first rounds that began with what a chunk had computed."""
    return [key for key in graphs.replayed if key in {("first", variant) for variant in VARIANTS}]


def written(engine: Engine) -> list[torch.Tensor]:
    """All pages of all stores but the scratch page."""
    return [part[:, store.page_size :] for store in stores_of(engine) for part in store.parts]


def test_a_chunk_is_padded_to_the_next_size() -> None:
    assert chunk_sizes(4096) == [64, *range(128, 4096, 128), 4096]
    assert chunk_sizes(4224)[-3:] == [3968, 4096, 4224], "prompts alone have chunks of 4096"
    assert chunk_sizes(8192)[-3:] == [7680, 7936, 8192], "larger ones are padded by a sixteenth at most"
    assert chunk_sizes(100) == [64, 100]
    assert chunk_sizes(50) == [50]
    assert [rows_of(size) for size in (20, 64, 256, 4096)] == [1, 1, 5, 32]
    sizes = chunk_sizes(4096)
    assert size_for(sizes, 1, 1) == 64
    assert size_for(sizes, 2, 2) == 128, "a chunk of 64 has one prompt"
    assert size_for(sizes, 700, 5) == 768
    assert size_for(sizes, 1030, 1) == 1152
    assert size_for(sizes, 1500, 32) == 1536
    assert size_for(sizes, 2049, 1) == 2176
    assert size_for(sizes, 4095, 1) == 4096, "a prompt is read up to its last token"
    assert size_for(sizes, 33, 33) is None, "more prompts than a recorded chunk has are read kernel by kernel"
    assert size_for(sizes, 4097, 1) is None


@needs_interpreter
def test_gpu_attention_takes_empty_rows_and_padding() -> None:
    """Forty tokens in a window of 64: their outputs are those they have alone."""
    store = KVStore(1, 8, 8, KVShape.of_heads(1, 16), torch.float32, torch.device("cpu"))
    q, k, v = (torch.randn(64, heads, 16) for heads in (2, 1, 1))
    pages = torch.arange(1, 6)[None]
    at = torch.arange(40)

    def attended(lens: list[int], positions: torch.Tensor, table: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        count = len(positions)
        metadata = AttentionMetadata(
            window=Window(len(lens), count, count, None),
            positions=positions,
            q_starts=torch.tensor([0, *accumulate(lens)]),
            past_lens=torch.zeros(len(lens), dtype=torch.int64),
            page_table=table,
            page_size=8,
            slots=slots,
            ancestors=None,
        )
        attend = TritonBackend().bind(store, [LayerAttention(0.25, None, None)], metadata)
        return attend(0, q[:count], k[:count], v[:count])

    alone = attended([40], at, pages, 8 + at)
    zeros = torch.zeros(24, dtype=torch.int64)
    padded = attended(
        [40, 0, 0, 24], torch.cat([at, zeros]), torch.cat([pages, torch.zeros(3, 5).long()]), torch.cat([8 + at, zeros])
    )
    assert torch.equal(padded[:40], alone)
    assert padded.isfinite().all(), "padding was not computed"
