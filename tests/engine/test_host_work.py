"""What the host counts in bulk: pages that cover every reach, statistics from verdicts, outputs without deltas."""

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from peregrine.engine.admission import seat_entry
from peregrine.engine.engine import Engine
from peregrine.engine.output import Output
from peregrine.engine.page_ledger import GROWN
from peregrine.engine.stats import Stats, drafted_flags, rounds_of
from peregrine.sampling import SamplingParams
from peregrine.spec.seat_buffers import SeatBuffers
from peregrine.spec.seat_entry import Words
from peregrine.spec.state import Rows
from spec.harness import Case, build, cases, noisy_model, run

DRAFTED = {"drafter": str(noisy_model()), "num_drafts": 3}


@pytest.mark.parametrize(("lag", "pages"), [(0, 60), (1, 600), (2, 60)])
def test_pages_cover_what_every_row_can_reach(lag: int, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are counted anew only when a bound says so; yet at no launch has a row too few pages."""
    engine = build(**DRAFTED, lag=lag, num_pages=pages, page_size=4, max_rows=5, max_len=120).engine
    launch, seen = engine._launch, []

    def checked_launch() -> bool:
        for request in engine.running:
            missing = engine._reach(request) - len(request.pages) * engine.ledger.page_size
            assert missing <= 0, f"request {request.id} lacks {missing} places"
            seen.append(missing)
        return launch()

    monkeypatch.setattr(engine, "_launch", checked_launch)
    run(engine, cases(12, max_tokens=40), arrivals=list(range(0, 36, 3)), aborts={3: 20, 7: 30})
    assert len(seen) > 100


@pytest.mark.parametrize(("pages", "least"), [(600, GROWN), (23, 1)])
def test_a_running_request_takes_a_few_pages_at_a_time_while_there_are_plenty(pages: int, least: int) -> None:
    """And never more than its longest text can fill, whatever a round reserves beyond that."""
    engine = build(drafter="none", num_pages=pages, page_size=4, max_rows=1, max_len=80, prefix_cache=False).engine
    pool, (case,) = engine.ledger.pool, cases(1, max_tokens=57)
    request = engine.prepare(list(case.prompt), case.params)
    engine.enqueue(request)
    taken, held = [], 0
    with torch.inference_mode():
        while engine.has_work:
            engine.step()
            if request.seat is not None:
                taken.append(len(request.pages) - held)
                held = len(request.pages)
                assert pool.num_free == pool.num_pages - 1 - held
    grown = [count for count in taken[1:] if count]
    assert max(grown) == GROWN
    assert min(grown[:-1]) == least, "the last ones are what is left of its text"
    assert held == -(-request.limit // 4)
    assert pool.num_free == pool.num_pages - 1


def test_statistics_follow_from_verdicts() -> None:
    verdicts = [1, 0, 0, 4, 3, 3, 2, 1, 3, 0, 0, 3]  # tokens, right drafts, drafts of four rounds
    assert Stats.of(rounds_of(verdicts), 5, 1) == Stats(4, 9, 4, 7, [2, 1, 0, 1], 5, 1)
    assert drafted_flags(rounds_of(verdicts)) == [False, True, True, True, False, True, False]
    assert Stats.of(rounds_of([]), 0, 0) == Stats()
    assert drafted_flags(rounds_of([])) == []
    assert drafted_flags(rounds_of([1, 0, 3, 1, 0, 0])) == [False, False]


def quiet(engine: Engine, asked: list[Case]) -> tuple[list[Output], int]:
    """Outputs of requests that make one delta each, and the number of deltas."""
    requests = [engine.prepare(list(case.prompt), case.params) for case in asked]
    outputs, deltas = {}, 0
    for request in requests:
        request.wait_for_end()
        engine.enqueue(request)
    with torch.inference_mode():
        while engine.has_work:
            for delta in engine.step():
                deltas += 1
                if delta.output is not None:
                    outputs[delta.request_id] = delta.output
    return [outputs[request.id] for request in requests], deltas


@pytest.mark.parametrize("stop", [(), ("e",)], ids=["free", "stop string"])
def test_outputs_do_not_depend_on_deltas(stop: tuple[str, ...]) -> None:
    asked = cases(6, max_tokens=40, stop=stop)
    expected = run(build(**DRAFTED).engine, asked)
    outputs, deltas = quiet(build(**DRAFTED).engine, asked)
    for one, other in zip(outputs, expected, strict=True):
        assert (one.token_ids, one.text, one.drafted, one.stats) == (
            *(other.token_ids, other.text, other.drafted, other.stats),
        )
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
    assert stop or deltas < 3 * len(asked)


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stop": ("\u2603",)}], ids=["free", "logprobs", "stop string"])
def test_prompts_come_first_if_nobody_reads_along(more: dict[str, Any]) -> None:
    """Whole outputs are awaited: all prompts are read, then everybody is in every round. Streams are not held up.

    So it is for requests whose tokens are looked at as they come, too: nobody watches them.
    """
    asked = cases(6, max_tokens=10, ignore_eos=True, **more)
    long = [Case((case.prompt * 50)[:50], case.params) for case in asked]
    sizes = {"drafter": "none", "prefill_chunk": 16, "max_rows": 6, "prefix_cache": False, "lag": 0}
    streamed, awaited = build(**sizes).engine, build(**sizes).engine
    expected = run(streamed, long)
    outputs, _ = quiet(awaited, long)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert awaited.runner.launched == 10
    assert streamed.runner.launched > 10


def test_requests_that_join_together_have_the_lines_they_have_alone() -> None:
    params = [
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 0.7, "min_p": 0.05, "top_k": 9, "stop_token_ids": [5, 8], "logprobs": 2},
        {"temperature": 1.1, "top_p": 0.3, "logit_bias": {7: 1.5, 2: -0.1}, "frequency_penalty": 0.3, "min_tokens": 3},
    ]
    asked = [Case(tuple(range(3, 9 + i)), SamplingParams(seed=i, max_tokens=9, **p)) for i, p in enumerate(params)]  # type: ignore[arg-type]
    engine = build(**DRAFTED, max_rows=4).engine
    seats = engine.runner.seats
    packed = [
        seats.buffers.pack(seat_entry(engine.prepare(list(case.prompt), case.params), engine.limits)) for case in asked
    ]
    pages = [[4, 9], [3], [8, 2, 1]]
    for row, line in enumerate(packed):
        seats.join(row, [line], [pages[row]])
    alone = {name: buffer.clone() for name, buffer in seats.buffers.fields.items()}
    for row in range(3):
        seats.clear(row)
        seats.join(row, [packed[2]], [[7, 7, 7, 7]])  # others come and go
        seats.clear(row)
    seats.join(0, packed, pages)
    assert all(torch.equal(buffer, alone[name]) for name, buffer in seats.buffers.fields.items() if name != "history")
    view = seats.view(Rows(3, 64))
    for row, case in enumerate(asked):
        assert view.history[row, : len(case.prompt)].tolist() == list(case.prompt)
        assert view.past_lens[row] == len(case.prompt) - 1
    assert view.window_tokens.tolist() == [[8, 0, 0, 0], [9, 0, 0, 0], [10, 0, 0, 0]]
    assert view.sampling.temperature.tolist() == torch.tensor([0.0, 0.7, 1.1]).tolist()
    assert view.sampling.log_min_p.tolist() == [-torch.inf, float(np.float32(np.log(0.05))), -torch.inf]
    assert view.sampling.stop_ids[1, :3].tolist() == [5, 8, *engine.limits.eos_ids[:1]]
    assert view.sampling.bias_ids[:, :2].tolist() == [[-1, -1], [-1, -1], [7, 2]]
    assert view.sampling.bias_values[2, :3].tolist() == torch.tensor([1.5, -0.1, 0.0]).tolist()
    assert not view.done.any()
    assert seats.view(Rows(4, 64)).done[3]


def test_seats_that_are_left_at_once_end_as_one_by_one() -> None:
    """The last request takes the seat of the one that leaves, as the engine has it; 20 rounds of leaves and joins."""
    pads = {
        "history": torch.zeros(40, dtype=torch.int64),
        "page_table": torch.zeros(3, dtype=torch.int64),
        "bias_values": torch.zeros(2),
        "done": torch.tensor(True),
        "seeds": torch.tensor(-1),
        "top_p": torch.tensor(1.0),
    }
    seats, dice, wanted, number = 40, Random(1), list[int](), 0
    buffers = SeatBuffers(seats, pads, torch.device("cpu"))
    for _ in range(20):
        for _ in range(dice.choice((0, 1, 5, len(wanted)))):
            if wanted:
                seat, last = dice.randrange(len(wanted)), len(wanted) - 1
                if seat == last:
                    buffers.clear(seat)
                else:
                    buffers.move(last, seat)
                    wanted[seat] = wanted[last]
                wanted.pop()
        entries: list[tuple[int, str, int, Words]] = []
        for seat in range(len(wanted), dice.randint(len(wanted), seats)):
            number += 1
            wanted.append(number)
            entries.append((seat, "history", 0, np.full(40, number)))
            entries += [(seat, "page_table", 1, np.array([number])), (seat, str(torch.int64), 0, np.array([number]))]
            entries.append((seat, str(torch.float32), 0, np.array([number / 2])))
        buffers.write(entries)
        count, fields = len(wanted), buffers.fields
        assert fields["seeds"].tolist() == [*wanted, *[-1] * (seats - count + 1)]
        assert fields["top_p"].tolist() == [*(number / 2 for number in wanted), *[1.0] * (seats - count + 1)]
        assert fields["page_table"].tolist() == [*([0, n, 0] for n in wanted), *[[0, 0, 0]] * (seats - count + 1)]
        assert fields["history"][:count].tolist() == [[number] * 40 for number in wanted]
    assert number > 2 * seats
