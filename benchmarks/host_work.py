"""What the host does for a round besides waiting: microseconds per row, with a round that computes nothing.

Verdicts are made up, everything else is the engine's own: pages, launches, reading verdicts, deltas. Requests join at
the start; with --churn some end and others take their places in every round. Runs on any CPU, without a GPU.

    python benchmarks/host_work.py                       # 256 rows, 3 drafts of which 2 are right
    python benchmarks/host_work.py --drafts 0 --churn 4
    python benchmarks/host_work.py --profile             # the slowest functions
"""

import argparse
import cProfile
import itertools
import pstats
import time

import torch

from peregrine.bench.seating import unseat
from peregrine.config import EngineConfig
from peregrine.engine.build import build_engine
from peregrine.engine.engine import Engine
from peregrine.engine.request import Request
from peregrine.errors import ConfigError
from peregrine.kernels.round import HEADER, Verdict
from peregrine.sampling import SamplingParams
from peregrine.spec.state import Rows

WARM = 20
KINDS = OUTPUTS, TOKENS, TEXT = "whole outputs", "deltas of every round", "deltas with text"


def null_engine(rows: int, drafts: int, context: int, tokens: int) -> Engine:
    """An engine whose rounds accept two thirds of their drafts at once."""
    pages = 2 + rows * (-(-(context + tokens) // 16) + 2)
    drafter = {"drafter": "ngram", "num_drafts": drafts} if drafts else {"drafter": "none"}
    sizes = {"max_rows": rows, "num_pages": pages, "max_len": context + tokens, "page_size": 16, "lag": 1}
    engine = build_engine(EngineConfig(device="cpu", windows="fixed", **sizes, **drafter)).engine  # type: ignore[arg-type]
    width, right = drafts + 1, 2 * drafts // 3
    header = torch.tensor([right + 1, right, drafts, 0])
    table = torch.cat([header.expand(rows, -1), torch.full((rows, width), 300), torch.zeros(rows, width).long()], dim=1)
    assert table.shape[1] == HEADER + 2 * width
    engine.runner._round = lambda batch, *_: (Verdict(table[: batch.count]), None)  # type: ignore[method-assign]
    engine.runner.rows = lambda count, _: Rows(count, engine.runner.seats.max_places)  # type: ignore[method-assign]
    return engine


def join(engine: Engine, count: int, context: int, max_tokens: int, kind: str) -> list[Request]:
    """Seat requests whose prompts count as read."""
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=max_tokens, ignore_eos=True, detokenize=kind == TEXT)
    requests = [engine.prepare([300] * context, params) for _ in range(count)]
    for request in requests:
        if kind == OUTPUTS:
            request.wait_for_end()
        engine.enqueue(request)
    engine.seat_unread()
    return requests


def measure(engine: Engine, args: argparse.Namespace, max_tokens: int, kind: str) -> tuple[float, float]:
    """Microseconds per row and round: of the step, and of joins and leaves."""
    requests, steps, churn = join(engine, args.rows, args.context, max_tokens, kind), 0.0, 0.0
    for number in itertools.count():
        if number == WARM:
            steps = churn = 0.0
        began = time.thread_time()
        engine.step()
        steps += time.thread_time() - began
        if args.churn:
            began = time.thread_time()
            for request in requests[: args.churn]:
                engine.abort(request)
            requests = [*requests[args.churn :], *join(engine, args.churn, args.context, max_tokens, kind)]
            churn += time.thread_time() - began
        if number == WARM + args.rounds:
            break
    unseat(engine, requests)
    each = 1e6 / (args.rows * args.rounds)
    return steps * each, churn * each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--churn", type=int, default=0, metavar="N", help="requests that end and join in each round")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for name, least in {"rows": 1, "drafts": 0, "context": 1, "rounds": 1, "churn": 0}.items():
        if (given := getattr(args, name)) < least:
            parser.error(f"--{name}: {given} is below {least}")
    max_tokens = (args.rounds + WARM + 8) * (args.drafts + 1)
    with torch.inference_mode():
        try:
            engine = null_engine(args.rows, args.drafts, args.context, max_tokens)
        except ConfigError as error:
            parser.error(f"{error}; each row has --context {args.context} and {max_tokens} tokens of all --rounds")
        for kind in KINDS:
            step, churn = min(measure(engine, args, max_tokens, kind) for _ in range(3))
            print(f"{kind}: {step:.2f} us per row and round, joins and leaves {churn:.2f} us")
        if args.profile:
            with cProfile.Profile() as profile:
                measure(engine, args, max_tokens, OUTPUTS)
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
