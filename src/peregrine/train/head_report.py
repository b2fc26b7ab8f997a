"""What came of a head: report.json, and pictures where matplotlib is installed (the extra `train`)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peregrine.log import logger
from peregrine.train.acceptance import ALL
from peregrine.train.checkpoint import Facts, read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT, LOSSES, ACCEPTANCE = "report.json", "losses.png", "acceptance.png"


def write_report(folder: Path, run: Path, facts: Facts) -> None:
    """Writes the facts with the run's log beside the head, and draws both."""
    log = [line for line in read_log(run) if line["kind"] == "train"]
    thinned = log[:: max(1, len(log) // 200)]
    report = {**facts, "training": thinned + ([log[-1]] if log and thinned[-1] is not log[-1] else [])}
    (folder / REPORT).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        logger.warning("no pictures were drawn: matplotlib is missing; install peregrine[train]")
        return
    draw_losses(log, folder / LOSSES)
    if facts.get("acceptance"):
        draw_acceptance(facts["acceptance"], facts.get("untrained") or [], folder / ACCEPTANCE)


def draw_losses(log: Sequence[Facts], picture: Path) -> None:
    """Loss and greedy agreement of every unrolled step, by training step."""
    figure = new_figure(11)
    left, right = panels(figure)
    steps = [line["step"] for line in log]
    for step in range(len(log[-1]["losses"])):
        left.plot(steps, [line["losses"][step] for line in log], label=f"draft {step + 1}", linewidth=1)
        right.plot(steps, [line["agreement"][step] for line in log], label=f"draft {step + 1}", linewidth=1)
    left.set(xlabel="step", ylabel="cross-entropy with the target, nats")
    right.set(xlabel="step", ylabel="agreement with the target's likeliest token", ylim=(0, 1))
    right.legend()
    figure.savefig(picture, dpi=110)


def draw_acceptance(trained: Sequence[Facts], untrained: Sequence[Facts], picture: Path) -> None:
    """The share of right drafts by position, of those whose earlier drafts were right."""
    figure = new_figure(7)
    axes = figure.add_subplot()
    for entries, word, line in ((trained, "", "-"), (untrained, "untrained, ", ":")):
        for entry in entries:
            if entry["source"] == ALL and entry["by_position"]:
                places = range(1, len(entry["by_position"]) + 1)
                kind = "greedy" if entry["temperature"] == 0 else f"T = {entry['temperature']:g}"
                length = f"{entry['accept_length']:.2f} tokens a round"
                label = f"{word}{entry['shape']}, {kind}: {length}"
                axes.plot(places, entry["by_position"], line, marker="o", markersize=3, label=label)
    axes.set(xlabel="draft", ylabel="share accepted", ylim=(0, 1))
    if axes.lines:
        axes.legend(fontsize=7)
    figure.savefig(picture, dpi=110)


def new_figure(width: float) -> "Figure":
    """An empty picture."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, 4.5), layout="constrained")


def panels(figure: "Figure") -> "tuple[Axes, Axes]":
    """Two places side by side."""
    axes: Any = figure.subplots(1, 2)
    return axes[0], axes[1]
