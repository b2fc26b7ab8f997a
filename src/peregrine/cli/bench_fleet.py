"""`peregrine bench fleet`: replicas behind a router, simulated."""

import argparse
import json
from pathlib import Path

from peregrine.cli.bench_result import add_result_flags, finish, plan_from
from peregrine.cli.flags import Commands, add_number, add_parser
from peregrine.errors import ConfigError, need_packages, read_user_text

EPILOG = """examples:
  peregrine bench fleet --rounds benchmarks/results/round-h200-llama-3.1-8b-eagle3.json --prompt-tokens-per-s 45600 \\
      --rate 100 --replicas 2 4 --policy random prefix --prefix-tokens 4000 --num-prefixes 200
  peregrine bench fleet --url http://127.0.0.1:8000 --rate 2 --requests 60      simulated and measured, side by side

Costs come from a result of `bench round`, or from a server that does nothing else meanwhile. `bench latency` measures
how fast prompts are read: divide --input-len by the time to the first token.
"""

# Of a fleet that is simulated; a server is one replica, and its prompts are made up.
SIMULATED = (
    "prompt_tokens_per_s",
    "replicas",
    "policy",
    "prefix_tokens",
    "num_prefixes",
    "prompt_tokens",
    "cache_tokens",
)


def add_fleet(kinds: Commands) -> None:
    """Add the benchmark and its flags."""
    text = "replicas behind a router, simulated from measured rounds: TTFT and TPOT by policy"
    parser = add_parser(kinds, "fleet", run_fleet, text, epilog=EPILOG)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--rounds", type=Path, metavar="FILE", help="a result of `bench round --out`")
    source.add_argument("--url", metavar="URL", help="a server: measure its costs, simulate it, and compare")
    add = parser.add_argument
    add("--prompt-tokens-per-s", type=float, metavar="N", help="how fast a replica reads prompts; with --rounds")
    add("--rate", type=float, required=True, metavar="R", help="requests per second, of the whole fleet")
    add_number(parser, "--replicas", [2], "one or several numbers of them")
    policies = "random, round-robin, least-requests, power-of-two or prefix; several are compared (default: prefix)"
    add("--policy", nargs="+", default=["prefix"], metavar="POLICY", help=policies)
    add_number(parser, "--requests", 2000)
    add_number(parser, "--rows", 32, "of each replica; a server says its own")
    add_number(parser, "--chunk", 2048, "prompt tokens read in one step")
    add_number(parser, "--prefix-tokens", 0, "at the beginning of every prompt, shared")
    add_number(parser, "--num-prefixes", 1, "different ones")
    add_number(parser, "--prompt-tokens", 512, "after the prefix, on average")
    add_number(parser, "--output-tokens", 128, "on average; with --url exactly")
    add_number(parser, "--cache-tokens", 200_000, "of prefixes that a replica keeps", least=0)
    add_number(parser, "--seed", 0, "of the arrivals", "SEED")
    add_result_flags(parser)


def run_fleet(args: argparse.Namespace) -> int:
    """Simulate and print."""
    need_packages("aiohttp")
    from peregrine.bench import fleet, fleet_run
    from peregrine.bench.fleet_costs import costs_of_rounds
    from peregrine.bench.serve_client import Client

    for policy in args.policy:
        plan = plan_from(fleet.Plan, args, replicas=min(args.replicas), policy=policy)
    if args.url is not None:
        for name in SIMULATED:
            if (value := vars(args)[name]) != args.parser.get_default(name):
                raise ConfigError(f"{name}={value!r}: says nothing about the server at --url; leave it out")
        finish(fleet_run.compare(plan, Client(args.url, None)), fleet_run.show, args)
        return 0
    written = read_user_text("rounds", args.rounds)
    try:
        measured = json.loads(written)
    except ValueError as error:
        raise ConfigError(
            f"rounds={str(args.rounds)!r}: is not JSON ({error}); name a result of bench round"
        ) from error
    if args.prompt_tokens_per_s is None:
        raise ConfigError(
            "prompt_tokens_per_s=None: is missing; pass what a replica reads in a second: the --input-len of "
            "`bench latency` divided by its time to the first token"
        )
    costs = costs_of_rounds(measured, args.prompt_tokens_per_s)
    finish(fleet_run.run(plan, costs, args.replicas, args.policy), fleet_run.show, args)
    return 0
