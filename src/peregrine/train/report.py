"""The report on a head: acceptance on held-out prompts, report.json, and plots if matplotlib is installed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from peregrine.engine.output import Output
from peregrine.llm import LLM
from peregrine.log import logger
from peregrine.sampling import SamplingParams
from peregrine.train.options import EAGLE3, Facts
from peregrine.train.prompts import Prompt
from peregrine.train.run import read_log

REPORT, LOSSES, ACCEPTANCE = "report.json", "losses.png", "acceptance.png"
# name -> engine options
SHAPES: dict[str, dict[str, object]] = {
    "chain of 3": {"num_drafts": 3, "windows": "fixed"},
    "chain of 5": {"num_drafts": 5, "windows": "fixed"},
    "chain of 7": {"num_drafts": 7, "windows": "fixed"},
    "tree 5, 4, 24": {"tree": (5, 4, 24)},
}
DEPTHS = {"chain of 3": 3, "chain of 5": 5, "chain of 7": 7, "tree 5, 4, 24": 5}
LONGEST = "chain of 7"
TEMPERATURES = (0.0, 1.0)
ALL = "all"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out prompts and how to continue them."""

    prompts: Sequence[Prompt]
    max_tokens: int
    rows: int
    device: str
    dtype: str


def shapes_of(kind: str, most: int) -> list[str]:
    """The shapes that a head of this kind can draft, which was trained for `most` drafts."""
    if kind == EAGLE3:
        return [name for name in SHAPES if name != LONGEST]
    fitting = [name for name, depth in DEPTHS.items() if depth <= most]
    return fitting or list(DEPTHS)[:1]


def measure(
    target: Path, drafter: Path, evaluation: Evaluation, shapes: Sequence[str]
) -> tuple[list[Facts], list[Output]]:
    """Acceptance of the drafter in each shape, greedy and at temperature 1, by source and over all prompts.

    The outputs are those at temperature 1.
    """
    facts: list[Facts] = []
    outputs: list[Output] = []
    prompts, max_tokens = [prompt.tokens for prompt in evaluation.prompts], evaluation.max_tokens
    with tqdm(total=len(shapes) * len(TEMPERATURES) * len(prompts), desc="evaluate", unit=" prompts") as bar:
        for shape in shapes:
            llm = LLM(
                str(target),
                drafter=str(drafter.resolve()),
                max_rows=evaluation.rows,
                max_len=max(map(len, prompts)) + max_tokens,
                device=evaluation.device,
                dtype=evaluation.dtype,
                **SHAPES[shape],
            )
            with llm:
                for temperature in TEMPERATURES:
                    params = [
                        SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, detokenize=False)
                        for seed in range(len(prompts))
                    ]
                    outputs = llm.generate(prompts, params, progress=False)
                    bar.update(len(outputs))
                    facts += summarise(shape, temperature, evaluation.prompts, outputs)
    return facts, outputs


def summarise(shape: str, temperature: float, prompts: Sequence[Prompt], outputs: Sequence[Output]) -> list[Facts]:
    """One entry over all prompts, and one for each source if there are several."""
    names = list(dict.fromkeys(prompt.source for prompt in prompts))
    entries = []
    for name in [ALL, *names] if len(names) > 1 else [ALL]:
        chosen = [o.stats for p, o in zip(prompts, outputs, strict=True) if name in (ALL, p.source)]
        accepted = sum(stats.accepted for stats in chosen)
        entries.append(
            {
                "shape": shape,
                "temperature": temperature,
                "source": name,
                "prompts": len(chosen),
                "tokens": accepted,
                "accept_length": accepted / max(1, sum(stats.rounds for stats in chosen)),
                "by_position": by_position([stats.accept_histogram for stats in chosen]),
            }
        )
    return entries


def by_position(histograms: Sequence[Sequence[int]]) -> list[float]:
    """Of the rounds whose earlier drafts were all accepted, the share whose draft number i was accepted too."""
    longest = max(map(len, histograms), default=0)
    rounds = [sum(h[i] for h in histograms if i < len(h)) for i in range(longest)]
    reached = [sum(rounds[i:]) for i in range(longest)]  # rounds with at least i accepted drafts
    return [reached[i + 1] / reached[i] for i in range(longest - 1)]


def table(facts: Sequence[Facts]) -> str:
    """The entries as lines of text."""
    lines = [f"{'drafts':<16}{'T':>4}{'source':>24}{'accept':>9}  by position"]
    for entry in facts:
        positions = " ".join(f"{share:.2f}" for share in entry["by_position"])
        lines.append(
            f"{entry['shape']:<16}{entry['temperature']:>4g}{entry['source']:>24}"
            f"{entry['accept_length']:>9.2f}  {positions}"
        )
    return "\n".join(lines)


def calibration_table(entries: Sequence[Facts]) -> str:
    """How sure the head was and how often it was right, as lines of text, with the mean error of its confidence."""
    lines = [f"{'confidence':<12}{'agrees':>8}{'greedy':>8}{'drafts':>9}"]
    lines += [f"{e['confidence']:<12.3f}{e['agrees']:>8.3f}{e['greedy']:>8.3f}{e['drafts']:>9}" for e in entries]
    total = sum(entry["drafts"] for entry in entries)
    error = sum(entry["drafts"] * abs(entry["confidence"] - entry["agrees"]) for entry in entries) / max(1, total)
    return "\n".join([*lines, f"mean error of the confidence: {error:.3f}"])


def write_report(folder: Path, run: Path, facts: Facts) -> None:
    """Write report.json (the facts, and at most about 200 lines of the run's log) and plot both."""
    log = read_log(run, "train")
    thinned = log[:: max(1, len(log) // 200)]
    report = {**facts, "training": thinned + ([log[-1]] if log and thinned[-1] is not log[-1] else [])}
    (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        logger.warning("no pictures were drawn: matplotlib is not installed; run: pip install matplotlib")
        return
    plot_losses(log, folder / LOSSES)
    if "acceptance" in facts:
        plot_acceptance(facts["acceptance"], facts["untrained"], folder / ACCEPTANCE)


def plot_losses(log: Sequence[Facts], picture: Path) -> None:
    """Loss and greedy agreement of every unrolled step, by training step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [line["step"] for line in log]
    for axes, name in ((left, "losses"), (right, "agreement")):
        for draft in range(len(log[-1][name])):
            axes.plot(steps, [line[name][draft] for line in log], label=f"draft {draft + 1}", linewidth=1)
    left.set(xlabel="step", ylabel="cross-entropy with the target, nats")
    right.set(xlabel="step", ylabel="agreement with the target's likeliest token", ylim=(0, 1))
    right.legend()
    figure.savefig(picture, dpi=110)


def plot_acceptance(trained: Sequence[Facts], untrained: Sequence[Facts], picture: Path) -> None:
    """Acceptance by draft position (see `by_position`), over all prompts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for entries, word, line in ((trained, "", "-"), (untrained, "untrained, ", ":")):
        for entry in entries:
            if entry["source"] == ALL and entry["by_position"]:
                places = range(1, len(entry["by_position"]) + 1)
                kind = "greedy" if entry["temperature"] == 0 else f"T = {entry['temperature']:g}"
                label = f"{word}{entry['shape']}, {kind}: {entry['accept_length']:.2f} tokens per round"
                axes.plot(places, entry["by_position"], line, marker="o", markersize=3, label=label)
    axes.set(xlabel="draft", ylabel="share accepted", ylim=(0, 1))
    if axes.lines:
        axes.legend(fontsize=7)
    figure.savefig(picture, dpi=110)
