"""Sizes that were left open follow from device, memory and model; prompt chunks from what the last ones cost."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from peregrine import hardware
from peregrine.config import EngineConfig
from peregrine.engine import chunk_size
from peregrine.engine.choices import pick_max_rows, pick_page_size, pick_prefill_chunk, pick_row_sizes
from peregrine.engine.chunk_size import ChunkSize
from peregrine.engine.memory import page_bytes
from peregrine.engine.prefill import PromptChunk, read_chunks
from peregrine.engine.prompt_graphs import chunk_sizes
from peregrine.engine.rounds import Rounds
from peregrine.hardware import GIB, Gpu
from peregrine.sampling import SamplingParams
from peregrine.spec.registry import StoreShape
from peregrine.synthetic.shapes import shape_config
from spec.harness import Case, build, run, tokens

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16 = torch.bfloat16


def sizes(model: str, free_gib: float, patch: pytest.MonkeyPatch, **options: object) -> tuple[int, int]:
    """Rows and chunk for a model on a GPU with so much memory left beside its weights."""
    patch.setattr(hardware, "read_gpu", lambda index: Gpu(index, "a GPU", (9, 0), 0, int(free_gib * GIB)))
    config, asked = shape_config(model), EngineConfig(**options)  # type: ignore[arg-type]
    token = page_bytes([StoreShape(config.num_layers, config.kv_shape)], 1, BF16)
    max_len = min(config.max_positions, 131072)
    rows, _ = pick_max_rows(asked, config, token, max_len, CUDA)
    chunk, _ = pick_prefill_chunk(replace(asked, max_rows=rows), config, max_len, CUDA, BF16)
    return rows, chunk


@pytest.mark.parametrize(
    ("model", "free_gib", "options", "expected"),
    [
        ("shape:llama-3.1-8b", 123, {}, (256, 4224)),  # an H200
        ("shape:llama-3.1-8b", 123, {"num_drafts": 0}, (256, 4224)),
        ("shape:llama-3.1-8b", 123, {"tree": (4, 8, 64)}, (32, 4224)),  # 64 rows of logits for each request
        ("shape:llama-3.1-8b", 8, {}, (32, 4224)),  # a GPU of 24 GB
        ("shape:llama-3.1-8b", 2, {}, (8, 1024)),
        ("shape:llama-3.1-8b", 0.1, {}, (1, 256)),
        ("shape:deepseek-v2-lite", 100, {}, (256, 4224)),
        ("shape:llama-3.1-8b", 123, {"max_rows": 5, "prefill_chunk": 77}, (5, 77)),
        ("shape:llama-3.1-8b", 123, {"row_sizes": (1, 12)}, (12, 4224)),
        ("shape:llama-3.1-8b", 123, {"num_pages": 400, "page_size": 64}, (16, 4224)),  # 25,600 tokens
    ],
    ids=str,
)
def test_a_gpus_sizes_follow_from_its_memory(
    model: str, free_gib: float, options: dict[str, object], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sizes(model, free_gib, monkeypatch, **options) == expected


def test_a_cpus_sizes_are_small_and_each_is_a_decision() -> None:
    made = {decision.field: (decision.value, decision.because) for decision in build().decisions}
    assert made["max_rows"] == (8, "rows share the cores")
    stall = "less where it would hold up running requests for more than 100 ms"
    assert made["prefill_chunk"] == (256, stall)
    assert made["page_size"] == (16, "prefixes are shared in steps of it")
    made = {d.field: d.because for d in build(page_size=8, max_rows=2, prefill_chunk=32).decisions}
    assert {made[field] for field in ("page_size", "max_rows", "prefill_chunk")} == {"asked for"}
    assert pick_page_size(EngineConfig(page_size=None)) == pick_page_size(EngineConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, (1,)),
        (8, (1, 2, 4, 8)),
        (50, (1, 2, 4, 8, 16, 32, 48, 50)),
        (256, (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)),
    ],
)
def test_large_batches_are_padded_by_less_than_a_half(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert pick_row_sizes(EngineConfig(max_rows=max_rows), graphs=True) == sizes
    assert pick_row_sizes(EngineConfig(max_rows=max_rows), graphs=False) is None


@pytest.mark.parametrize(("fixed", "per_token"), [(0.0, 1e-4), (0.02, 1e-4), (0.08, 1e-4), (0.05, 1e-6)])
def test_chunks_settle_where_they_take_the_time_allowed(fixed: float, per_token: float) -> None:
    size = ChunkSize(4096, 0.1, CPU)
    costs = []
    for _ in range(60):
        count = size.tokens(running=True)
        costs.append(fixed + per_token * count)
        size.learn(count, costs[-1])
    best = min(4096, (0.1 - fixed) / per_token)
    assert best - 9 <= size.tokens(running=True) <= best + 8
    assert max(costs) <= 0.1 + 8.1 * per_token  # none was longer on the way, but for rounding to a multiple of 8
    assert size.tokens(running=False) == 4096  # nobody is held up


def test_a_chunk_is_never_smaller_than_the_least() -> None:
    size = ChunkSize(4096, 0.1, CPU)
    size.learn(4096, 60.0)  # kernels were compiled
    assert size.tokens(running=True) == size.least == 32
    size.learn(32, 0.01)
    assert size.tokens(running=True) == 320
    size.learn(3, 0.009)  # a short prompt costs little less, and says nothing about long ones
    assert size.tokens(running=True) == 320
    assert ChunkSize(8, 0.1, CPU).tokens(running=True) == 8


def test_chunks_on_a_gpu_have_sizes_that_are_recorded() -> None:
    size, recorded = ChunkSize(4224, 0.1, CUDA), chunk_sizes(4224)
    for seconds in (0.3, 0.09, 0.11, 0.17, 0.05):
        count = size.tokens(running=True)
        assert count in recorded
        size.learn(count, seconds)


class SlowEvent:
    """An event of a device that works until the host waits for it."""

    waits = 0

    def record(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed, SlowEvent.waits = True, SlowEvent.waits + 1

    def elapsed_time(self, other: "SlowEvent") -> float:
        return 200.0


def test_the_host_waits_for_chunks_only_before_it_looks_for_new_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks may be queued. Asking for the next one's size waits for none, `wait` for the oldest."""
    monkeypatch.setattr(chunk_size, "new_event", SlowEvent)
    monkeypatch.setattr(SlowEvent, "waits", 0)
    size = ChunkSize(4096, 0.1, CUDA)
    for before in (0, 0, 1, 2, 3):
        assert size.tokens(running=False) == 4096
        assert SlowEvent.waits == before
        with size.timed(4096):
            pass
        size.wait()
    assert size.tokens(running=True) == 2048, "chunks that ended took twice the time that is allowed"


