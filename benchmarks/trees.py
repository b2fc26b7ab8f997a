"""Chains, trees, and what pays, asked for by requests on one engine: tokens/s, tokens a round, and rounds by plan.

Kinds take turns, so a machine that is busy for a while slows all of them; a ratio is the median over turns of ratios
within one turn. All kinds must give the same tokens.

    python benchmarks/trees.py                                # merlin, one request; half a minute on two cores
    python benchmarks/trees.py --model smollm2 --rows 1 2 --temperature 1
"""

import argparse
import statistics
import time
from collections import Counter
from dataclasses import replace

from peregrine import LLM, SamplingParams
from peregrine.bench.generation import first_prompts

KINDS = ("chain", "auto", "tree")


def measure(llm: LLM, rows: int, args: argparse.Namespace) -> bool:
    """Print a line for each kind; False if their tokens differ."""
    prompts = [llm.encode(prompt) for prompt in first_prompts(rows)]
    params = SamplingParams(temperature=args.temperature, seed=1, max_tokens=args.tokens, ignore_eos=True)
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    texts, accepted = {}, {}
    plans: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for turn in range(1 + args.turns):
        for kind in KINDS:
            before, begun = Counter(llm.plans), time.perf_counter()
            outputs = llm.generate(prompts, replace(params, tree=kind), progress=False)
            if turn:  # the first one warms up
                speeds[kind].append(sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - begun))
                plans[kind] += Counter(llm.plans) - before
            texts[kind] = [o.token_ids for o in outputs]
            accepted[kind] = sum(o.stats.accepted for o in outputs) / sum(o.stats.rounds for o in outputs)
    for kind in KINDS:
        ratio = statistics.median(one / chain for one, chain in zip(speeds[kind], speeds["chain"], strict=True))
        shares = ", ".join(f"{name} {count / plans[kind].total():.0%}" for name, count in plans[kind].items())
        print(
            f"{rows:4} rows  {kind:>5}  {statistics.median(speeds[kind]):7.1f} tokens/s  {ratio:.3f} of chains  "
            f"{accepted[kind]:.2f} tokens a round  rounds: {shares}",
            flush=True,
        )
    return texts["chain"] == texts["auto"] == texts["tree"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="merlin")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="requests at a time")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    same = True
    for rows in args.rows:
        with LLM(args.model, max_rows=rows) as llm:
            same &= measure(llm, rows, args)
    raise SystemExit(0 if same else "tokens differ: a defect")


if __name__ == "__main__":
    main()
