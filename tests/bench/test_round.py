"""`peregrine bench round`: an engine large enough for every case; a roofline of the bytes a round must read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from peregrine.bench import round as rounds
from peregrine.bench.roofline import (
    expected_hits,
    expert_work,
    experts_read,
    mixtures_of,
    round_work,
    stores_of,
    weight_work,
)
from peregrine.bench.round import HOST_ROUNDS, REST, Case, check_cases, engine_config
from peregrine.bench.seating import fill_stores, seat, unseat
from peregrine.cli.main import main
from peregrine.config import TreeShape
from peregrine.engine.engine import Engine
from peregrine.errors import ConfigError
from peregrine.kernels.runtime.cpu import NUMBA_PRESENT
from peregrine.sampling import SamplingParams
from peregrine.spec.round import no_mark
from spec.block_heads import RANK, block_head
from spec.expert_models import mla_mtp_model
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
    mla_model,
    noisy_model,
)

Q, KV = HEADS * HEAD_DIM, 2 * KV_HEADS * HEAD_DIM
KEYS = KV * 4  # bytes of one token's keys and values in one layer


def num_bytes(engine: Engine, rows: int, context: float) -> float:
    return round_work(engine, rows, context).num_bytes


def weights(module: nn.Module, num_tokens: int) -> float:
    return weight_work(module, num_tokens).num_bytes


def linear(outputs: int, inputs: int) -> int:
    """Bytes in float32; the layout of the compiled kernel pads outputs to whole panels of 16."""
    panel = 16 if NUMBA_PRESENT else 1
    return -(-outputs // panel) * panel * inputs * 4


def layer(in_size: int, split: bool) -> int:
    asked = linear(Q, in_size) + linear(KV, in_size) if split else linear(Q + KV, in_size)
    return asked + linear(HIDDEN, Q) + linear(2 * INNER, HIDDEN) + linear(HIDDEN, INNER)


LAYER, LAST_LAYER = layer(HIDDEN, split=False), layer(HIDDEN, split=True)
OUTPUT = linear(VOCAB, HIDDEN)
MODEL = (LAYERS - 1) * LAYER + LAST_LAYER + OUTPUT


def test_plain_decoding_reads_weights_and_keys_once() -> None:
    engine = build().engine
    assert num_bytes(engine, 1, 0) == MODEL
    assert num_bytes(engine, 3, 100) == MODEL + 3 * 100 * LAYERS * KEYS
    ngram = build(drafter="ngram").engine
    assert num_bytes(ngram, 3, 100) == MODEL + 3 * 100 * LAYERS * KEYS


@pytest.mark.parametrize("guess", [{"num_drafts": 3}, {"tree": (3, 2, 8)}], ids=["chain", "tree"])
def test_a_draft_head_is_read_on_every_pass_and_fuses_once(guess: dict[str, object]) -> None:
    engine = build(drafter=str(eagle3_head()), **guess).engine  # type: ignore[arg-type]
    each = layer(2 * HIDDEN, split=True) + linear(200, HIDDEN) + 2 * 50 * KEYS
    fuse = linear(HIDDEN, 3 * HIDDEN)
    assert num_bytes(engine, 2, 50) == MODEL + 2 * 50 * LAYERS * KEYS + fuse + 3 * each


def test_a_borrowed_output_head_is_read_too() -> None:
    engine = build(drafter=str(eagle_head()), num_drafts=2).engine
    each = LAST_LAYER + linear(HIDDEN, 2 * HIDDEN) + OUTPUT
    assert num_bytes(engine, 1, 0) == MODEL + 2 * each


def test_a_block_head_reads_its_layers_once_and_its_markov_head_for_every_draft() -> None:
    plain = num_bytes(build().engine, 2, 100)
    kinds: tuple[dict[str, Any], ...] = ({}, {"layout": "deepspec", "markov": "vanilla"})
    for kind in kinds:
        engine = build(drafter=str(block_head(**kind)), num_drafts=4).engine
        layer = linear(Q, HIDDEN) + linear(KV, HIDDEN) + linear(HIDDEN, Q) + linear(2 * INNER, HIDDEN)
        own = linear(HIDDEN, 2 * HIDDEN) + 2 * (layer + linear(HIDDEN, INNER)) + linear(VOCAB, HIDDEN)
        own += 4 * linear(VOCAB, RANK) if kind else 0
        assert num_bytes(engine, 2, 100) == plain + own + 2 * KEYS * 2 * 100
        assert len(stores_of(engine)) == 2


def test_a_draft_model_is_read_on_every_pass() -> None:
    engine = build(drafter=str(noisy_model()), num_drafts=4).engine
    assert num_bytes(engine, 1, 10) == 5 * (MODEL + 10 * LAYERS * KEYS)


@pytest.mark.parametrize(
    ("options", "depth"), [({}, 3), ({"num_drafts": 5}, 5), ({"tree": (2, 2, 6)}, 2), ({"drafter": "none"}, 3)]
)
def test_the_engine_is_sized_for_every_case(options: dict[str, object], depth: int) -> None:
    cases, measured = [Case(1, 1000), Case(4, 100)], 50
    config = engine_config({"model": "m", **options}, cases, measured)
    growth = (measured + REST - 4) * (depth + 1)  # if every draft is right
    assert config.max_len is not None
    assert config.max_len >= 1000 + growth
    assert config.num_pages is not None
    for case in cases:
        assert (config.num_pages - 1) * config.page_size >= case.rows * (case.context + growth)
    assert (config.max_rows, config.row_sizes) == (4, (1, 4))


def test_a_case_longer_than_the_context_is_refused_by_name() -> None:
    cases = [Case(8, 40), Case(1, 100)]
    config = engine_config({"model": "m"}, cases, 5)
    growth = (5 + REST) * 4 + 128
    check_cases(config, cases, 100 + growth)
    with pytest.raises(ConfigError, match=f"--cases 1x100: with the {growth} tokens .* ask for at most 99,"):
        check_cases(config, cases, 99 + growth)
    with pytest.raises(ConfigError, match=f"context of {growth}; ask for fewer --rounds"):
        check_cases(config, cases, growth)


def test_given_options_are_kept() -> None:
    config = engine_config({"model": "m", "page_size": 64, "num_pages": 77}, [Case(2, 10)], 5)
    assert (config.page_size, config.num_pages, config.max_rows) == (64, 77, 2)
    assert engine_config({"tree": TreeShape(3, 2, 8)}, [Case(1, 8)], 5).tree == TreeShape(3, 2, 8)


@pytest.mark.parametrize("experts", [0.0, 12.34])
def test_a_table_has_a_line_for_each_case(experts: float) -> None:
    case = rounds.Figures(8, 2048, 5.0, 3.0, 4800.0, 4.0, 1.25, 2.0, 1.2, 16.0, experts, 80.0, 0.004)
    facts = {"asked": {"model": "m"}, "copy_tb_per_s": 4.1, "matrix_tflop_per_s": 700.0, "start_s": 9.0}
    facts["kept_matrix_tflop_per_s"] = 600.0
    lines = rounds.show(facts | {"cases": [rounds.asdict(case)]}).splitlines()
    assert len(lines) == 3
    assert "matrix product 700 TFLOP/s, 600 at the power limit, ready" in lines[0]
    counted = ["12.3"] if experts else []
    assert lines[-1].split() == [
        "8",
        "2048",
        "5.000",
        "4.000",
        "1.250",
        "2.000",
        "1.200",
        "3.00",
        "4800",
        "80",
        "0.4%",
        *counted,
    ]
    assert ("experts" in lines[1]) == bool(experts)


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


def test_experts_count_once_per_hit_and_latents_once() -> None:
    engine = build(mla_model(), drafter="ngram", num_drafts=1).engine
    q_rank, kv_rank, rope, heads, dim = 24, 32, 8, 4, 16
    read = [linear(q_rank + kv_rank + rope, 48)] * 2 + [linear(q_rank, 48) + linear(kv_rank + rope, 48)]
    each = linear(heads * (dim + rope), q_rank) + heads * (linear(kv_rank, dim) + linear(dim, kv_rank))
    dense = linear(2 * 96, 48) + linear(48, 96)
    expert = linear(2 * 32, 48) + linear(48, 32)
    hit = 8 * (1 - (1 - 2 / 8) ** 2) + 1  # two tokens choose two of eight each, plus the shared expert
    layers = sum(read) + 3 * (each + linear(48, heads * dim)) + dense + 2 * (linear(8, 48) + hit * expert)
    expected = layers + linear(VOCAB, 48)
    assert num_bytes(engine, 1, 0) == pytest.approx(expected, abs=1)
    assert num_bytes(engine, 1, 10) == pytest.approx(expected + 10 * 3 * (kv_rank + rope) * 4, abs=1)


def hits(num_tokens: int) -> float:
    """Expected number of experts read: of eight, with two per token, plus the shared one."""
    return 8 * (1 - (1 - 2 / 8) ** num_tokens) + 1


EXPERT = linear(2 * 32, 48) + linear(48, 32)


def test_experts_are_read_as_often_as_random_choices_hit_them() -> None:
    [*_, mixture] = mixtures_of(build(mla_model()).engine)
    for num_tokens, expected in ((1, 2 + 1), (2, 2 + 2 * 6 / 8 + 1), (1000, 8 + 1)):
        assert expected_hits(mixture, num_tokens) == pytest.approx(expected)
        work = expert_work(mixture, expected, num_tokens)
        assert work.num_bytes == pytest.approx(expected * EXPERT)
        assert work.operations == pytest.approx(2 * num_tokens * (2 + 1) * EXPERT / 4)  # two experts and the shared one


def test_operations_count_every_weight_and_key_for_every_token() -> None:
    engine = build(drafter=str(eagle3_head()), num_drafts=3).engine
    each = layer(2 * HIDDEN, split=True) // 4 + 200 * HIDDEN  # float32: four bytes a weight; padding is no work
    fuse, model = HIDDEN * 3 * HIDDEN, (MODEL - OUTPUT) // 4 + VOCAB * HIDDEN
    operations = 2 * (2 * 4 * model + 2 * 4 * fuse + 3 * 2 * each)
    keys = 2 * 2 * Q * 50  # of one query in one layer: scores and sums over 50 places
    operations += (2 * 4 * LAYERS + 3 * 2) * keys
    assert round_work(engine, 2, 50).operations == pytest.approx(operations)


@pytest.mark.parametrize(("guess", "step"), [({"num_drafts": 3}, 1), ({"tree": (3, 2, 8)}, 2)])
def test_a_prediction_layers_experts_count_by_the_tokens_of_each_pass(guess: dict[str, object], step: int) -> None:
    """The first pass has one live token per row, the others one per node of a tree level."""
    engine = build(mla_mtp_model(), drafter="mtp", **guess).engine  # type: ignore[arg-type]
    head, target = engine.runner.drafter.reader.head, engine.runner.target.decoder
    nodes = engine.runner.drafter.shape.nodes
    without = weights(head, 0) - EXPERT + linear(VOCAB, 48)
    passes = [without + EXPERT * hits(2 * tokens) for tokens in (1, step, step)]
    latents = 2 * 10 * (32 + 8) * 4
    expected = weights(target, 2 * nodes) + sum(passes) + latents * (3 + 3)
    assert num_bytes(engine, 2, 10) == pytest.approx(expected, abs=1)


def test_a_draft_models_experts_count_for_the_path_and_for_each_draft() -> None:
    engine = build(mla_model(), drafter=str(mla_model()), num_drafts=2).engine
    dense = weights(engine.runner.target.decoder, 0) - 2 * EXPERT  # two layers have experts
    verify, path, last, guess = 2 * hits(3), hits(3), hits(1), 2 * hits(1)
    expected = 3 * dense + EXPERT * (verify + path + last + guess)
    assert num_bytes(engine, 1, 0) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("guess", [{"num_drafts": 3}, {"tree": (3, 2, 8)}], ids=["chain", "tree"])
def test_experts_are_counted_as_more_rounds_read_them(guess: dict[str, object]) -> None:
    """With enough rows to hit every expert, the expected count is the real one; a single row reads only a few."""
    engine = build(mla_mtp_model(), drafter="mtp", max_rows=8, **guess).engine  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    for prompt in ([3, 4, 5], [6, 7], *([i] for i in range(8, 14))):
        engine.enqueue(engine.prepare(prompt, params))
    engine.seat_unread()
    assert len(engine.running) == 8
    beyond, hits = experts_read(engine, 1)
    assert 3 <= hits <= 9
    assert abs(beyond) < 5 * 9 * EXPERT
    assert all(len(request.generated) >= 1 for request in engine.running)  # counting did not disturb the round
    for request in list(engine.running)[1:]:
        engine.abort(request)
    few, alone = experts_read(engine, 2)
    assert 3 <= alone <= hits
    assert abs(few) < 5 * 9 * EXPERT  # of one round, not of both
    assert not engine.runner.eager
    assert all(mixture.on_choice is None for mixture in mixtures_of(engine))
    before = len(engine.running[0].generated)
    some, _ = experts_read(engine, 3, every=2)
    assert abs(some) < 5 * 9 * EXPERT  # the second of the three is not counted
    assert len(engine.running[0].generated) >= before + 3


def test_rounds_that_are_counted_are_those_that_were_timed() -> None:
    """Equal tokens, although the requests get other pages, which held other requests' keys in between."""
    count = 6
    engine = build(mla_mtp_model(), drafter="mtp", num_drafts=3, max_rows=4, num_pages=400, max_len=400).engine
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    seen, pages = [], []
    for every in (1, count, 2):
        requests = seat(engine, 2, 20, 100)
        pages.append([list(request.pages) for request in requests])
        experts_read(engine, count, every)
        seen.append([list(request.generated) for request in requests])
        unseat(engine, requests)
        between = engine.prepare([7, 8, 9], params)
        engine.enqueue(between)
        while engine.has_work:
            engine.step()
    assert seen[0] == seen[1] == seen[2]
    assert all(len(tokens) >= count for tokens in seen[0])
    assert pages[0] != pages[1]


