"""Requests that come one after the other, in one process without HTTP: time to first token and per further token.

A case keeps so many requests in flight (--concurrency), or lets them come at random times (--rate, Poisson). Prompts
are random token ids, every output has its full length, and tokens are taken as they come, as a server's streams are.
The definitions are those of `peregrine bench serve`.

    python benchmarks/arrivals.py --concurrency 1 4 --input-len 64 --output-len 32 --requests 16    # merlin, any CPU
    python benchmarks/arrivals.py --model shape:llama-3.1-8b --drafter none --concurrency 64 256 --json FILE
    python benchmarks/arrivals.py --model shape:llama-3.1-8b --drafter eagle3 --accept 3 --rate 20 --requests 256
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from random import Random

from tqdm import tqdm

from peregrine.bench.batches import Load, make_prompts
from peregrine.bench.generation import decided
from peregrine.bench.serve import Case, arrivals
from peregrine.bench.serve_metrics import Exchange, Limits, summarise
from peregrine.cli.flags import new_file
from peregrine.engine.output import Delta
from peregrine.errors import EngineFault, PeregrineError
from peregrine.llm import LLM
from peregrine.sampling import SamplingParams


def measured(llm: LLM, prompts: list[list[int]], output_len: int, case: Case, seed: int) -> list[Exchange]:
    """Every request as its reader saw it."""
    room, ended = threading.Semaphore(case.concurrency), threading.Semaphore(0)
    exchanges: dict[int, Exchange] = {}
    due = None if case.rate is None else arrivals(case.rate, len(prompts), seed)

    def reader(number: int, sent: float) -> Callable[[Delta | EngineFault], None]:
        times: list[float] = []

        def take(delta: Delta | EngineFault) -> None:
            failed = str(delta) if isinstance(delta, EngineFault) else None
            if isinstance(delta, Delta):
                if delta.token_ids:
                    times.append(time.perf_counter())
                if delta.output is None:
                    return
                failed = delta.output.error
            whole = Exchange(sent, tuple(times), output_len, len(prompts[number]), True, 0.0)
            exchanges[number] = whole if failed is None else Exchange.failed(sent, failed)
            bar.update()
            room.release()
            ended.release()

        return take

    start = time.perf_counter()
    with tqdm(total=len(prompts), desc=str(case), unit="request", leave=False, disable=None) as bar:
        for number, prompt in enumerate(prompts):
            if due is None:
                room.acquire()
            else:
                time.sleep(max(0.0, start + due[number] - time.perf_counter()))
            params = SamplingParams(
                temperature=0.0, seed=seed + number, max_tokens=output_len, ignore_eos=True, detokenize=False
            )
            llm.loop.submit(prompt, params, reader(number, time.perf_counter()))
        for _ in prompts:
            ended.acquire()
    return [exchanges[number] for number in range(len(prompts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="merlin")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--accept", type=float, help="simulated tokens per round, for models without trained heads")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[], metavar="N", help="requests in flight")
    parser.add_argument("--rate", type=float, nargs="*", default=[], metavar="R", help="arrivals per second")
    parser.add_argument("--requests", type=int, help="of each case; default: twice those in flight, 64 for a rate")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=new_file, metavar="FILE")
    args = parser.parse_args()
    for name in ("concurrency", "rate", "requests", "input_len", "output_len"):
        given = getattr(args, name)
        if any(value <= 0 for value in (given if isinstance(given, list) else [given]) if value is not None):
            parser.error(f"--{name.replace('_', '-')}: {given} is not above 0")
    options: dict[str, object] = {"model": args.model, "drafter": args.drafter}
    options |= {} if args.accept is None else {"simulate_accept": args.accept}
    cases = [Case(n) for n in args.concurrency or ([] if args.rate else [1])] + [Case(1, rate) for rate in args.rate]
    lines = []
    with LLM(**options) as llm:  # type: ignore[arg-type]
        for case in cases:
            count = args.requests or (64 if case.rate else 2 * case.concurrency)
            load = Load(count, args.input_len, args.output_len, seed=Random(f"{args.seed} {case}").randrange(2**32))
            prompts = make_prompts(llm, load)
            measured(llm, prompts[:2], 8, Case(2), args.seed)
            llm.drop_cached()
            start = time.perf_counter()
            exchanges = measured(llm, prompts, args.output_len, case, args.seed)
            line = summarise(exchanges, time.perf_counter() - start, Limits())
            lines.append({"case": str(case)} | line)
            print(
                f"{case}: {count} requests, {line['output_tokens_per_s']:.0f} tokens/s; {line['errors'] or 'no errors'}"
            )
            for name in ("ttft_ms", "tpot_ms", "itl_ms"):
                print(f"  {name}", {key: round(value, 2) for key, value in (line[name] or {}).items()}, flush=True)  # type: ignore[attr-defined]
        facts = {"model": args.model, "drafter": decided(llm, "drafter"), "device": decided(llm, "device")}
        sizes = {"input_len": args.input_len, "output_len": args.output_len, "max_rows": llm.engine.policy.max_rows}
        result = facts | sizes | {"accept": args.accept, "cases": lines}
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except PeregrineError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
