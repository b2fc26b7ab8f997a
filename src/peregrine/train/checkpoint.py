"""A training run on disk: the latest state, replaced as a whole, and a log with one JSON object a line."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from peregrine.errors import ConfigError

STATE, LOG = "state", "log.jsonl"
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a run needs to go on as if it had never stopped."""

    facts: Facts  # step reached, total steps, options
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def save_state(folder: Path, saved: Saved) -> None:
    """Replaces the folder's state; a kill at any moment leaves the old one or the new one whole."""
    new, old = folder / f"{STATE}.new", folder / f"{STATE}.old"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in saved.model.items()}, new / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in saved.optimizer.items()}, new / "optimizer.safetensors")
    (new / "facts.json").write_text(json.dumps(saved.facts, indent=2))
    shutil.rmtree(old, ignore_errors=True)
    if (folder / STATE).exists():
        os.replace(folder / STATE, old)
    os.replace(new, folder / STATE)
    shutil.rmtree(old, ignore_errors=True)


def load_state(folder: Path) -> Saved | None:
    """The run's latest state, or None if it has none."""
    # Between its two renames a save leaves the state under its old name.
    for name in (STATE, f"{STATE}.old"):
        path = folder / name
        if (path / "facts.json").exists():
            facts = json.loads((path / "facts.json").read_text())
            return Saved(facts, load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors"))
    return None


def same_options(saved: Facts, wanted: Mapping[str, object], folder: Path) -> None:
    """Refuses to go on with a run that was started with other options."""
    for name, value in wanted.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{name}={value}: the run in {folder} was started with {name}={saved.get(name)}; "
                f"ask for that, or give another folder"
            )


def log_line(folder: Path, facts: Mapping[str, object]) -> None:
    """Adds one line to the run's log."""
    with (folder / LOG).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(facts) + "\n")


def read_log(folder: Path) -> list[Facts]:
    """The run's log; where a step was run again after a stop, the later line counts."""
    lines: dict[tuple[object, object], Facts] = {}
    if (folder / LOG).exists():
        for line in (folder / LOG).read_text(encoding="utf-8").splitlines():
            facts = json.loads(line)
            lines[facts.get("kind"), facts.get("step")] = facts
    return list(lines.values())
