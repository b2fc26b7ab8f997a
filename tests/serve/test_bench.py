"""`peregrine bench http`: the same requests offline and over HTTP; `bench serve` against our own server."""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peregrine.bench import fleet_costs, fleet_run, serve
from peregrine.bench import http as bench
from peregrine.bench.fleet_costs import Costs
from peregrine.cli import flags
from peregrine.errors import ConfigError
from serve.conftest import Served

Command = Callable[..., tuple[int, str, str]]


def test_both_ways_give_the_same_texts(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_bench_fleet_simulates_our_own_server(
    server: Served, peregrine: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's costs are measured, one replica is simulated with them, and the server gets the same load."""
    for name, value in {"MEASURED": 1, "LEAST_MEASURED": 3, "LONG_WORDS": 80}.items():  # no figure is needed here
        monkeypatch.setattr(fleet_costs, name, value)
    asked = ("--rate", "20", "--requests", "6", "--output-tokens", "6", "--json")
    code, printed, errors = peregrine("bench", "fleet", "--url", server.url, *asked)
    assert code == 0, errors
    result = json.loads(printed)
    rows = server.llm.engine.policy.max_rows
    assert [size for size, _ in result["costs"]["rounds"]] == [1, rows // 4, rows // 2, rows]
    assert result["asked"]["rows"] == rows
    [simulated], measured = result["cases"], result["measured"]
    assert (simulated["completed"], measured["completed"]) == (6, 6)
    assert simulated["ttft_ms"]["p50"] > 0
    assert measured["output_tokens"] == 36
    last = fleet_run.show(result).splitlines()[-1].split()
    ratio = simulated["ttft_ms"]["p50"] / measured["ttft_ms"]["p50"]
    assert last[:3] == ["simulated", "/", "measured"]
    assert last[4] == f"{ratio:.2f}"


def test_bench_fleet_refuses_what_says_nothing_about_a_server(peregrine: Command) -> None:
    for flag, value in (("--replicas", "4"), ("--policy", "random"), ("--prefix-tokens", "9")):
        code, _, errors = peregrine("bench", "fleet", "--url", "http://127.0.0.1:9", "--rate", "2", flag, value)
        assert code == 2
        assert "says nothing about the server at --url; leave it out" in errors


def test_bench_fleet_needs_a_server_that_counts_prompts(
    server: Served, peregrine: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(*_: object) -> dict[str, object]:
        return {"failed": 0, "prompt_tokens": None, "completed": 6}

    async def costs(*_: object) -> Costs:
        return Costs(rounds=((1, 0.01),), prompt_s=0.001, accept_length=2)

    monkeypatch.setattr(serve, "measure_case", measured)
    monkeypatch.setattr(fleet_run, "costs_of_server", costs)
    code, _, errors = peregrine("bench", "fleet", "--url", server.url, "--rate", "9", "--requests", "1")
    assert (code, "reports no usage" in errors) == (2, True)


def test_bench_serve_against_our_own_server(server: Served, tmp_path: Path, peregrine: Command) -> None:
    out = tmp_path / "result.json"
    flags = ["--requests", "4", "--max-tokens", "12", "--ignore-eos", "--slo-ttft", "1e9", "--json", "--out", str(out)]
    code, printed, errors = peregrine(
        "bench", "serve", "--url", server.url, "--concurrency", "2", "--rate", "50", *flags
    )
    assert code == 0, errors
    result = json.loads(out.read_text())
    assert json.loads(printed) == result
    assert result["model"] == "merlin"
    assert result["machine"]["cpu"]["cores"] > 0
    assert {line["field"] for line in result["server"]["decisions"]} > {"drafter", "attention"}
    for case in result["cases"]:
        assert (case["completed"], case["failed"], case["output_tokens"]) == (4, 0, 48)
        assert case["tokens_from"] == "usage"
        assert case["good_share"] == 1.0
        assert case["prompt_tokens"] > 0
        assert 0 < case["ttft_ms"]["p50"] <= case["e2e_ms"]["p50"]
        assert case["connect_ms"]["p50"] > 0
        acceptance = case["acceptance"]
        assert sum(acceptance["by_position"]) * acceptance["rounds"] == pytest.approx(acceptance["correct"])
        # Every token but each request's first comes from a round with drafts: correct ones and a bonus, which the
        # last round may have to leave out.
        assert 44 <= acceptance["rounds"] + acceptance["correct"] <= 48


def test_a_server_that_does_not_start_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"the server ended: .*--max-rows"), bench.running_server(["--max-rows"]):
        pass


def test_flags_are_written_as_they_were_read() -> None:
    parser = argparse.ArgumentParser()
    flags.add_engine_flags(parser)
    argv = ["--model", "m", "--tree", "3,2,8", "--num-pages", "64", "--no-prefix-cache"]
    assert flags.engine_flags(parser.parse_args(argv)) == argv
    chosen = ["--num-drafts", "auto", "--tree", "auto"]
    assert flags.engine_flags(parser.parse_args(chosen)) == chosen
    assert flags.engine_flags(parser.parse_args([])) == []
