"""A small storm: every good answer is right, every page is accounted for, memory stays flat."""

import asyncio
import gc

import pytest

from serve.conftest import Served
from serve.storm import make_wishes, memory_mib, storm
from spec.harness import check_pages

REQUESTS, CONCURRENCY = 70, 32


@pytest.fixture(scope="module")
def wishes(server: Served):
    return make_wishes(server.llm, 24, seed=1)


def test_a_storm_leaves_nothing_behind(server: Served, wishes) -> None:
    memory = []
    for part in range(3):
        report = asyncio.run(storm(server.url, wishes, REQUESTS, CONCURRENCY, seed=part))
        assert not report.wrong
        assert set(report.outcomes) == {
            "whole: right",
            "streamed: right",
            "dawdling: right",
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
