"""`peregrine bench http`: the same requests both ways; and flags that survive being written again."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from peregrine.bench import http as bench
from peregrine.cli import flags
from peregrine.errors import ConfigError
from serve.conftest import Served


def test_both_ways_bring_the_same_texts(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    @contextmanager
    def at_hand(given: list[str]) -> Iterator[int]:
        asked.append(given)
        yield int(server.url.rpartition(":")[2])

    monkeypatch.setattr(bench, "running_server", at_hand)
    plan = bench.Plan(streams=3, tokens=12, repeats=1, temperature=0.8)
    result = bench.run(plan, {"num_pages": 100}, ["--num-pages", "100"])
    assert asked == [["--num-pages", "100", "--max-rows", "3"]]
    assert result["identical"] is True
    [[direct, through]] = result["runs"]  # type: ignore[misc]
    assert result["http_cost"] == pytest.approx(1 - through / direct, abs=0.01)
    assert "3 streams of 12 tokens" in bench.show(result)


def test_a_server_that_does_not_start_is_told() -> None:
    with pytest.raises(ConfigError, match=r"the server ended: .*--max-rows"), bench.running_server(["--max-rows"]):
        pass


def test_flags_are_written_as_they_were_read() -> None:
    parser = argparse.ArgumentParser()
    flags.add_engine_flags(parser)
    argv = ["--model", "m", "--tree", "3,2,8", "--num-pages", "64", "--no-prefix-cache"]
    assert flags.engine_flags(parser.parse_args(argv)) == argv
    assert flags.engine_flags(parser.parse_args([])) == []
