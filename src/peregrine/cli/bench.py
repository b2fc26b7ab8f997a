"""`peregrine bench`: measure the engine on this machine."""

import argparse

from peregrine.cli.bench_result import add_result_flags, finish
from peregrine.cli.bench_serve import add_benchmarks
from peregrine.cli.flags import add_engine_flags, engine_flags, engine_options
from peregrine.cli.serve import need_serve_extra

EPILOG = """examples:
  peregrine bench offline
  peregrine bench offline --drafter ngram --num-drafts 4 --rows 1 --out result.json
  peregrine bench offline --model /models/llama --drafter /models/llama-eagle3 --no-peer

Everything is measured in one run: plain decoding, speculative decoding, and transformers on the same prompts.
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command and its benchmarks."""
    parser = commands.add_parser("bench", help="measure the engine on this machine")
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    offline = kinds.add_parser(
        "offline",
        help="tokens/s, acceptance and where a round's time goes",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    offline.add_argument("--rows", type=int, nargs="+", default=[1, 8], metavar="N", help="batch sizes (default: 1 8)")
    offline.add_argument("--tokens", type=int, default=128, metavar="N", help="per request (default: 128)")
    offline.add_argument("--repeats", type=int, default=3, metavar="N", help="the median counts (default: 3)")
    offline.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(default: 0)")
    offline.add_argument("--no-peer", action="store_true", help="leave transformers out")
    add_result_flags(offline)
    add_engine_flags(offline)
    offline.set_defaults(run=run_offline)
    add_http(kinds)
    add_round(kinds)
    add_kernels(kinds)
    add_tiles(kinds)
    add_benchmarks(kinds)


def run_offline(args: argparse.Namespace) -> int:
    """Measure and print."""
    from peregrine.bench import offline

    plan = offline.Plan(tuple(args.rows), args.tokens, args.repeats, args.temperature, not args.no_peer)
    result = offline.run(plan, engine_options(args))
    finish(result, offline.show, args)
    return 0


def add_http(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench http`."""
    http = kinds.add_parser(
        "http",
        help="what streaming over HTTP costs, against LLM.generate",
        epilog="examples:\n  peregrine bench http\n  peregrine bench http --streams 8 --drafter none",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    http.add_argument("--streams", type=int, default=32, metavar="N", help="at once (default: 32)")
    http.add_argument("--tokens", type=int, default=128, metavar="N", help="per stream (default: 128)")
    http.add_argument("--repeats", type=int, default=5, metavar="N", help="the median counts (default: 5)")
    http.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(default: 0)")
    add_result_flags(http)
    add_engine_flags(http)
    http.set_defaults(run=run_http)


def run_http(args: argparse.Namespace) -> int:
    """Measure and print."""
    need_serve_extra()
    from peregrine.bench import http

    plan = http.Plan(args.streams, args.tokens, args.repeats, args.temperature)
    result = http.run(plan, engine_options(args), engine_flags(args))
    finish(result, http.show, args)
    return 0


def add_round(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench round`."""
    parser = kinds.add_parser(
        "round",
        help="ms per round on a GPU against the bytes it must read",
        epilog="examples:\n"
        "  peregrine bench round --model shape:llama-3.1-8b --drafter eagle3 --num-drafts 3 --accept 3\n"
        "  peregrine bench round --model shape:llama-3.1-8b --drafter none --cases 1x2048 32x2048\n"
        "  peregrine bench round --model shape:deepseek-v2-lite --drafter mtp --accept 3 --cases 1x2048",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cases",
        type=case,
        nargs="+",
        default=[case(text) for text in ("1x2048", "1x32768", "8x2048", "32x2048")],
        metavar="ROWSxCONTEXT",
        help="(default: 1x2048 1x32768 8x2048 32x2048)",
    )
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="per case (default: 200)")
    parser.add_argument("--accept", type=float, metavar="LEN", help="simulated tokens per round, bonus counted")
    add_result_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run_round)


def case(text: str) -> "tuple[int, int]":
    """ROWSxCONTEXT as two whole numbers."""
    rows, _, context = text.partition("x")
    if not (rows.isdigit() and context.isdigit() and int(rows) and int(context)):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxCONTEXT, such as 8x2048")
    return int(rows), int(context)


def run_round(args: argparse.Namespace) -> int:
    """Measure and print."""
    from peregrine.bench import round as rounds

    cases = [rounds.Case(*pair) for pair in args.cases]
    options = engine_options(args)
    if args.accept is not None:
        options["simulate_accept"] = args.accept
    result = rounds.run(rounds.engine_config(options, cases, args.rounds), cases, args.rounds)
    finish(result, rounds.show, args)
    return 0


def add_kernels(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench kernels`."""
    parser = kinds.add_parser(
        "kernels",
        help="attention's decode kernel against its context kernel, on the windows of a round",
        epilog="examples:\n  peregrine bench kernels\n  peregrine bench kernels --rows 1 --contexts 131072",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="(default: 1 8 32)")
    parser.add_argument(
        "--q-lens", type=int, nargs="+", default=[1, 4, 8], metavar="N", help="queries on each row (default: 1 4 8)"
    )
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[2048, 32768], metavar="N", help="(default: 2048 32768)"
    )
    parser.add_argument(
        "--heads",
        type=int,
        nargs=3,
        default=[32, 8, 128],
        metavar=("HEADS", "KV_HEADS", "HEAD_DIM"),
        help="(default: 32 8 128)",
    )
    parser.add_argument(
        "--latent",
        type=int,
        nargs=3,
        metavar=("HEADS", "RANK", "ROPE_DIM"),
        help="measure latent attention (MLA), too, such as 16 512 64",
    )
    parser.add_argument("--page-size", type=int, default=16, metavar="N", help="(default: 16)")
    parser.add_argument("--dtype", default="bfloat16", metavar="DTYPE", help="(default: bfloat16)")
    parser.add_argument("--kv-dtype", default="auto", metavar="DTYPE", help="auto or float8 (default: auto)")
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="(default: auto)")
    add_result_flags(parser)
    parser.set_defaults(run=run_kernels)


