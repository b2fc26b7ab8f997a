"""The simulator of a fleet, against what can be computed by hand: one request, a queue, and what a cache must find."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from peregrine.bench.fleet import POLICIES, Job, Plan, arrivals, simulate
from peregrine.bench.fleet_costs import Costs, costs_of_rounds
from peregrine.errors import ConfigError

ROOT = Path(__file__).parents[2]
ROUNDS = ROOT / "benchmarks" / "results" / "round-h200-llama-3.1-8b-eagle3.json"
COSTS = Costs(rounds=((1, 0.01), (8, 0.024)), prompt_s=0.001, accept_length=2, overhead_s=0.005)


def test_a_request_alone_takes_its_chunks_and_its_rounds() -> None:
    plan = Plan(rate=1, replicas=1, requests=1, chunk=100)
    case = simulate(plan, COSTS, [Job(3.0, 0, unread=250, output_tokens=8)])
    assert case["ttft_ms"]["mean"] == pytest.approx(5 + 250 + 10)
    assert case["tpot_ms"]["mean"] == pytest.approx(30 / 7)  # three more rounds for seven more tokens
    assert case["e2e_ms"]["mean"] == pytest.approx(5 + 250 + 40)


def test_a_queue_is_as_long_as_theory_says() -> None:
    """One row, one round per request: an M/D/1 queue, whose mean wait is known (Pollaczek and Khinchine)."""
    service, load = 0.01, 0.5
    costs = Costs(rounds=((1, service),), prompt_s=1e-12, accept_length=1)
    plan = Plan(rate=load / service, replicas=1, requests=10_000, rows=1, prompt_tokens=1, output_tokens=1)
    jobs = [Job(job.arrived, 0, 1, 1) for job in arrivals(plan)]
    case = simulate(plan, costs, jobs)
    wait = load * service / (2 * (1 - load))
    assert case["ttft_ms"]["mean"] == pytest.approx(1e3 * (service + wait), rel=0.04)
    assert case["busy_share"] == pytest.approx([load], rel=0.03)
    assert case["mean_rows"] == pytest.approx(load, rel=0.03)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_and_no_replica_works_more_than_all_the_time(policy: str) -> None:
    plan = Plan(rate=30, replicas=3, policy=policy, requests=300, rows=8, prefix_tokens=200, num_prefixes=12)
    case = simulate(plan, COSTS, arrivals(plan))
    assert case["completed"] == 300
    assert all(0 < share <= 1 for share in case["busy_share"])
    assert case == simulate(plan, COSTS, arrivals(plan)), "the same seed gives the same figures"


def test_prefixes_are_found_where_they_are_sent() -> None:
    """Twelve prefixes, room for four in each of three replicas: only routing by prefix finds nearly all."""

    def hits(policy: str) -> float:
        load = {"rate": 2.0, "requests": 600, "prefix_tokens": 200, "num_prefixes": 12, "cache_tokens": 1200}
        plan = Plan(replicas=3, policy=policy, **load)  # type: ignore[arg-type]
        return float(simulate(plan, COSTS, arrivals(plan))["prefix_hit_share"])

    assert hits("prefix") > 0.9
    assert hits("random") < 0.6


def test_costs_follow_the_measured_rounds() -> None:
    costs = costs_of_rounds(json.loads(ROUNDS.read_text()), 40_000)
    measured = {(c["rows"], c["context"]): c["ms_per_round"] / 1e3 for c in json.loads(ROUNDS.read_text())["cases"]}
    for (rows, context), seconds in measured.items():
        assert costs.round_s(rows, rows * context) == pytest.approx(seconds)
    assert measured[8, 2048] < costs.round_s(20, 20 * 2048) < measured[32, 2048] < costs.round_s(40, 40 * 2048)
    with pytest.raises(ConfigError, match="is not a result of"):
        costs_of_rounds({"benchmark": "serve"}, 1)


def test_the_command(peregrine: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    given = ("bench", "fleet", "--rounds", str(ROUNDS), "--rate", "20", "--requests", "50")
    code, out, _ = peregrine(
        *given, "--prompt-tokens-per-s", "40000", "--replicas", "1", "2", "--policy", "random", "prefix"
    )
    assert code == 0
    assert [line.split("  ")[0] for line in out.splitlines()[4:]] == [
        "1 x random",
        "1 x prefix",
        "2 x random",
        "2 x prefix",
    ]
    for more, said in (
        ((), "prompt_tokens_per_s=None: is missing"),
        (("--rounds", str(tmp_path / "none.json")), "none.json': cannot be read (No such file"),
        (("--prompt-tokens-per-s", "1", "--policy", "best"), "policy='best': is not one of random, round-robin"),
        (("--prompt-tokens-per-s", "1", "--rate", "0"), "rate=0.0: must be above 0"),
    ):
        code, _, err = peregrine(*given, *more)
        assert (code, said in err) == (2, True), err
