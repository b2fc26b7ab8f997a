"""The log of rounds, and deltas that are read from a verdict: what comes out is what each round gave each request."""

import itertools
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
import torch

from peregrine.engine import round_log
from peregrine.engine.engine import Engine
from peregrine.engine.output import Delta, Output
from peregrine.engine.request import Request
from peregrine.engine.round_log import AT_END, FEW, MORE, ROUNDS, TEXT, TOKENS, RoundLog
from peregrine.engine.round_result import RoundResult
from peregrine.kernels.round import FINISH_FAULT, FINISH_NONE, HEADER
from peregrine.sampling import SamplingParams
from peregrine.text.stream import TextStream
from spec.harness import build, cases, check_pages, noisy_model

WIDTH = 4
DRAFTED = {"drafter": str(noisy_model()), "num_drafts": 3}


@pytest.fixture(params=[0, 2])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Requests that are not logged: none, or a part of a batch."""
    monkeypatch.setattr(round_log, "FEW", request.param)
    return int(request.param)


def drawn_table(dice: Random, rows: int) -> np.ndarray:
    """A verdict with rows that took no part, and with a few that end, also without a token."""
    table = np.zeros((rows, HEADER + 2 * WIDTH), dtype=np.int64)
    for row in range(rows):
        accept, finish = dice.randint(0, WIDTH), dice.choice((FINISH_NONE,) * 9 + (FINISH_FAULT,))
        table[row, :HEADER] = accept, max(0, accept - 1), dice.randint(0, WIDTH), finish
        table[row, HEADER:] = [dice.randrange(1 << 40) for _ in range(2 * WIDTH)]
    return table


def test_requests_are_given_what_rounds_gave_them_whoever_leaves_and_joins(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against lists that are appended to in every round. Requests of one batch wait for all kinds of things."""
    dice, seats, number, clock, waits = Random(3), 7, 0, 0.0, (AT_END, TOKENS, TEXT, MORE)
    monkeypatch.setattr("peregrine.engine.round_log.time.perf_counter", lambda: clock)
    log, running = RoundLog(seats, WIDTH), list[int]()
    given: dict[int, list[list[int]]] = {}  # lines not taken, by request
    times: dict[int, list[float]] = {}
    logged: dict[int, bool] = {}  # whether a request's rounds are taken from the log
    filled = 0
    for _ in range(6 * ROUNDS):
        for _ in range(dice.choice((0, 0, 0, 1, 2))):
            if running:
                seat = dice.randrange(len(running))
                assert log.take(seat) == list(zip(given[running[seat]], times[running[seat]], strict=True))
                if seat < len(running) - 1:
                    log.move(len(running) - 1, seat)
                if logged[running[seat]]:
                    log.leave()
                running[seat] = running[-1]
                running.pop()
        while len(running) < seats and dice.random() < 0.3:
            number += 1
            logged[number] = waits[number % 4] != MORE and len(running) >= few
            assert log.join(len(running), waits[number % 4]) is (log if logged[number] else None)
            running.append(number)
            given[number], times[number] = [], []
        if log.is_full:
            filled += 1
            for request, taken in zip(running, log.take_all(len(running)), strict=True):
                lines = given[request]
                tokens = [token for line in lines for token in line[HEADER : HEADER + line[0]]]
                assert np.frombuffer(taken.tokens, dtype=np.int64).tolist() == tokens
                counts = [count for line in lines for count in line[:3]]
                assert np.frombuffer(taken.verdicts, dtype=np.int64).tolist() == counts
                assert not lines or taken.since == times[request][0]
                given[request], times[request] = [], []
        clock += 1.0
        # As the engine has it: a round that was queued before the last ones joined has no rows for them.
        table = drawn_table(dice, len(running) - (len(running) > 1 and dice.random() < 0.3))
        log.add(table)
        told, worded, whole = log.news(table)
        for row, line in enumerate(table.tolist()):
            if line[0] or line[3]:
                given[running[row]].append(line[: HEADER + WIDTH])
                times[running[row]].append(clock)
            kind, is_logged = waits[running[row] % 4], logged[running[row]]
            goes_on = is_logged and line[0] > 0 and not line[3]
            assert (row in told) == (goes_on and kind == TOKENS)
            assert (row in worded) == (goes_on and kind == TEXT)
            assert (row in whole) == bool(line[3] or (not is_logged and line[0]))
        assert log.members == sum(logged[request] for request in running)
        for seat, request in enumerate(running):
            assert log.held(seat) == sum(line[0] for line in given[request])
    assert filled >= 5
    assert number > 3 * seats