def run_kernels(args: argparse.Namespace) -> int:
    """Measure and print."""
    from peregrine.bench import kernels

    result = kernels.run(
        kernels.Plan(
            rows=tuple(args.rows),
            q_lens=tuple(args.q_lens),
            contexts=tuple(args.contexts),
            heads=tuple(args.heads),
            latent=tuple(args.latent) if args.latent else None,
            page_size=args.page_size,
            dtype=args.dtype,
            kv_dtype=args.kv_dtype,
            device=args.device,
        )
    )
    finish(result, kernels.show, args)
    return 0


def add_tiles(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench tiles`."""
    parser = kinds.add_parser(
        "tiles",
        help="the fastest tile of the linear kernel for each weight of a model, on this GPU",
        epilog="examples:\n  peregrine bench tiles --model shape:llama-3.1-8b\n"
        "  peregrine bench tiles --model /models/llama --rows 16 --out tiles.json\n\n"
        "The last lines are what kernels/linear_tiles.py would say for this GPU.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, metavar="MODEL", help="a folder, a name or shape:NAME")
    parser.add_argument("--drafter", default="auto", metavar="DRAFTER", help="(default: auto)")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[16, 32, 64, 128],
        metavar="N",
        help="heights of tiles (default: 16 32 64 128)",
    )
    parser.add_argument("--dtype", default="auto", metavar="DTYPE", help="(default: as stored)")
    add_result_flags(parser)
    parser.set_defaults(run=run_tiles)


def run_tiles(args: argparse.Namespace) -> int:
    """Measure and print."""
    from peregrine.bench import tiles

    result = tiles.run(args.model, args.drafter, tuple(args.rows), args.dtype)
    finish(result, tiles.show, args)
    return 0