def test_a_size_that_was_asked_for_is_kept() -> None:
    engine = build(prefill_chunk=77).engine
    engine.chunk_size.learn(77, 60.0)
    assert engine.chunk_size.tokens(running=True) == 77


def test_a_long_prompt_is_cut_while_requests_run_and_no_token_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock where a token takes 2 ms to read: 50 of them between two rounds, rounded, and 256 if nothing runs."""
    now, read = [0.0], []

    def read_slowly(rounds: Rounds, chunks: list[PromptChunk], *rest: object) -> None:
        count = sum(chunk.end - chunk.start for chunk in chunks)
        read.append(count)
        now[0] += 0.002 * count
        read_chunks(rounds, chunks, *rest)  # type: ignore[arg-type]

    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    some = [Case((5, 6, 7), params), Case(tuple(range(1, 299)) * 2, params)]
    expected = tokens(run(build(prefill_chunk=1024).engine, some))
    monkeypatch.setattr("peregrine.engine.engine.read_chunks", read_slowly)
    monkeypatch.setattr(chunk_size, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert tokens(run(build().engine, some, arrivals=[0, 3])) == expected
    # The first prompt; the least, until a chunk was timed that is large enough; then what 100 ms allow.
    assert read == [2, 32, *[56, 48] * 5, 43]
    read.clear()
    assert tokens(run(build().engine, some[1:])) == expected[1:]
    assert read == [256, 256, 83]