def test_a_dense_round_reads_no_experts() -> None:
    engine = build().engine
    assert not mixtures_of(engine)
    assert mixtures_of(build(mla_mtp_model(), drafter="mtp").engine)
    engine.enqueue(engine.prepare([3, 4], SamplingParams(max_tokens=4, detokenize=False)))
    engine.seat_unread()
    assert experts_read(engine, 1) == (0.0, 0.0)


def test_noise_goes_to_every_store() -> None:
    engine = build(drafter=str(eagle3_head()), num_drafts=2).engine
    fill_stores(engine)
    assert len(stores_of(engine)) == 2
    assert all(bool(part.any(dim=-1).all()) for store in stores_of(engine) for part in store.parts)


class FakeEvent:
    """A device whose rounds take 2 ms and are 1 ms apart: one clock, moved by every event that is recorded."""

    now = 0.0

    def record(self) -> None:
        FakeEvent.now += 2.0 if int(FakeEvent.now) % 3 == 1 else 1.0
        self.at = FakeEvent.now

    def elapsed_time(self, later: "FakeEvent") -> float:
        return later.at - self.at


@pytest.mark.parametrize("model", [None, mla_mtp_model], ids=["dense", "experts"])
def test_a_case_is_measured(model: Callable[[], Path] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "new_event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "now", 0.0)
    options: dict[str, Any] = {"max_rows": 2, "max_len": 500, "num_pages": 100}
    engine = (build(**options) if model is None else build(model(), drafter="mtp", num_drafts=2, **options)).engine
    peaks = rounds.Peaks(bytes_per_s=1e9, operations_per_s=1e9, kept_operations_per_s=1e9)
    figures = rounds.measure(engine, Case(2, 20), 6, peaks)
    assert (figures.rows, figures.context) == (2, 20)
    assert figures.ms_per_round == pytest.approx((6 * 2 + 5 * 1) / 6)
    assert figures.device_idle_share == pytest.approx(5 / 17)
    assert 1 <= figures.accept_length <= (1 if model is None else 3)
    assert figures.tokens_per_s == pytest.approx(2 * figures.accept_length / figures.ms_per_round * 1e3)
    assert figures.gb_per_round == pytest.approx(figures.memory_ms / 1e3)
    assert figures.ratio == pytest.approx(figures.ms_per_round / figures.memory_ms)
    assert figures.roofline_ratio == pytest.approx(figures.ms_per_round / max(figures.memory_ms, figures.compute_ms))
    assert (figures.experts_read > 0) == (model is not None)
    assert not engine.has_work
    assert engine.runner.mark is no_mark


def test_the_host_is_timed_over_ordinary_rounds() -> None:
    engine = build().engine
    params = SamplingParams(max_tokens=HOST_ROUNDS + 8, ignore_eos=True, detokenize=False)
    request = engine.prepare([3, 4], params)
    engine.enqueue(request)
    engine.seat_unread()
    assert 0 < rounds.time_host(engine) < 10
    assert len(request.generated) == HOST_ROUNDS
    assert engine.runner.mark is no_mark  # left as it was
