"""A short stress test: every good response is right, every page is accounted for, memory stays flat."""

import asyncio
import gc

import pytest

from serve.conftest import Served
from serve.stress import make_good_requests, memory_mib, stress
from spec.harness import check_pages

REQUESTS, CONCURRENCY = 48, 32


@pytest.fixture(scope="module")
def good_requests(server: Served):
    return make_good_requests(server.llm, 24, seed=1)


def test_a_stress_run_leaves_nothing_behind(server: Served, good_requests) -> None:
    memory = []
    for part in range(3):
        report = asyncio.run(stress(server.url, good_requests, REQUESTS, CONCURRENCY, seed=part))
        assert not report.wrong
        assert set(report.outcomes) == {
            "whole: right",
            "streamed: right",
            "slow_reading: right",
            "leaving: left",
            "hasty: left",
            "bad: refused",
        }
        server.wait_idle()
        gc.collect()
        memory.append(memory_mib("self"))
    # The first part fills caches; after it a leak of one output per request would show as megabytes.
    assert memory[2] - memory[1] < 24
    check_pages(server.llm.engine)
    assert not server.llm.loop._sinks
    assert not server.service.gateway._requests
