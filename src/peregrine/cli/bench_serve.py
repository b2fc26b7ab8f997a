"""`peregrine bench serve`, `sweep` and `report`: measure a server, find the best drafts, show the results."""

import argparse
from pathlib import Path

from peregrine.cli.bench_result import add_result_flags, finish, plan_from
from peregrine.cli.flags import (
    Commands,
    above_zero,
    add_engine_flags,
    add_number,
    add_parser,
    at_least,
    engine_options,
    new_file,
    tree_shape,
)
from peregrine.errors import need_packages

CONCURRENCY = (1, 4, 16)
SERVE_EPILOG = """examples:
  peregrine bench serve --url http://127.0.0.1:8000
  peregrine bench serve --url http://127.0.0.1:8000 --set code --concurrency 1 8 32 --out code.json
  peregrine bench serve --url http://gpu:8000 --rate 2 8 --slo-ttft 200 --slo-tpot 20 --prompts mine.jsonl
"""
SWEEP_EPILOG = """examples:
  peregrine bench sweep
  peregrine bench sweep --drafts 0 1 2 3 4 5 6 --trees 3,2,8 4,3,16 --set code --out sweep.json
  peregrine bench sweep --model /models/llama --drafter /models/llama-eagle3 --rows 8
"""
REPORT_EPILOG = """examples:
  peregrine bench report offline.json sweep.json serve.json --out report.html

Takes what bench offline, bench sweep and bench serve write with --out.
"""


def add_serve(kinds: Commands) -> None:
    text = "TTFT, TPOT, throughput and acceptance of any OpenAI-compatible server"
    parser = add_parser(
        kinds, "serve", run_serve, text, "Drive a server with streams and report what its clients see.", SERVE_EPILOG
    )
    add = parser.add_argument
    add("--url", required=True, metavar="URL", help="the server, such as http://127.0.0.1:8000")
    add("--model", metavar="NAME", help="(default: the first one the server lists)")
    add("--api-key", metavar="KEY", help="sent as Authorization: Bearer KEY")
    add(
        "--concurrency",
        type=at_least(1),
        nargs="+",
        metavar="N",
        help="closed loops (default: 1 4 16, as far as there are requests)",
    )
    add("--rate", type=float, nargs="+", metavar="R", help="open loops: requests per second, Poisson")
    add_number(parser, "--requests", 64, "per case")
    add_prompt_flags(parser)
    add_number(parser, "--max-tokens", 128, "per request")
    add_number(parser, "--temperature", 0.0, metavar="T")
    add_number(parser, "--seed", 0, "of arrivals and requests", "SEED")
    add("--ignore-eos", action="store_true", help="always --max-tokens; not every server knows it")
    add("--slo-ttft", type=above_zero, metavar="MS", help="a good request has its first token by then")
    add("--slo-tpot", type=above_zero, metavar="MS", help="and takes no longer for each further token")
    add("--no-flush", action="store_true", help="leave the server's prefix cache alone between cases")
    add_result_flags(parser)


def run_serve(args: argparse.Namespace) -> int:
    """Measure and print; 1 if a request failed."""
    need_packages("aiohttp")
    from peregrine.bench import serve
    from peregrine.bench.prompts import load_prompts
    from peregrine.bench.serve_client import Client
    from peregrine.bench.serve_metrics import Limits
    from peregrine.bench.serve_table import show

    usual = [] if args.rate else [count for count in CONCURRENCY if count <= args.requests]
    loops = args.concurrency or usual
    cases = [serve.Case(concurrency=count) for count in loops]
    cases += [serve.Case(rate=rate) for rate in args.rate or ()]
    prompts, limits = load_prompts(args.prompts, args.set), Limits(args.slo_ttft, args.slo_tpot)
    plan = plan_from(serve.Plan, args, cases=tuple(cases), prompts=prompts, limits=limits, flush=not args.no_flush)
    result = serve.run(plan, Client(args.url, args.api_key))
    finish(result, show, args)
    return 1 if any(case["failed"] for case in result["cases"]) else 0


def add_sweep(kinds: Commands) -> None:
    text = "which number of drafts, or which tree, is fastest here"
    parser = add_parser(
        kinds,
        "sweep",
        run_sweep,
        text,
        "Run chains and trees of drafts in one process on the same prompts, and say which is best.",
        SWEEP_EPILOG,
    )
    drafts = [0, 1, 2, 3, 4, 5, 6]
    text = f"numbers of drafts to try, 0: plain decoding (default: {' '.join(map(str, drafts))})"
    parser.add_argument("--drafts", type=at_least(0), nargs="*", default=drafts, metavar="K", help=text)
    trees = [(3, 2, 8), (4, 2, 12)]
    text = "trees: levels, children per node, nodes with the root (default: 3,2,8 4,2,12)"
    parser.add_argument("--trees", type=tree_shape, nargs="*", default=trees, metavar="D,W,N", help=text)
    add_number(parser, "--rows", 1, "requests at a time")
    add_number(parser, "--max-prompts", 8, "how many prompts are used")
    add_number(parser, "--tokens", 64, "per prompt")
    add_number(parser, "--temperature", 0.0, metavar="T")
    add_number(parser, "--repeats", 3, "the median counts")
    add_prompt_flags(parser)
    add_result_flags(parser)
    add_engine_flags(parser)


def run_sweep(args: argparse.Namespace) -> int:
    """Measure and print; 1 if two shapes gave different tokens, which would be a bug."""
    from peregrine.bench import sweep
    from peregrine.bench.prompts import load_prompts

    prompts = load_prompts(args.prompts, args.set)[: max(1, args.max_prompts)]
    plan = plan_from(sweep.Plan, args, prompts=prompts)
    result = sweep.run(plan, engine_options(args))
    finish(result, sweep.show, args)
    return 0 if result["identical"] else 1


def add_report(kinds: Commands) -> None:
    text = "results as one HTML page with plots"
    parser = add_parser(
        kinds, "report", run_report, text, "Turn results into one page that needs nothing but a browser.", REPORT_EPILOG
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--out", type=new_file, default="report.html", metavar="FILE", help="(default: report.html)")
    parser.add_argument("--title", default="Benchmark report", metavar="TEXT")


def run_report(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    need_packages("matplotlib")
    from peregrine.bench.report import read_results, render

    page = render(read_results(args.results), args.title)
    args.out.write_text(page, encoding="utf-8")
    print(args.out)
    return 0


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where prompts come from."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", type=Path, metavar="FILE", help='JSONL of {"prompt": ...} or {"messages": [...]}')
    text = "built-in: short-chat, code, summarise or long (default: short-chat)"
    source.add_argument("--set", default="short-chat", metavar="NAME", help=text)
