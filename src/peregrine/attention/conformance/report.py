"""Run the cases and report, for each property, the number of trials and the worst of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch

from peregrine.attention.backend import AttentionBackend
from peregrine.attention.conformance.cases import Case
from peregrine.attention.conformance.checks import PROPERTIES, start

SHOWN_FAILURES = 8  # per property


@dataclass(slots=True)
class Tally:
    """The trials of one property."""

    trials: int = 0
    worst: float = 0.0  # error as a share of the allowed one
    failures: list[str] = field(default_factory=list)

    def add(self, share: float, where: str) -> None:
        """Count one trial; NaN is a failure."""
        self.trials += 1
        self.worst = max(self.worst, share)
        if not share <= 1:
            self.failures.append(where)


@dataclass(frozen=True, slots=True)
class Report:
    """The tallies of a run."""

    backend: str
    cases: int
    tallies: dict[str, Tally]

    @property
    def passed(self) -> bool:
        """Whether there were trials and none failed."""
        return self.cases > 0 and not any(tally.failures for tally in self.tallies.values())

    def lines(self) -> list[str]:
        """The report as a table, failures below it."""
        lines = [
            f"{self.backend}: {self.cases} cases",
            f"  {'property':<46} {'trials':>6}  {'worst error / bound':>19}",
        ]
        for name, tally in self.tallies.items():
            worst = f"{tally.worst:.3f}" if name == next(iter(self.tallies)) else "bit for bit"
            verdict = "pass" if not tally.failures else "FAIL"
            shown = worst if tally.trials else "-"
            lines.append(f"  {name:<46} {tally.trials:>6}  {shown:>19}  {verdict if tally.trials else 'not run'}")
        for name, tally in self.tallies.items():
            hidden = len(tally.failures) - SHOWN_FAILURES
            lines += [f"  FAIL {name}: {where}" for where in tally.failures[:SHOWN_FAILURES]]
            lines += [f"  FAIL {name}: and {hidden} more"] if hidden > 0 else []
        return lines

    def facts(self) -> dict[str, object]:
        """The report as plain values."""
        properties = {
            name: {
                "trials": tally.trials,
                "worst": tally.worst if isfinite(tally.worst) else None,
                "failures": tally.failures,
            }
            for name, tally in self.tallies.items()
        }
        return {"backend": self.backend, "cases": self.cases, "passed": self.passed, "properties": properties}


def run_conformance(
    backend: AttentionBackend,
    cases: Sequence[Case],
    device: torch.device,
    watch: Callable[[str], None] = lambda name: None,
) -> Report:
    """Check the backend on every case; `watch` is called with each case's name as it begins."""
    tallies = {name: Tally() for name in PROPERTIES}
    for case in cases:
        watch(case.name)
        layer = case.layer(device)
        for shape, rows in case.batches():
            trial = start(backend, case, layer, rows, device)
            for name, check in PROPERTIES.items():
                for share in check(trial):
                    tallies[name].add(share, f"{case.name}: {shape}")
    return Report(backend.name, len(cases), tallies)
