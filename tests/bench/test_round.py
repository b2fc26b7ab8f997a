"""`peregrine bench round`: an engine that every case fits, a floor that counts what a round must read."""

import json

import pytest
import torch

from peregrine.bench import round as rounds
from peregrine.bench.round import WARMUP_ROUNDS, Case, engine_config, round_bytes
from peregrine.cli.main import main
from peregrine.config import TreeShape
from peregrine.errors import ConfigError
from spec.harness import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    build,
    eagle3_head,
    eagle_head,
    noisy_model,
)

Q, KV = HEADS * HEAD_DIM, 2 * KV_HEADS * HEAD_DIM
KEYS = KV * 4  # bytes of one token's keys and values in one layer


def linear(outputs: int, inputs: int) -> int:
    """Bytes in float32; the CPU's layout fills outputs up to whole panels of 16."""
    return -(-outputs // 16) * 16 * inputs * 4


def layer(in_size: int, split: bool) -> int:
    asked = linear(Q, in_size) + linear(KV, in_size) if split else linear(Q + KV, in_size)
    return asked + linear(HIDDEN, Q) + linear(2 * INNER, HIDDEN) + linear(HIDDEN, INNER)


LAYER, LAST_LAYER = layer(HIDDEN, split=False), layer(HIDDEN, split=True)
OUTPUT = linear(VOCAB, HIDDEN)
MODEL = (LAYERS - 1) * LAYER + LAST_LAYER + OUTPUT


def test_plain_decoding_reads_weights_and_keys_once() -> None:
    engine = build().engine
    assert round_bytes(engine, 1, 0) == MODEL
    assert round_bytes(engine, 3, 100) == MODEL + 3 * 100 * LAYERS * KEYS
    ngram = build(drafter="ngram").engine
    assert round_bytes(ngram, 3, 100) == MODEL + 3 * 100 * LAYERS * KEYS


@pytest.mark.parametrize("guess", [{"num_drafts": 3}, {"tree": (3, 2, 8)}], ids=["chain", "tree"])
def test_a_draft_head_is_read_on_every_pass_and_fuses_once(guess: dict[str, object]) -> None:
    engine = build(drafter=str(eagle3_head()), **guess).engine  # type: ignore[arg-type]
    each = layer(2 * HIDDEN, split=True) + linear(200, HIDDEN) + 2 * 50 * KEYS
    fuse = linear(HIDDEN, 3 * HIDDEN)
    assert round_bytes(engine, 2, 50) == MODEL + 2 * 50 * LAYERS * KEYS + fuse + 3 * each


def test_a_borrowed_output_head_is_read_too() -> None:
    engine = build(drafter=str(eagle_head()), num_drafts=2).engine
    each = LAST_LAYER + linear(HIDDEN, 2 * HIDDEN) + OUTPUT
    assert round_bytes(engine, 1, 0) == MODEL + 2 * each


def test_a_draft_model_is_read_on_every_pass() -> None:
    engine = build(drafter=str(noisy_model()), num_drafts=4).engine
    assert round_bytes(engine, 1, 10) == 5 * (MODEL + 10 * LAYERS * KEYS)


@pytest.mark.parametrize(
    ("options", "depth"),
    [({}, 3), ({"num_drafts": 5}, 5), ({"tree": (2, 2, 6)}, 2), ({"drafter": "none"}, 3)],
)
def test_an_engine_is_asked_for_that_holds_every_case(options: dict[str, object], depth: int) -> None:
    cases, measured = [Case(1, 1000), Case(4, 100)], 50
    config = engine_config({"model": "m", **options}, cases, measured)
    growth = (measured + WARMUP_ROUNDS) * (depth + 1)  # if every draft is right
    assert config.max_len is not None
    assert config.max_len >= 1000 + growth
    assert config.num_pages is not None
    for case in cases:
        assert (config.num_pages - 1) * config.page_size >= case.rows * (case.context + growth)
    assert (config.max_rows, config.row_sizes) == (4, (1, 4))


def test_what_was_asked_for_is_kept() -> None:
    config = engine_config({"model": "m", "page_size": 64, "num_pages": 77}, [Case(2, 10)], 5)
    assert (config.page_size, config.num_pages, config.max_rows) == (64, 77, 2)
    assert engine_config({"tree": TreeShape(3, 2, 8)}, [Case(1, 8)], 5).tree == TreeShape(3, 2, 8)


def test_a_table_has_a_line_for_each_case() -> None:
    figures = rounds.Figures(8, 2048, 5.0, 3.0, 4800.0, 4.0, 1.25, 16.0, 80.0, 0.004)
    facts = {"asked": {"model": "m"}, "copy_tb_per_s": 4.1, "start_s": 9.0}
    lines = rounds.show(facts | {"cases": [rounds.asdict(figures)]}).splitlines()
    assert len(lines) == 3
    assert lines[-1].split() == ["8", "2048", "5.000", "4.000", "1.250", "3.00", "4800", "80", "0.4%"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is something to measure")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="bench round: measures CUDA devices"):
        rounds.run(engine_config({}, [Case(1, 8)], 5), [Case(1, 8)], 5)
    assert main(("bench", "round", "--cases", "1x8")) == 2
    assert "bench round: measures CUDA devices" in capsys.readouterr().err


def test_the_command_asks_for_its_cases(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    asked: list[object] = []

    def run(config: object, cases: object, count: int) -> dict[str, object]:
        asked.extend([config, cases, count])
        return {"benchmark": "round"}

    monkeypatch.setattr(rounds, "run", run)
    asks = "--cases 2x64 --rounds 7 --accept 2.5 --tree 3,2,8 --json"
    assert main(("bench", "round", *asks.split())) == 0
    config, cases, count = asked
    assert cases == [Case(2, 64)]
    assert count == 7
    assert config.simulate_accept == 2.5  # type: ignore[attr-defined]
    assert config.tree == TreeShape(3, 2, 8)  # type: ignore[attr-defined]
    assert json.loads(capsys.readouterr().out)["benchmark"] == "round"
