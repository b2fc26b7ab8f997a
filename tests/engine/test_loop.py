"""The engine's thread: what its callers get while it runs, fails and ends."""

import queue

import pytest

from peregrine import LLM, SamplingParams
from peregrine.engine.request import Delta, Request
from peregrine.errors import EngineFault
from spec.harness import tiny_model

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
