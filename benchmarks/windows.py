"""Planned windows against every fixed number of drafts: tokens/s of each as a ratio of the best, and of plain decoding.

Every cell is a kind of text and a number of requests that run together. All engines take turns in one process, each
turn in another order, so a machine that is busy for a while slows all of them. Every turn has prompts of its own: of a
single text, one or another number of drafts is the best by chance. So a cell has as many requests as any other, and one
of fewer rows has more turns. Which of several engines was built first makes some of them half a percent faster: before
half of the turns they are built in one order, and before the others in the other. A ratio is that of the time of all
turns, and `spread` says between which values half of the turns lie; `middle` is the ratio in the middle turn, which a
turn that something else held up does not move. Plain decoding is measured twice, by two engines: what they differ by
(`plain_again`) is noise. Planned windows are those of an engine that has run for a while: before its turns it has had
`--learn` requests alone, since the first round of every size is recorded, and costs are compared now and then.

    python benchmarks/windows.py                                      # all cells; 30 to 60 minutes on two cores
    python benchmarks/windows.py --rows 1 8 --texts story --requests 24
    python benchmarks/windows.py --first-text 1000                    # other texts
    python benchmarks/windows.py --clock cpu                          # processor time, for a machine that is not quiet
"""

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

# Where torch's allocator is mimalloc, memory of several engines is in large pages or not by chance, which is worth 1 %.
os.environ.setdefault("MIMALLOC_ARENA_RESERVE", "4GiB")

from peregrine import LLM, SamplingParams
from peregrine.engine.request import Output

STORIES = (
    "Once upon a time, there was a little {animal} who",
    "One day, {name} and {other} went to the {place}. They saw",
    "The old man sat by the {place} and thought about",
    "{name} had a big red {thing}. Every morning",
    "Deep in the {place}, a {animal} found a {thing} and",
)
QUESTIONS = (
    "Tell me a story about a brave {animal}.",
    "What did {name} find in the {place}?",
    "Who lives in the old house near the {place}?",
    "Why was the {animal} sad, and who helped it?",
    "Write a short poem about a {thing}.",
)
WORDS = {
    "animal": ("bird", "cat", "fox", "bear", "frog", "horse", "rabbit", "dragon"),
    "name": ("Tom", "Lily", "Ben", "Mia", "Max", "Sara", "Sam", "Anna"),
    "other": ("his sister", "a friend", "the dog", "Grandma", "her brother"),
    "place": ("park", "river", "garden", "forest", "lake", "beach", "farm", "mountain"),
    "thing": ("ball", "box", "kite", "boat", "hat", "bell", "lamp", "key"),
}
PLAIN, AGAIN, AUTO = "0", "0 again", "auto"
LEARNT = 5000  # the first of the texts from which "auto" learns
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def prompts_of(llm: LLM, text: str, count: int, turn: int) -> list[list[int]]:
    """Token ids of `count` prompts of one kind of text, other ones in every turn."""
    dice = random.Random(turn)
    if text == "random":
        return [[dice.randrange(300, 8000) for _ in range(24)] for _ in range(count)]
    lines = [dice.choice(STORIES if text == "story" else QUESTIONS) for _ in range(count)]
    filled = [line.format(**{name: dice.choice(words) for name, words in WORDS.items()}) for line in lines]
    if text == "story":
        return [llm.encode(prompt) for prompt in filled]
    return [llm.encode_chat([{"role": "user", "content": question}]) for question in filled]


