"""`peregrine bench`: measure the engine on this machine."""

import argparse
import json
from pathlib import Path

from peregrine.cli.flags import add_engine_flags, engine_options

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
    offline.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8], metavar="N", help="batch sizes (default: 1 8)"
    )
    offline.add_argument("--tokens", type=int, default=128, metavar="N", help="per request (default: 128)")
    offline.add_argument("--repeats", type=int, default=3, metavar="N", help="the median counts (default: 3)")
    offline.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(default: 0)")
    offline.add_argument("--no-peer", action="store_true", help="leave transformers out")
    offline.add_argument("--json", action="store_true", help="print JSON instead of a table")
    offline.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON here")
    add_engine_flags(offline)
    offline.set_defaults(run=run_offline)


def run_offline(args: argparse.Namespace) -> int:
    """Measure and print."""
    from peregrine.bench import offline

    plan = offline.Plan(tuple(args.rows), args.tokens, args.repeats, args.temperature, not args.no_peer)
    result = offline.run(plan, engine_options(args))
    written = json.dumps(result, indent=2)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(written + "\n")
    print(written if args.json else offline.show(result))
    return 0
