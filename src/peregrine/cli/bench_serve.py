"""`peregrine bench serve`, `sweep` and `report`: measure a server, find the best drafts, show what was found."""

import argparse
from pathlib import Path

from peregrine.cli.bench_result import add_result_flags, finish
from peregrine.cli.flags import add_engine_flags, engine_options, tree_shape

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


def add_benchmarks(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the three of them."""
    add_serve(kinds)
    add_sweep(kinds)
    add_report(kinds)


def add_serve(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench serve`."""
    parser = kinds.add_parser(
        "serve",
        help="TTFT, TPOT, throughput and acceptance of any OpenAI-compatible server",
        description="Drive a server with streams and report what its clients see.",
        epilog=SERVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", required=True, metavar="URL", help="the server, such as http://127.0.0.1:8000")
    add("--model", metavar="NAME", help="(default: the first one the server lists)")
    add("--api-key", metavar="KEY", help="sent as Authorization: Bearer KEY")
    add("--concurrency", type=int, nargs="+", metavar="N", help="closed loops (default: 1 4 16)")
    add("--rate", type=float, nargs="+", metavar="R", help="open loops: requests per second, Poisson")
    add("--requests", type=int, default=64, metavar="N", help="per case (default: 64)")
    add_prompt_flags(parser)
    add("--max-tokens", type=int, default=128, metavar="N", help="per request (default: 128)")
    add("--temperature", type=float, default=0.0, metavar="T", help="(default: 0)")
    add("--seed", type=int, default=0, metavar="SEED", help="of arrivals and requests (default: 0)")
    add("--ignore-eos", action="store_true", help="always --max-tokens; not every server knows it")
    add("--slo-ttft", type=float, metavar="MS", help="a good request has its first token by then")
    add("--slo-tpot", type=float, metavar="MS", help="and takes no longer for each further token")
    add("--no-flush", action="store_true", help="leave the server's prefix cache alone between cases")
    add_result_flags(parser)
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Measure and print; 1 if a request failed."""
    from peregrine.bench import serve
    from peregrine.bench.prompts import load_prompts
    from peregrine.bench.serve_client import Client
    from peregrine.bench.serve_metrics import Limits
    from peregrine.bench.serve_table import show

    loops = args.concurrency or ([] if args.rate else [1, 4, 16])
    cases = [serve.Case(concurrency=count) for count in loops]
    cases += [serve.Case(rate=rate) for rate in args.rate or ()]
    plan = serve.Plan(
        cases=tuple(cases),
        prompts=load_prompts(args.prompts, args.set),
        model=args.model,
        requests=args.requests,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
        limits=Limits(args.slo_ttft, args.slo_tpot),
        flush=not args.no_flush,
    )
    result = serve.run(plan, Client(args.url, args.api_key))
    finish(result, show, args)
    return 1 if any(case["failed"] for case in result["cases"]) else 0


def add_sweep(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench sweep`."""
    parser = kinds.add_parser(
        "sweep",
        help="which number of drafts, or which tree, is fastest here",
        description="Run chains and trees of drafts in one process on the same prompts, and say which is best.",
        epilog=SWEEP_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--drafts",
        type=int,
        nargs="*",
        default=[0, 1, 2, 3, 4, 5, 6],
        metavar="K",
        help="chains of so many drafts, 0: plain decoding (default: 0 1 2 3 4 5 6)",
    )
    add(
        "--trees",
        type=tree_shape,
        nargs="*",
        default=[(3, 2, 8), (4, 2, 12)],
        metavar="D,W,N",
        help="trees: levels, children per node, nodes with the root (default: 3,2,8 4,2,12)",
    )
    add("--rows", type=int, default=1, metavar="N", help="requests at a time (default: 1)")
    add("--max-prompts", type=int, default=8, metavar="N", help="the first so many (default: 8)")
    add("--tokens", type=int, default=64, metavar="N", help="per prompt (default: 64)")
    add("--temperature", type=float, default=0.0, metavar="T", help="(default: 0)")
    add("--repeats", type=int, default=3, metavar="N", help="the median counts (default: 3)")
    add_prompt_flags(parser)
    add_result_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run_sweep)


def run_sweep(args: argparse.Namespace) -> int:
    """Measure and print; 1 if any way of drafting changed a token, which would be a defect."""
    from peregrine.bench import sweep
    from peregrine.bench.prompts import load_prompts

    plan = sweep.Plan(
        drafts=tuple(args.drafts),
        trees=tuple(args.trees),
        prompts=load_prompts(args.prompts, args.set)[: max(1, args.max_prompts)],
        rows=args.rows,
        tokens=args.tokens,
        temperature=args.temperature,
        repeats=args.repeats,
    )
    result = sweep.run(plan, engine_options(args))
    finish(result, sweep.show, args)
    return 0 if result["identical"] else 1


def add_report(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench report`."""
    parser = kinds.add_parser(
        "report",
        help="results as one HTML page with plots",
        description="Turn results into one page that needs nothing but a browser.",
        epilog=REPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE")
    parser.add_argument("--title", default="Benchmark report", metavar="TEXT")
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from peregrine.bench.report import read_results, render

    page = render(read_results(args.results), args.title)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page, encoding="utf-8")
    print(args.out)
    return 0


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """Where prompts come from."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", type=Path, metavar="FILE", help='JSONL of {"prompt": ...} or {"messages": [...]}')
    source.add_argument(
        "--set",
        default="short-chat",
        metavar="NAME",
        help="built-in: short-chat, code, summarise or long (default: short-chat)",
    )
