"""`peregrine bench sweep`: chains and trees of drafts in one process, on one machine and one set of prompts.

Which shape is best depends on how often drafts are right, what verifying them costs, and how many requests run.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from peregrine.bench.generation import decided, generate, with_rows
from peregrine.bench.prompts import Prompt
from peregrine.engine.output import Output
from peregrine.engine.plan_record import KINDS
from peregrine.errors import ConfigError
from peregrine.llm import LLM
from peregrine.log import style

SWEPT = ("num_drafts", "tree", "windows")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    drafts: tuple[int, ...]  # chains; 0 is plain decoding
    trees: tuple[tuple[int, int, int], ...]  # depth, width, nodes
    prompts: Sequence[Prompt]
    rows: int = 1  # requests at a time
    tokens: int = 64  # per prompt
    temperature: float = 0.0
    repeats: int = 3

    def __post_init__(self) -> None:
        if not self.drafts and not self.trees:
            raise ConfigError("drafts and trees: both are empty; name at least one shape")

    def shapes(self) -> dict[str, dict[str, object]]:
        """The engine options of every shape, by its name."""
        chains: dict[str, dict[str, object]] = {"auto": {}}
        for k in self.drafts:
            chains[f"chain {k}" if k else "plain"] = {"num_drafts": k, "windows": "fixed"}
        return chains | {"tree " + ",".join(map(str, tree)): {"tree": tree} for tree in self.trees}


def run(plan: Plan, options: dict[str, object]) -> dict[str, Any]:
    """Measure every shape on an engine of its own, and return everything as plain values.

    Repeats are passes over all shapes, so that a machine that is busy for a while slows all of them.
    """
    for name in SWEPT:
        if name in options:
            raise ConfigError(f"{name}={options[name]!r}: is what a sweep varies; use --drafts and --trees")
    options, shapes = with_rows(options, plan.rows, "rows"), plan.shapes()
    passes: dict[str, list[Pass]] = {name: [] for name in shapes}
    refused: dict[str, str] = {}
    order = [name for _ in range(plan.repeats) for name in shapes]
    for name in tqdm(order, "shapes", leave=False, disable=None):
        if name in refused:
            continue
        try:
            with LLM(**options | shapes[name]) as llm:  # type: ignore[arg-type]
                passes[name].append(measure(llm, plan))
        except ConfigError as error:
            refused[name] = str(error)
    lines = [
        {"shape": name, "refused": refused[name]} if name in refused else summary(name, passes[name]) for name in shapes
    ]
    best = best_of(lines)
    texts = [each.tokens for several in passes.values() for each in several]
    return {
        "benchmark": "sweep",
        "model": str(options.get("model", "merlin")),
        "rows": plan.rows,
        "prompts": len(plan.prompts),
        "tokens": plan.tokens,
        "temperature": plan.temperature,
        "repeats": plan.repeats,
        "shapes": lines,
        "best": best,
        "tied": tied_with(best, lines),
        "identical": all(tokens == texts[0] for tokens in texts),
    }


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of one shape over all prompts."""

    drafter: str
    tokens_per_s: float
    acceptance: dict[str, Any]  # and rounds by plan, where windows are planned
    tokens: list[list[int]]


def measure(llm: LLM, plan: Plan) -> Pass:
    """Warm up, then time the generation for all prompts."""
    asked = [prompt if isinstance(prompt, str) else llm.encode_chat(prompt) for prompt in plan.prompts]
    generate(llm, asked[: plan.rows], plan.tokens, plan.temperature)
    llm.drop_cached()  # so that the prefix cache does not help
    before = Counter(llm.plans)
    outputs, speed = generate(llm, asked, plan.tokens, plan.temperature)
    failed = [output.error for output in outputs if output.error is not None]
    if failed:
        raise ConfigError(f"{len(failed)} of {len(outputs)} prompts failed, the first with: {failed[0]}")
    told = acceptance_of(outputs) | {"plans": Counter(llm.plans) - before}
    return Pass(decided(llm, "drafter"), speed, told, [output.token_ids for output in outputs])


def summary(name: str, passes: Sequence[Pass]) -> dict[str, Any]:
    """A shape's line; acceptance is that of the first pass, and of planned windows (auto) differs from pass to pass."""
    speeds = [each.tokens_per_s for each in passes]
    return {
        "shape": name,
        "drafter": passes[0].drafter,
        "tokens_per_s": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
        **passes[0].acceptance,
    }


def acceptance_of(outputs: Sequence[Output]) -> dict[str, Any]:
    """Tokens per round, and the share of all rounds whose draft was right at each depth."""
    depth = max(len(output.stats.accept_histogram) for output in outputs)
    histogram = [0] * depth
    for output in outputs:
        for correct, rounds in enumerate(output.stats.accept_histogram):
            histogram[correct] += rounds
    rounds = sum(histogram)
    return {
        "rounds": rounds,
        "accept_length": sum(output.stats.accepted for output in outputs) / rounds,
        "by_position": [sum(histogram[place:]) / rounds for place in range(1, depth)],
    }


def best_of(lines: Sequence[dict[str, Any]]) -> str | None:
    """The shape with the highest median; None if all were refused."""
    ran = [line for line in lines if "refused" not in line]
    return str(max(ran, key=lambda line: float(line["tokens_per_s"]))["shape"]) if ran else None


def tied_with(best: str | None, lines: Sequence[dict[str, Any]]) -> list[str]:
    """Shapes whose fastest pass reaches the best one's slowest: the repeats do not separate them."""
    slowest = next((line["slowest"] for line in lines if line["shape"] == best), None)
    ran = [line for line in lines if "refused" not in line and line["shape"] != best]
    return [str(line["shape"]) for line in ran if line["fastest"] >= slowest]


def show(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [
        f"model {result['model']}, {result['prompts']} prompts of {result['tokens']} tokens, "
        f"{result['rows']} at a time, {result['repeats']} repeats",
        f"{'shape':>14} {'tok/s':>8} {'spread':>16} {'accept':>7}  right by position",
    ]
    for line in result["shapes"]:
        if "refused" in line:
            lines.append(f"{line['shape']:>14} refused: {line['refused']}")
            continue
        spread = f"{line['slowest']:.1f} .. {line['fastest']:.1f}"
        positions = " ".join(f"{share:.2f}" for share in line["by_position"])
        row = f"{line['shape']:>14} {line['tokens_per_s']:8.1f} {spread:>16} {line['accept_length']:7.2f}  {positions}"
        lines.append(style(row, "bold") if line["shape"] == result["best"] else row)
        if plans := line["plans"]:
            shares = ", ".join(f"{kind} {plans[kind] / sum(plans.values()):.0%}" for kind in KINDS if kind in plans)
            lines.append(f"{'':>14} rounds: {shares}")
    if result["best"] is not None:
        lines.append(verdict(result))
    lines.append(f"identical tokens: {'yes' if result['identical'] else 'NO'}")
    return "\n".join(lines)


def verdict(result: dict[str, Any]) -> str:
    """Which shape is best, by how much, and which others are within the spread."""
    by_name = {line["shape"]: line for line in result["shapes"]}
    text = f"best for this machine and these prompts: {result['best']}"
    plain = by_name.get("plain", {})
    if plain.get("tokens_per_s") and result["best"] != "plain":
        text += f", {by_name[result['best']]['tokens_per_s'] / plain['tokens_per_s']:.2f}x plain decoding"
    if result["tied"]:
        text += f"; within the spread of repeats it equals {', '.join(result['tied'])}"
    return text
