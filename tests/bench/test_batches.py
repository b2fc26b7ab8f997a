"""`peregrine bench throughput` and `latency`: every request has its lengths, rates follow from counts and time."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from peregrine import LLM
from peregrine.bench import batches, offline, sweep
from peregrine.bench.batches import Load
from peregrine.errors import ConfigError
from spec.harness import tiny_model

OPTIONS: dict[str, object] = {"model": str(tiny_model()), "drafter": "ngram", "num_pages": 200}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(requests, output tokens) of every measurement, and a clock on which each takes two seconds."""
    calls: list[tuple[int, int]] = []
    now = iter(range(0, 1000, 2))
    real = LLM.generate

    def generate(llm: LLM, prompts: list[list[int]], params: list[object], progress: bool) -> object:
        outputs = real(llm, prompts, params, progress=False)  # type: ignore[arg-type]
        calls.append((len(prompts), sum(len(output.token_ids) for output in outputs)))
        assert all(output.stats.cached_tokens == 0 for output in outputs)
        return outputs

    monkeypatch.setattr(LLM, "generate", generate)
    monkeypatch.setattr(batches, "time", SimpleNamespace(perf_counter=lambda: next(now)))  # the engine keeps its own
    return calls


def test_throughput_counts_all_tokens_of_all_requests(seen: list[tuple[int, int]]) -> None:
    result = batches.run_throughput(Load(5, input_len=20, output_len=10), {**OPTIONS, "max_rows": 4})
    assert seen == [(4, 4 * 8), (5, 50)]  # a warm-up of a full batch, then the measurement
    assert (result["num_requests"], result["total_num_tokens"], result["elapsed_time"]) == (5, 150, 2)
    assert (result["requests_per_second"], result["tokens_per_second"]) == (2.5, 75)
    assert result["output_tokens_per_second"] == 25
    assert 0 < result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"]
    shown = batches.show(result)
    assert "5 requests, 20 tokens in, 10 out; up to 4 at a time" in shown
    assert shown.startswith(f"{tiny_model()}, drafter ngram, cpu\n")
    assert "Throughput: 2.50 requests/s, 75.00 total tokens/s, 25.00 output tokens/s" in shown


def test_latency_measures_one_batch_again_and_again(seen: list[tuple[int, int]]) -> None:
    result = batches.run_latency(Load(3, input_len=7, output_len=6), 4, 1, OPTIONS)
    assert seen == [(3, 18)] * 5
    assert result["latencies"] == [2] * 4
    assert (result["avg_latency"], result["latency_ms"]["p99"], result["max_rows"]) == (2, 2000, 3)
    assert result["tpot_ms"]["mean"] > 0
    assert "Avg latency: 2.0000 seconds" in batches.show(result)


def test_prompts_of_a_file_are_used_in_turn(seen: list[tuple[int, int]], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one two"}\n{"prompt": "three"}\n')
    result = batches.run_throughput(Load(3, output_len=1, prompts=file), OPTIONS)
    with LLM(**OPTIONS) as llm:  # type: ignore[arg-type]
        lengths = [len(llm.encode(text)) for text in ("one two", "three", "one two")]
    assert result["total_num_tokens"] == sum(lengths) + 3
    assert result["tpot_ms"] is None  # a single token has none
    assert f"prompts of {file}" in batches.show(result)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    """Before any token is drawn: no machine could hold so many."""
    with pytest.raises(ConfigError, match=r"input_len=1000000000000: with output_len=100 more than the \d+ tokens"):
        batches.run_throughput(Load(1, input_len=10**12, output_len=100), OPTIONS)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n{"prompt": "' + "two " * 900 + '"}\n')
    with pytest.raises(ConfigError, match=r"prompts.*: prompt 2 has .* take it out"):
        batches.run_throughput(Load(2, output_len=1, prompts=file), OPTIONS)
    with pytest.raises(ConfigError, match="batch_size=4: at most 3 requests"):
        batches.run_latency(Load(4), 1, 0, {**OPTIONS, "max_rows": 3})
    for refused in (
        lambda: offline.run(offline.Plan(rows=(1, 4)), {**OPTIONS, "max_rows": 3}),
        lambda: sweep.run(sweep.Plan(drafts=(1,), trees=(), prompts=["x"], rows=4), {"model": "x", "max_rows": 3}),
    ):
        with pytest.raises(ConfigError, match="rows=4: at most 3 requests"):
            refused()


def test_a_batch_is_as_large_as_was_asked_for_where_the_engine_may_choose() -> None:
    load = Load(12, input_len=4, output_len=1)
    assert batches.run_latency(load, 1, 0, {**OPTIONS, "max_rows": 0})["max_rows"] == 12


def test_answers_of_one_batch_are_not_looked_up_in_the_next() -> None:
    """Batches have the same prompts: with the first one's answers all drafts of the others would be right."""
    options = {**OPTIONS, "drafter": "suffix", "num_drafts": 3, "windows": "fixed"}
    load = Load(1, input_len=9, output_len=40)
    once, again = (batches.run_latency(load, count, 0, options)["accept_length"] for count in (1, 3))
    assert once == again < 2