def test_a_delta_that_is_read_later_is_what_the_round_gave() -> None:
    """Whatever becomes of the verdict's memory."""
    table = np.array([[2, 1, 3, FINISH_NONE, 7, 8, 9, 0, 1, 0], [1, 0, 0, FINISH_NONE, 5, 6, 4, 0, 2, 1]])
    requests = [Request(i, [1], SamplingParams(), 0, 9) for i in (4, 6)]
    requests[1].make_text(build().engine.tokenizer)
    text = requests[1].stream.push([5])  # type: ignore[union-attr]
    deltas = RoundResult(requests, table).deltas([0], [1])
    table[:] = -1
    expected = [Delta(4, "", [7, 8], (True, False), offered=3), Delta(6, text, [5], (False,), offered=0)]
    assert text
    assert (requests[1].text, requests[1].num_worded) == (text, 1)
    for delta, plain in zip(deltas.values(), expected, strict=True):
        assert delta is not None
        assert (delta.token_ids, delta.drafted, delta.offered) == (plain.token_ids, plain.drafted, plain.offered)
        assert (delta.request_id, delta.text, delta.output) == (plain.request_id, plain.text, None)
        assert delta.plain() == plain.plain() == plain
        assert type(delta.plain()) is Delta


@torch.inference_mode()
def mixed(engine: Engine, aborts: dict[int, int], arrivals: list[int]) -> tuple[list[Output], list[list[Delta]]]:
    """Outputs and deltas of requests, of which a third each is awaited, streamed as tokens, and streamed as text."""
    asked = cases(12, max_tokens=170, ignore_eos=True)
    requests: list[Request] = []
    outputs, deltas = dict[int, Output](), dict[int, list[Delta]]()
    step = 0
    while len(requests) < len(asked) or engine.has_work:
        while len(requests) < len(asked) and arrivals[len(requests)] <= step:
            case, kind = asked[len(requests)], len(requests) % 3
            params = {**vars_of(case.params), "detokenize": kind != 1}
            requests.append(engine.prepare(list(case.prompt), SamplingParams(**params)))  # type: ignore[arg-type]
            if kind == 0:
                requests[-1].wait_for_end()
            engine.enqueue(requests[-1])
        for index, when in aborts.items():
            if when == step:
                engine.abort(requests[index])
        made = engine.step()
        for delta in made:
            deltas.setdefault(delta.request_id, []).append(delta)
            if delta.output is not None:
                outputs[delta.request_id] = delta.output
        for request in engine.running:
            logged = request.num_tokens
            if step % 7 == request.id % 7:  # to look at tokens changes nothing
                assert len(request.tokens) == logged
        step += 1
    check_pages(engine)
    return [outputs[r.id] for r in requests], [deltas[r.id] for r in requests]


