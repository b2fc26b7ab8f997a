"""`peregrine bench offline`: stage times add up to a round, and tokens are equal with and without speculation."""

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from peregrine import LLM
from peregrine.bench import offline
from peregrine.bench.clock import StageClock
from peregrine.bench.offline_table import show, speeds, text_table
from peregrine.bench.peers import open_peer
from peregrine.errors import ConfigError
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.spec.round import no_mark


class CountingPeer:
    """Another engine that writes nothing."""

    name = "llama.cpp"

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def write(self, prompts: list[list[int]], tokens: int) -> None:
        assert all(isinstance(token, int) for prompt in prompts for token in prompt)
        self.calls.append((len(prompts), tokens))


@pytest.mark.parametrize(("name", "package"), [("model.gguf", "xllamacpp"), ("folder", "transformers")])
def test_a_missing_peer_is_named(name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"{package} not installed; run: pip install {package}, or pass --no-peer"):
        open_peer(str(tmp_path / name), rows=1, tokens=4)


def test_stages_add_up_to_rounds_and_tokens_agree() -> None:
    plan = offline.Plan(rows=(2,), tokens=8, repeats=2)
    peer = CountingPeer()
    drafts = {"num_drafts": 3, "windows": "fixed"}
    with LLM("merlin", num_pages=100, **drafts) as fast, LLM("merlin", num_pages=100, drafter="none") as slow:
        line = offline.measure_rows(plan, 2, slow, fast, peer)
        assert fast.engine.runner.mark is no_mark  # left as it was
    assert line["identical"] is True
    assert peer.calls == [(2, 8)] * 3  # a warm-up, and one in each turn
    assert line["llama.cpp"]["tokens_per_s"] > 0
    plain, speculative = (line[name]["stages"] for name in ("plain", "speculative"))  # type: ignore[index]
    assert speculative["propose_ms"] > plain["propose_ms"]
    for stages in (plain, speculative):
        parts = [stages[f"{part}_ms"] for part in ("target", "propose", "rest")]
        assert sum(parts) == pytest.approx(stages["round_ms"], abs=0.01)
        assert stages["target_ms"] > 0
        assert (0 < stages["outside_kernels"] < 1) if NUMBA_PRESENT else (stages["outside_kernels"] == 1)
    memory = {"weights_mib": 47.5, "kv_pages_mib": 42.6, "peak_beyond_mib": 235.1}
    facts = {"model": "merlin", "drafter": "eagle3", "shape": "chain of 3", "tokens": 8, "temperature": 0.0}
    shown = show({**facts, "start_up_s": 1.0, "memory": memory, "rows": [line]})
    assert shown.startswith("merlin, eagle3, chain of 3; 8 tokens per request, temperature 0\n")
    assert "the same tokens with and without speculation: yes" in shown
    assert not set(shown) & set("{}[]")  # words and tables, no dicts


LINE = {
    "rows": 8,
    "plain": {"tokens_per_s": 1000.0, "accept_length": 1.0},
    "speculative": {"tokens_per_s": 800.0, "accept_length": 2.5},
    "transformers": {"tokens_per_s": 400.0},
}


def test_figures_of_one_table_agree() -> None:
    """A round brings 8 x 2.5 tokens, so it takes 25 ms at 800 tokens/s."""
    assert [speed.cells() for speed in speeds(LINE)] == [
        ("transformers", "400.0", "0.40x", "", ""),
        ("plain", "1000.0", "1.00x", "1.00", "8.00"),
        ("speculative", "800.0", "0.80x", "2.50", "25.00"),
    ]


def test_columns_of_a_table_are_aligned() -> None:
    assert text_table([("", "a", "long"), ("name", "12.5", "1")]) == ["            a   long", "  name   12.5      1"]


def test_stages_are_what_lies_between_their_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stage is a difference of others, so none can be negative, whatever runs between rounds."""
    now = iter([0, 1, 3, 6, 10, 15, 21, 100, 101, 102, 103, 104, 105, 106])
    monkeypatch.setattr("peregrine.bench.clock.time.perf_counter", lambda: next(now))
    clock = StageClock()
    for _ in range(2):
        for stage in ("launch", "verify", "judge", "commit", "propose", "copy", "launched"):
            clock(stage)
    assert clock.seconds == {"launch": 2, "verify": 3, "judge": 4, "commit": 5, "propose": 6, "copy": 7}
    assert (clock.rounds, clock.round_seconds) == (2, 27)
    monkeypatch.setattr(offline, "timed_rounds", lambda engine: nullcontext(clock))
    monkeypatch.setattr(offline, "generate", lambda *_: None)
    monkeypatch.setattr("peregrine.bench.clock.time.perf_counter", iter([0, 30]).__next__)
    times = offline.stage_times(SimpleNamespace(engine=None, drop_cached=int), [], offline.Plan())  # type: ignore[arg-type]
    assert times["target_ms"] == 1000 * (3 + 4 + 5) / 2
    assert times["rest_ms"] == 1000 * (2 + 7) / 2
    assert times["host_between_rounds_ms"] == 1500


def test_measurements_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy for a while must slow all of them."""
    order: list[str] = []
    output = SimpleNamespace(token_ids=[1], stats=SimpleNamespace(accepted=2, rounds=1))
    monkeypatch.setattr(offline, "generate", lambda llm, *_: (order.append(llm.name), ([output], len(order)))[1])
    monkeypatch.setattr(offline, "stage_times", lambda *_: {})
    monkeypatch.setattr(offline, "measure_peer", lambda *_, warm_up: order.append("peer") or [7.0])
    slow, fast = (SimpleNamespace(name=name, drop_cached=lambda: order.append("drop")) for name in ("slow", "fast"))
    line = offline.measure_rows(offline.Plan(repeats=3), 1, slow, fast, CountingPeer())  # type: ignore[arg-type]
    assert order == ["slow", "fast", *["drop", "slow", "drop", "fast", "peer"] * 3]
    assert line["plain"] == {"tokens_per_s": 9, "slowest": 4, "fastest": 14, "accept_length": 2, "stages": {}}
