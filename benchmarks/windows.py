"""Planned windows against every fixed number of drafts: tokens/s of each as a ratio of the best, and of plain decoding.

Every cell is a kind of text and a number of requests that run together. All settings take turns in one process, each
turn in another order, so a machine that is busy for a while slows all of them. They take turns in one engine, too:
engines that are built alike differ by up to a tenth, by where their memory happens to be. For a turn with a fixed
number of drafts its planner gives way to one that always wants so many. `--apart` builds an engine for each setting
instead. Plain decoding is also measured in an engine of its own that has no drafter (`plain_apart`).

Every turn has prompts of its own: of a single text, one or another number of drafts is the best by chance. So a cell
has as many requests as any other, and one of fewer rows has more turns. A ratio is that of the time of all turns, and
`spread` says between which values half of the turns lie; `middle` is the ratio in the middle turn, which a turn that
something else held up does not move. Plain decoding has two turns where others have one: what they differ by
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
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Where torch's allocator is mimalloc, memory of several engines is in large pages or not by chance, which is worth 1 %.
os.environ.setdefault("MIMALLOC_ARENA_RESERVE", "4GiB")

from peregrine import LLM, SamplingParams
from peregrine.engine.output import Output
from peregrine.engine.request import Request
from peregrine.engine.round_times import FixedPlan
from peregrine.engine.steady import SteadyPlan

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
PLAIN, AGAIN, APART, AUTO = "0", "0 again", "0 apart", "auto"
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


class RestingPlan(FixedPlan):
    """No drafts: the drafter is not called."""

    rests = True

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__([1] * len(requests), 0)
        self.requests, self.drafted, self.offered = tuple(requests), list[int](), [0] * len(requests)


class Always:
    """A planner that always wants as many drafts for every row, and learns nothing."""

    catches_up = False

    def __init__(self, drafts: int) -> None:
        self.drafts, self._requests = drafts, list[Request]()
        self._again: RestingPlan | SteadyPlan | None = None

    def rests_with(self, rows: int) -> bool:
        return not self.drafts

    def repeat(self, requests: list[Request]) -> RestingPlan | SteadyPlan | None:
        return self._again if requests == self._requests else None

    def plan(self, requests: list[Request], offered: Sequence[int]) -> RestingPlan | SteadyPlan:
        """The drafts that there are; rounds after it have them all."""
        self._requests, drafts = requests.copy(), self.drafts
        if not drafts:
            self._again = RestingPlan(requests)
            return self._again
        self._again = SteadyPlan(requests, [1 + drafts] * len(requests), drafts)
        return SteadyPlan(requests, [1 + min(drafts, count) for count in offered], drafts)

    def learn(self, *_: object) -> None:
        pass


class Setting(NamedTuple):
    """An engine and what plans its rounds; None: what it was built with."""

    llm: LLM
    planner: Any = None

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[Output]:
        runner = self.llm.engine.runner
        own = runner.planner
        try:
            runner.planner = self.planner or own
            return self.llm.generate(prompts, params, progress=False)
        finally:
            runner.planner = own


@dataclass
class Cell:
    """A kind of text and a number of requests that run together, and what every setting did in every turn."""

    text: str
    rows: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    won: Counter[str] = field(default_factory=Counter)  # tokens that rounds accepted, by setting
    rounds: Counter[str] = field(default_factory=Counter)
    identical: bool = True

    def run(self, setting: Setting, turn: int, args: argparse.Namespace) -> tuple[list[Output], float]:
        """The outputs of one turn, and the seconds that it took."""
        clock = CLOCKS[args.clock]
        temperature = 1.0 if self.text == "random" else args.temperature  # greedy text of random words soon repeats
        params = SamplingParams(temperature=temperature, seed=turn, max_tokens=args.tokens, ignore_eos=True)
        prompts = prompts_of(setting.llm, self.text, self.rows, args.first_text + turn)
        begun = clock()
        outputs = setting.generate(prompts, params)
        return outputs, clock() - begun

    def measure(self, settings: dict[str, Setting], args: argparse.Namespace) -> None:
        """All turns, after those from which "auto" learns; the first ones are not timed."""
        for turn in range(-(-args.learn // self.rows)):
            self.run(settings[AUTO], LEARNT + turn, args)
        warm, self.seconds = -(-args.warm // self.rows), {name: [] for name in settings}
        for turn in range(warm + -(-args.requests // self.rows)):
            texts, names = {}, list(settings)
            random.Random(turn).shuffle(names)
            for name in names:
                outputs, took = self.run(settings[name], turn, args)
                texts[name] = [output.token_ids for output in outputs]
                if turn >= warm:
                    self.seconds[name].append(took)
                    self.won[name] += sum(output.stats.accepted for output in outputs)
                    self.rounds[name] += sum(output.stats.rounds for output in outputs)
            self.identical &= all(made == texts[PLAIN] for made in texts.values())

    def result(self, num_tokens: int) -> dict[str, object]:
        """Tokens per second of every setting, and how "auto" compares with the best of the others."""
        totals = {name: sum(each) for name, each in self.seconds.items()}
        fixed = [name for name in totals if name not in (AUTO, AGAIN, APART)]
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
            "plain_apart": round(totals[PLAIN] / totals[APART], 3),
            "spread": quartiles(seconds[best], own)[::2],
            "middle": min(quartiles(seconds[name], own)[1] for name in fixed),
            "plain_again_middle": quartiles(seconds[PLAIN], seconds[AGAIN])[1],
            "identical": self.identical,
        }


def quartiles(seconds: list[float], others: list[float]) -> list[float]:
    """Three, of the ratios of one setting's times to another's, turn by turn."""
    ratios = [one / other for one, other in zip(seconds, others, strict=True)]
    found = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return [round(value, 3) for value in found]


def settings_of(args: argparse.Namespace, opened: ExitStack) -> dict[str, Setting]:
    """What takes turns, by name, in engines that end with `opened`."""
    most = max(args.rows)
    sizes = {"max_rows": most, "num_pages": most * (args.tokens + 256) // 8, "prefix_cache": False}

    def engine(**options: Any) -> LLM:
        return opened.enter_context(LLM(args.model, **sizes, **options))

    auto = engine()
    names = {PLAIN: 0, AGAIN: 0} | {str(drafts): drafts for drafts in sorted(args.fixed)}
    fixed = {
        name: Setting(engine(num_drafts=drafts, windows="fixed")) if args.apart else Setting(auto, Always(drafts))
        for name, drafts in names.items()
    }
    return fixed | {APART: Setting(engine(num_drafts=0)), AUTO: Setting(auto)}


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
    parser.add_argument("--apart", action="store_true", help="an engine for each setting")
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
    results = []
    for rows in args.rows:
        with ExitStack() as opened:
            settings = settings_of(args, opened)
            gc.collect()
            gc.freeze()  # as the server does: a collection takes as long as a turn, and falls on any setting
            for text in args.texts:
                cell = Cell(text, rows)
                cell.measure(settings, args)
                results.append(cell.result(args.tokens))
                print(json.dumps(results[-1]), flush=True)
            planner = settings[AUTO].llm.engine.runner.planner
            if planner is not None:
                print(f"calibration error {planner.calibration_error:.3f}, costs {json.dumps(planner.costs.to_json())}")
    least, middle = (min(float(str(result[name])) for result in results) for name in ("auto_of_best_fixed", "middle"))
    print(f"least ratio to the best fixed setting {least:.3f}, in the middle turn {middle:.3f}")
    if args.out:
        args.out.write_text(json.dumps({"benchmark": "windows", "clock": args.clock, "cells": results}, indent=1))


if __name__ == "__main__":
    main()