def vars_of(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


@pytest.mark.parametrize(("lag", "pages"), [(0, 600), (1, 160), (2, 600)])
def test_streams_and_outputs_agree_in_a_batch_of_all_kinds(few: int, lag: int, pages: int) -> None:
    """With requests that come, end, are aborted and are preempted meanwhile, over more rounds than the log keeps."""
    sizes = {"page_size": 4, "max_rows": 5, "max_len": 260, "num_pages": pages, "lag": lag}
    aborts, arrivals = {4: 40, 5: 44, 3: 48}, [0] * 6 + [30, 31, 60, 61, 62, 100]
    outputs, deltas = mixed(build(**DRAFTED, **sizes).engine, aborts, arrivals)
    plain, _ = mixed(build(num_pages=600, max_rows=12, max_len=260).engine, {}, [0] * 12)
    assert pages == 600 or sum(output.stats.preemptions for output in outputs)
    for index, (output, expected, each) in enumerate(zip(outputs, plain, deltas, strict=True)):
        if index in aborts:
            assert output.finish_reason == "abort"
            assert output.token_ids == expected.token_ids[: len(output.token_ids)]
            assert output.token_ids
        else:
            assert (output.token_ids, output.finish_reason) == (expected.token_ids, "length")
        stats = output.stats
        assert stats.accepted == len(output.token_ids) == len(output.drafted)
        assert stats.correct == sum(output.drafted)
        assert 0 < output.timing.first_token_s < output.timing.total_s
        if index % 3 == 0:
            assert len(each) == 1
            continue
        assert [token for delta in each for token in delta.token_ids] == output.token_ids
        assert [flag for delta in each for flag in delta.drafted] == output.drafted
        assert sum(delta.offered for delta in each) == stats.drafted
        assert sum(bool(delta.token_ids) for delta in each) == stats.rounds
        assert "".join(delta.text for delta in each) == output.text
        assert bool(output.text) == (index % 3 == 2)


def test_requests_are_looked_at_only_when_something_is_asked_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """None whose output is awaited, that is streamed, or streamed as text, costs a call of these in most rounds."""
    monkeypatch.setattr(round_log, "FEW", 0)
    calls = list[str]()
    for name in ("take", "settle", "add"):
        method = getattr(Request, name)
        monkeypatch.setattr(Request, name, lambda *a, name=name, method=method: (calls.append(name), method(*a))[1])
    engine = build(max_rows=4, max_len=260, lag=0).engine
    for index, case in enumerate(cases(4, max_tokens=3 * ROUNDS, ignore_eos=True)):
        params = SamplingParams(**{**vars_of(case.params), "detokenize": index == 2})  # type: ignore[arg-type]
        request = engine.prepare(list(case.prompt), params)
        if index % 2:
            request.wait_for_end()
        engine.enqueue(request)
    with torch.inference_mode():
        while len(engine.running) < 4:
            engine.step()
        calls.clear()
        for _ in range(2 * ROUNDS):
            engine.step()
    assert calls.count("add") in (4, 8)
    assert len(calls) < ROUNDS


def test_a_request_whose_text_fails_ends_alone(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its tokens are in the log alone; it keeps those that it had."""
    push, broken = TextStream.push, list[object]()

    def fails(self: TextStream, ids: Sequence[int]) -> str:
        if self in broken:
            raise BaseException("a panic of the tokenizer")
        return push(self, ids)

    monkeypatch.setattr(TextStream, "push", fails)
    engine = build(max_rows=4, lag=0).engine
    requests = [engine.prepare(list(case.prompt), case.params) for case in cases(4, max_tokens=40, ignore_eos=True)]
    outputs = dict[int, Output]()
    for request in requests:
        engine.enqueue(request)
    with torch.inference_mode():
        for step in itertools.count():
            if step == 12:
                broken.append(requests[3].stream)
            outputs |= {delta.request_id: delta.output for delta in engine.step() if delta.output is not None}
            if not engine.has_work:
                break
    check_pages(engine)
    assert [outputs[request.id].finish_reason for request in requests] == ["length"] * 3 + ["error"]
    failed = outputs[requests[3].id]
    assert 4 < len(failed.token_ids) < 20
    assert failed.error
    assert failed.text


def test_requests_in_the_first_seats_are_given_their_rounds_at_once() -> None:
    """A call for each of them takes less time than the log where they are all there are."""
    log = RoundLog(FEW + 1, WIDTH)
    assert [log.join(seat, AT_END) for seat in range(FEW)] == [None] * FEW
    assert log.members == 0
    assert log.join(FEW, AT_END) is log
    assert log.members == 1


def test_deltas_of_a_step_are_in_the_order_of_rows(few: int) -> None:
    engine = build(max_rows=4, lag=0).engine
    requests = []
    for index, case in enumerate(cases(4, max_tokens=9, ignore_eos=True)):
        params = SamplingParams(**{**vars_of(case.params), "detokenize": index % 2 == 0})  # type: ignore[arg-type]
        requests.append(engine.prepare(list(case.prompt), params))
        engine.enqueue(requests[-1])
    with torch.inference_mode():
        while len(engine.running) < 4:
            engine.step()
        assert [delta.request_id for delta in engine.step()] == [request.id for request in engine.running]
