"""`peregrine bench throughput` and `bench latency`, as people know them from vLLM."""

import argparse
from pathlib import Path
from typing import Any

from peregrine.cli.bench_result import add_result_flags, finish, plan_from
from peregrine.cli.flags import Commands, add_engine_flags, add_number, add_parser, engine_options

THROUGHPUT_EPILOG = """examples:
  peregrine bench throughput --num-prompts 64 --input-len 128 --output-len 64
  peregrine bench throughput --model shape:llama-3.1-8b --drafter eagle3 --accept 3 --num-prompts 192
  peregrine bench throughput --model /models/llama --prompts mine.jsonl --num-prompts 500 --out result.json

The same numbers as of `vllm bench throughput` with the same lengths: requests/s, total and output tokens/s.
"""
LATENCY_EPILOG = """examples:
  peregrine bench latency --input-len 128 --output-len 64 --batch-size 1
  peregrine bench latency --model shape:llama-3.1-8b --drafter none --input-len 8192 --output-len 16 --batch-size 1

The same numbers as of `vllm bench latency`, and the time to the first token and per further token.
"""


def add_throughput(kinds: Commands) -> None:
    text = "many requests at once: requests/s and tokens/s"
    parser = add_parser(kinds, "throughput", run_throughput, text, epilog=THROUGHPUT_EPILOG)
    add_number(parser, "--num-prompts", 64, "requests")
    add_load_flags(parser, input_len=1024)


def add_latency(kinds: Commands) -> None:
    text = "one batch: its latency, time to first token, time per token"
    parser = add_parser(kinds, "latency", run_latency, text, epilog=LATENCY_EPILOG)
    add_number(parser, "--batch-size", 8, "requests at a time")
    add_number(parser, "--num-iters", 10, "batches that are measured")
    add_number(parser, "--num-iters-warmup", 2, "batches before them", least=0)
    add_load_flags(parser, input_len=32)


def add_load_flags(parser: argparse.ArgumentParser, input_len: int) -> None:
    """Flags of the requests, the result and the engine."""
    source = parser.add_mutually_exclusive_group()
    add_number(source, "--input-len", input_len, "random prompt tokens per request")
    text = 'JSONL of {"prompt": ...} or {"messages": [...]}, used in turn instead of random prompts'
    source.add_argument("--prompts", type=Path, metavar="FILE", help=text)
    add_number(parser, "--output-len", 128, "generated tokens per request")
    add_number(parser, "--temperature", 0.0, metavar="T")
    add_number(parser, "--seed", 0, "of prompts and requests", "SEED")
    parser.add_argument("--accept", type=float, metavar="LEN", help="simulated tokens per round, bonus counted")
    add_result_flags(parser)
    add_engine_flags(parser)


def run_throughput(args: argparse.Namespace) -> int:
    from peregrine.bench import batches

    load = plan_from(batches.Load, args, count=args.num_prompts)
    finish(batches.run_throughput(load, options_of(args)), batches.show, args)
    return 0


def run_latency(args: argparse.Namespace) -> int:
    from peregrine.bench import batches

    load = plan_from(batches.Load, args, count=args.batch_size)
    result = batches.run_latency(load, args.num_iters, args.num_iters_warmup, options_of(args))
    finish(result, batches.show, args)
    return 0


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's options."""
    return engine_options(args) | ({} if args.accept is None else {"simulate_accept": args.accept})
