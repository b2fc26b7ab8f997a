"""`peregrine bench`: measure the engine on this machine."""

import argparse

from peregrine.cli.bench_batches import add_latency, add_throughput
from peregrine.cli.bench_fleet import add_fleet
from peregrine.cli.bench_result import add_result_flags, finish, plan_from
from peregrine.cli.bench_serve import add_report, add_serve, add_sweep
from peregrine.cli.flags import Commands, add_engine_flags, add_number, add_parser, engine_flags, engine_options
from peregrine.cli.serve import SERVE_PACKAGES
from peregrine.errors import need_packages

OFFLINE_EPILOG = """examples:
  peregrine bench offline
  peregrine bench offline --drafter ngram --num-drafts 4 --rows 1 --out result.json
  peregrine bench offline --model /models/llama --drafter /models/llama-eagle3 --no-peer
  peregrine bench offline --model smollm2 --drafter suffix         beside llama.cpp: pip install xllamacpp

Everything is measured in one run, in turns: plain decoding, speculative decoding, and a peer on the same prompts, which
is transformers for a folder, and for a GGUF file llama.cpp with as many threads.
"""
HTTP_EPILOG = """examples:
  peregrine bench http
  peregrine bench http --streams 8 --drafter none
"""
CONTENTION_EPILOG = """examples:
  peregrine bench contention
  peregrine bench contention --busy 1 2 4 --repeats 15 --out contention.json

Run it on a machine that does nothing else: speeds are compared with the one alone, in the same run.
"""
GRAMMAR_EPILOG = """examples:
  peregrine bench grammar
  peregrine bench grammar --model smollm2 --out grammar.json
  peregrine bench grammar --model shape:llama-3.1-8b --drafter eagle3 --drafts 0    # rounds alone, 128,256 tokens

Rounds are timed with --drafter (default: none). Speeds are those without drafts, then with the drafter ngram, so that
the only good drafts are those the grammar forces.
"""
ROUND_EPILOG = """examples:
  peregrine bench round --model shape:llama-3.1-8b --drafter eagle3 --num-drafts 3 --accept 3
  peregrine bench round --model shape:llama-3.1-8b --drafter none --cases 1x2048 32x2048
  peregrine bench round --model shape:deepseek-v2-lite --drafter mtp --accept 3 --cases 1x2048
"""
KERNELS_EPILOG = """examples:
  peregrine bench kernels
  peregrine bench kernels --rows 1 --contexts 131072
"""
TILES_EPILOG = """examples:
  peregrine bench tiles --model shape:llama-3.1-8b
  peregrine bench tiles --model /models/llama --rows 16 --out tiles.json

The last lines are the table of tiles for this GPU, in the form the linear kernel's table has.
"""


def add_command(commands: Commands) -> None:
    """Add the command and its benchmarks."""
    parser = commands.add_parser("bench", help="measure the engine on this machine")
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for add in (
        add_offline,
        add_throughput,
        add_latency,
        add_http,
        add_contention,
        add_grammar,
        add_round,
        add_kernels,
        add_tiles,
        add_serve,
        add_sweep,
        add_fleet,
        add_report,
    ):
        add(kinds)


def add_offline(kinds: Commands) -> None:
    text = "tokens/s, acceptance and where a round's time goes"
    parser = add_parser(kinds, "offline", run_offline, text, epilog=OFFLINE_EPILOG)
    add_number(parser, "--rows", [1, 8], "batch sizes")
    add_number(parser, "--tokens", 128, "per request")
    add_number(parser, "--repeats", 3, "the median counts")
    add_number(parser, "--temperature", 0.0, metavar="T")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers or llama.cpp out")
    add_result_flags(parser)
    add_engine_flags(parser)


def run_offline(args: argparse.Namespace) -> int:
    from peregrine.bench import offline
    from peregrine.bench.offline_table import show

    plan = plan_from(offline.Plan, args, peer=not args.no_peer)
    finish(offline.run(plan, engine_options(args)), show, args)
    return 0


def add_http(kinds: Commands) -> None:
    text = "what streaming over HTTP costs, against LLM.generate"
    parser = add_parser(kinds, "http", run_http, text, epilog=HTTP_EPILOG)
    add_number(parser, "--streams", 32, "at once")
    add_number(parser, "--tokens", 128, "per stream")
    add_number(parser, "--repeats", 5, "the median counts")
    add_number(parser, "--temperature", 0.0, metavar="T")
    add_result_flags(parser)
    add_engine_flags(parser)


def run_http(args: argparse.Namespace) -> int:
    need_packages(*SERVE_PACKAGES, "aiohttp")
    from peregrine.bench import http

    finish(http.run(plan_from(http.Plan, args), engine_options(args), engine_flags(args)), http.show, args)
    return 0


def add_contention(kinds: Commands) -> None:
    text = "what is left of the speed beside busy processes, offline and over HTTP"
    parser = add_parser(kinds, "contention", run_contention, text, epilog=CONTENTION_EPILOG)
    add_number(parser, "--busy", [1, 2], "processes that keep a core busy each; none is always measured")
    add_number(parser, "--tokens", 64, "per request, one at a time")
    add_number(parser, "--repeats", 7, "the median counts")
    add_number(parser, "--temperature", 0.0, metavar="T")
    add_result_flags(parser)
    add_engine_flags(parser)


