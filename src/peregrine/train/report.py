"""What a run looked like: its losses by step, as a picture. Needs matplotlib (the extra `train`)."""

from pathlib import Path

from peregrine.errors import ConfigError
from peregrine.train.checkpoint import read_log


def plot_losses(run: Path, picture: Path) -> None:
    """Draws the run's training loss and its held-out loss by source into a PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture of the losses needs matplotlib; install peregrine[train]") from error
    lines = read_log(run)
    train = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] == "held_out"]
    if not train or not held_out:
        raise ConfigError(f"run={run}: its log has no losses yet; train first")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([line["step"] for line in train], [line["loss"] for line in train], color="0.75", label="train")
    for name in held_out[-1]["losses"]:
        points = [(line["step"], line["losses"][name]) for line in held_out]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.set(xlabel="step", ylabel="loss, nats per token", ylim=(0, 3))
    axes.legend()
    figure.savefig(picture, dpi=120)
