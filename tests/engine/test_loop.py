"""The engine's thread: what its callers get while it runs, fails and ends."""

import queue
import threading

import pytest

from peregrine import LLM, SamplingParams
from peregrine.engine import loop
from peregrine.engine.loop import EngineLoop
from peregrine.engine.output import Delta
from peregrine.engine.request import Request
from peregrine.errors import EngineFault
from spec.harness import build, tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.mark.parametrize("end", ["fault", "close"])
def test_a_request_that_enters_while_the_engine_ends_gets_a_fault(end: str) -> None:
    llm = LLM(str(tiny_model()), drafter="none", num_pages=100)
    prepare = llm.engine.prepare

    def explode() -> None:
        raise MemoryError("no more")

    def prepare_late(prompt: list[int], params: SamplingParams) -> Request:
        """The engine ends after the caller came in and before its request is handed over."""
        request = prepare(prompt, params)
        if end == "close":
            llm.close()
        else:
            llm.loop._inbox.put(explode)
            llm.loop._thread.join()
        return request

    llm.engine.prepare = prepare_late  # type: ignore[method-assign]
    heard: queue.SimpleQueue[Delta | EngineFault] = queue.SimpleQueue()
    with pytest.raises(EngineFault, match=r"no more|closed"):
        llm.loop.submit([1], GREEDY, heard.put)
    assert heard.empty()
    assert not llm.loop.alive


def test_the_cache_is_dropped_between_requests_only() -> None:
    with LLM(str(tiny_model()), drafter="none", num_pages=100, page_size=16) as llm:
        llm.generate([list(range(1, 50))], GREEDY, progress=False)
        assert llm.drop_cached() == 3
        assert llm.drop_cached() == 0
        stream = llm.stream([1], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
        next(stream)
        assert llm.drop_cached() is None
        stream.close()
        assert llm.drop_cached() is not None  # at once, though the abort is not delivered yet


def test_an_error_in_a_call_reaches_its_caller_alone() -> None:
    with LLM(str(tiny_model()), drafter="none", num_pages=100) as llm:
        expected = llm.generate([1, 2], GREEDY)[0].token_ids
        stream = llm.stream([1, 2], GREEDY)
        tokens = next(stream).token_ids
        with pytest.raises(ZeroDivisionError):
            llm.loop.call(lambda: 1 // 0)
        assert llm.loop.alive
        assert tokens + [token for delta in stream for token in delta.token_ids] == expected
        assert llm.loop.call(lambda: 7) == 7


class Panic(BaseException):
    """What a panic in a Rust library raises: no Exception."""


def test_a_panic_ends_every_request_and_call() -> None:
    """Nobody waits for ever for an engine whose thread has ended."""
    with LLM(str(tiny_model()), drafter="none", num_pages=100) as llm:
        stream = llm.stream([1], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
        next(stream)

        def panic() -> None:
            raise Panic("index out of bounds")

        llm.loop._inbox.put(panic)
        with pytest.raises(EngineFault, match="the engine stopped: Panic: index out of bounds"):
            list(stream)
        with pytest.raises(EngineFault, match="Panic"):
            llm.loop.call(lambda: 1)
        assert not llm.loop.alive


def test_a_panic_in_a_call_is_its_callers_alone() -> None:
    def panic() -> None:
        raise Panic

    with LLM(str(tiny_model()), drafter="none", num_pages=100) as llm:
        with pytest.raises(Panic):
            llm.loop.call(panic)
        assert llm.loop.alive


def test_calls_that_wait_when_the_engine_ends_get_its_fault() -> None:
    """Also a call that nobody polls, such as one awaited in an event loop."""
    begun, go_on = threading.Event(), threading.Event()

    def explode() -> None:
        begun.set()
        go_on.wait()
        raise MemoryError("no more")

    with LLM(str(tiny_model()), drafter="none", num_pages=100) as llm:
        llm.loop._inbox.put(explode)
        begun.wait()
        waits, left = llm.loop.post(lambda: 1), llm.loop.post(lambda: 2)
        assert left.cancel()
        go_on.set()
        with pytest.raises(EngineFault, match="no more"):
            waits.result(timeout=60)


def test_a_step_that_does_not_end_shows() -> None:
    with LLM(str(tiny_model()), drafter="none", num_pages=100) as llm:
        llm.generate([1, 2], GREEDY, progress=False)
        begun, go_on = threading.Event(), threading.Event()
        step = llm.engine.step

        def hang() -> list[Delta]:
            begun.set()
            go_on.wait()
            return step()

        llm.engine.step = hang  # type: ignore[method-assign]
        stuck = llm.loop.submit([1, 2], GREEDY, lambda _: None)
        begun.wait()
        first = llm.loop.step_seconds
        threading.Event().wait(0.05)
        assert llm.loop.step_seconds - first >= 0.04
        llm.engine.step = step  # type: ignore[method-assign]
        go_on.set()
        llm.loop.abort(stuck)
        while llm.loop.step_seconds or llm.engine.has_work:
            threading.Event().wait(0.01)


def test_what_the_engine_needs_is_looked_for_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the other ranks of a tensor-parallel engine."""
    monkeypatch.setattr(loop, "CHECK_SECONDS", 0.01)

    def check() -> None:
        raise EngineFault("a rank is gone")

    idle = EngineLoop(build().engine, check)
    idle._thread.join(60)
    assert "a rank is gone" in str(idle.fault)
    assert not idle.alive
