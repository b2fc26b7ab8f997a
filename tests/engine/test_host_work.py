"""What the host counts in bulk: pages that cover every reach, statistics from verdicts, outputs without deltas."""

import pytest
import torch

from peregrine.engine.engine import Engine
from peregrine.engine.request import Output
from peregrine.engine.stats import Stats, drafted_flags
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


def test_statistics_follow_from_verdicts() -> None:
    verdicts = [1, 0, 0, 4, 3, 3, 2, 1, 3, 0, 0, 3]  # tokens, right drafts, drafts of four rounds
    assert Stats.of(verdicts, 5, 1) == Stats(4, 9, 4, 7, [2, 1, 0, 1], 5, 1)
    assert drafted_flags(verdicts) == [False, True, True, True, False, True, False]
    assert Stats.of([], 0, 0) == Stats()
    assert drafted_flags([]) == []


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