def run_contention(args: argparse.Namespace) -> int:
    need_packages(*SERVE_PACKAGES, "aiohttp")
    from peregrine.bench import contention

    plan = plan_from(contention.Plan, args)
    finish(contention.run(plan, engine_options(args), engine_flags(args)), contention.show, args)
    return 0


def add_grammar(kinds: Commands) -> None:
    text = "what structured output costs and saves: masks, rounds, tokens/s against free text"
    parser = add_parser(kinds, "grammar", run_grammar, text, epilog=GRAMMAR_EPILOG)
    add_number(parser, "--constrained", [0, 1, 8], "rows with a grammar, of 8")
    add_number(parser, "--drafts", [3, 5, 7], "most forced drafts of a round; 0: leave these speeds out", least=0)
    add_number(parser, "--tokens", 200, "most of a request")
    add_number(parser, "--repeats", 7, "the median counts")
    add_result_flags(parser)
    add_engine_flags(parser)


def run_grammar(args: argparse.Namespace) -> int:
    need_packages("llguidance")
    from peregrine.bench import grammar

    finish(grammar.run(plan_from(grammar.Plan, args), engine_options(args)), grammar.show, args)
    return 0


def add_round(kinds: Commands) -> None:
    text = "ms per round on a GPU against the bytes it must read"
    told = "A round's time, on a CUDA device, against its roofline; the model needs no trained weights."
    parser = add_parser(kinds, "round", run_round, text, told, ROUND_EPILOG)
    cases = ("1x2048", "1x32768", "8x2048", "32x2048")
    parser.add_argument(
        "--cases",
        type=case,
        nargs="+",
        default=list(map(case, cases)),
        metavar="ROWSxCONTEXT",
        help=f"(default: {' '.join(cases)})",
    )
    add_number(parser, "--rounds", 200, "per case")
    parser.add_argument("--accept", type=float, metavar="LEN", help="simulated tokens per round, bonus counted")
    add_result_flags(parser)
    add_engine_flags(parser, model="shape:llama-3.1-8b")


def case(text: str) -> "tuple[int, int]":
    """ROWSxCONTEXT as two whole numbers."""
    rows, _, context = text.partition("x")
    if not (rows.isdigit() and context.isdigit() and int(rows) and int(context)):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxCONTEXT, such as 8x2048")
    return int(rows), int(context)


def run_round(args: argparse.Namespace) -> int:
    from peregrine.bench import round as rounds

    cases = [rounds.Case(*pair) for pair in args.cases]
    options = engine_options(args)
    if args.accept is not None:
        options["simulate_accept"] = args.accept
    result = rounds.run(rounds.engine_config(options, cases, args.rounds), cases, args.rounds)
    finish(result, rounds.show, args)
    return 0


def add_kernels(kinds: Commands) -> None:
    text = "attention's decode kernel against its context kernel, on the windows of a round"
    parser = add_parser(kinds, "kernels", run_kernels, text, epilog=KERNELS_EPILOG)
    add_number(parser, "--rows", [1, 8, 32])
    add_number(parser, "--q-lens", [1, 4, 8], "queries on each row")
    add_number(parser, "--contexts", [2048, 32768])
    heads = ("HEADS", "KV_HEADS", "HEAD_DIM")
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128], metavar=heads, help="(default: 32 8 128)")
    mla = ("HEADS", "RANK", "ROPE_DIM")
    parser.add_argument("--latent", type=int, nargs=3, metavar=mla, help="measure MLA, too, such as 16 512 64")
    add_number(parser, "--page-size", 16)
    parser.add_argument("--dtype", default="bfloat16", metavar="DTYPE", help="(default: bfloat16)")
    parser.add_argument("--kv-dtype", default="auto", metavar="DTYPE", help="auto or float8 (default: auto)")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="(default: auto)")
    add_result_flags(parser)


def run_kernels(args: argparse.Namespace) -> int:
    from peregrine.bench import kernels

    finish(kernels.run(plan_from(kernels.Plan, args)), kernels.show, args)
    return 0


def add_tiles(kinds: Commands) -> None:
    text = "the fastest tile of the linear kernel for each weight of a model, on this GPU"
    parser = add_parser(kinds, "tiles", run_tiles, text, epilog=TILES_EPILOG)
    parser.add_argument("--model", required=True, metavar="MODEL", help="a folder, a name or shape:NAME")
    parser.add_argument("--drafter", default="auto", metavar="DRAFTER", help="(default: auto)")
    add_number(parser, "--rows", [16, 32, 64, 128], "heights of tiles")
    parser.add_argument("--dtype", default="auto", metavar="DTYPE", help="(default: as stored)")
    add_result_flags(parser)


def run_tiles(args: argparse.Namespace) -> int:
    from peregrine.bench import tiles

    finish(tiles.run(args.model, args.drafter, tuple(args.rows), args.dtype), tiles.show, args)
    return 0