@dataclass
class Cell:
    """A kind of text and a number of requests that run together, and what every engine did in every turn."""

    text: str
    rows: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    won: Counter[str] = field(default_factory=Counter)  # tokens that rounds accepted, by engine
    rounds: Counter[str] = field(default_factory=Counter)
    identical: bool = True

    def run(self, llm: LLM, turn: int, args: argparse.Namespace) -> tuple[list[Output], float]:
        """The outputs of one turn, and the seconds that it took."""
        clock = CLOCKS[args.clock]
        temperature = 1.0 if self.text == "random" else args.temperature  # greedy text of random words soon repeats
        params = SamplingParams(temperature=temperature, seed=turn, max_tokens=args.tokens, ignore_eos=True)
        prompts = prompts_of(llm, self.text, self.rows, args.first_text + turn)
        begun = clock()
        outputs = llm.generate(prompts, params, progress=False)
        return outputs, clock() - begun

    def measure(self, engines: dict[str, LLM], turns: range, args: argparse.Namespace) -> None:
        """Add these turns, after those from which "auto" learns; the first ones are not timed."""
        for turn in range(-(-args.learn // self.rows)):
            self.run(engines[AUTO], LEARNT + turns.start + turn, args)
        for turn in turns:
            names, texts = list(engines), {}
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                outputs, took = self.run(engines[name], turn, args)
                texts[name] = [output.token_ids for output in outputs]
                if turn - turns.start >= -(-args.warm // self.rows):
                    self.seconds[name].append(took)
                    self.won[name] += sum(output.stats.accepted for output in outputs)
                    self.rounds[name] += sum(output.stats.rounds for output in outputs)
            self.identical &= all(made == texts[PLAIN] for made in texts.values())

    def result(self, num_tokens: int) -> dict[str, object]:
        """Tokens per second of every engine, and how "auto" compares with the best of the others."""
        totals = {name: sum(each) for name, each in self.seconds.items()}
        fixed = [name for name in totals if name not in (AUTO, AGAIN)]
        best, seconds, own = min(fixed, key=totals.__getitem__), self.seconds, self.seconds[AUTO]
        tokens = self.rows * num_tokens * len(own)
        return {
            "text": self.text,
            "rows": self.rows,
            "tokens_per_s": {name: round(tokens / total, 1) for name, total in totals.items()},
            "tokens_per_round": {name: round(self.won[name] / count, 2) for name, count in self.rounds.items()},
            "best_fixed": best,
            "auto_of_best_fixed": round(totals[best] / totals[AUTO], 3),
            "auto_of_plain": round(totals[PLAIN] / totals[AUTO], 3),
            "plain_again": round(totals[PLAIN] / totals[AGAIN], 3),
            "spread": quartiles(seconds[best], own)[::2],
            "middle": min(quartiles(seconds[name], own)[1] for name in fixed),
            "plain_again_middle": quartiles(seconds[PLAIN], seconds[AGAIN])[1],
            "identical": self.identical,
        }


def quartiles(seconds: list[float], others: list[float]) -> list[float]:
    """Three, of the ratios of one engine's times to another's, turn by turn."""
    ratios = [one / other for one, other in zip(seconds, others, strict=True)]
    found = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return [round(value, 3) for value in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="merlin")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--texts", nargs="+", default=["story", "chat", "random"], choices=["story", "chat", "random"])
    parser.add_argument("--fixed", type=int, nargs="+", default=[0, 1, 2, 3, 5], help="fixed numbers of drafts")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=64, help="of every cell, as many at a time as it has rows")
    parser.add_argument("--warm", type=int, default=32, help="requests before those that are timed: sizes are recorded")
    parser.add_argument("--learn", type=int, default=96, help='requests that "auto" has before, alone: it learns costs')
    parser.add_argument("--first-text", type=int, default=0, help="number of the first turn's texts")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name in ("rows", "tokens", "requests", "warm"):
        given = getattr(args, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            parser.error(f"--{name}: {given} is not above 0")
    if args.learn < 0:
        parser.error(f"--learn: {args.learn} is below 0")
    if 0 not in args.fixed:
        parser.error(f"--fixed: {args.fixed} lacks 0, plain decoding, which all are compared with")
    cells = [Cell(text, rows) for text in args.texts for rows in args.rows]
    shapes: dict[str, dict[str, object]] = {str(k): {"num_drafts": k, "windows": "fixed"} for k in sorted(args.fixed)}
    shapes |= {AGAIN: shapes[PLAIN], AUTO: {}}
    sizes = {"max_rows": max(args.rows), "num_pages": max(args.rows) * (args.tokens + 256) // 8}
    for half, names in enumerate((list(shapes), list(reversed(shapes)))):
        with ExitStack() as opened:
            engines = {name: opened.enter_context(LLM(args.model, **sizes, **shapes[name])) for name in names}
            gc.collect()
            gc.freeze()  # as the server does: a collection takes as long as a turn, and falls on any engine
            for cell in cells:
                turns = -(-args.warm // cell.rows) + -(-args.requests // (2 * cell.rows))
                cell.measure(engines, range(half * turns, (1 + half) * turns), args)
                if half:
                    print(json.dumps(cell.result(args.tokens)), flush=True)
            planner = engines[AUTO].engine.runner.planner
            if half and planner is not None:
                print(f"calibration error {planner.calibration_error:.3f}, costs {json.dumps(planner.costs.to_json())}")
    results = [cell.result(args.tokens) for cell in cells]
    least, middle = (min(float(str(result[name])) for result in results) for name in ("auto_of_best_fixed", "middle"))
    print(f"least ratio to the best fixed setting {least:.3f}, in the middle turn {middle:.3f}")
    if args.out:
        args.out.write_text(json.dumps({"benchmark": "windows", "clock": args.clock, "cells": results}, indent=1))


if __name__ == "__main__":
    main()
