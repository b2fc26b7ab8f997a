"""The result of `bench offline` in words and tables, for the terminal and for a report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peregrine.log import style

STAGES = (
    ("target_ms", "verify, judge, commit"),
    ("propose_ms", "propose"),
    ("rest_ms", "rest"),
    ("host_between_rounds_ms", "host, between rounds"),
)
HEAD = ("", "tokens/s", "of plain", "tokens/round", "ms/round")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Speed:
    """One way to decode at one batch size; rounds are Peregrine's own."""

    name: str
    tokens_per_s: float
    of_plain: float
    accept_length: float | None
    round_ms: float | None  # all the time of the run over its rounds

    def cells(self) -> tuple[str, ...]:
        """The values as text, in the order of HEAD."""
        rounds = ["" if value is None else f"{value:.2f}" for value in (self.accept_length, self.round_ms)]
        return (self.name, f"{self.tokens_per_s:.1f}", f"{self.of_plain:.2f}x", *rounds)


def speeds(line: Json) -> list[Speed]:
    """Everything that was measured at one batch size; figures elsewhere are taken from here, so that they agree."""
    plain = line["plain"]["tokens_per_s"]
    found = []
    for name in ("llama.cpp", "transformers", "plain", "speculative"):
        if name in line:
            speed, length = line[name]["tokens_per_s"], line[name].get("accept_length")
            round_ms = None if length is None else 1e3 * line["rows"] * length / speed
            found.append(Speed(name, speed, speed / plain, length, round_ms))
    return found


def stage_rows(line: Json) -> Iterator[tuple[str, ...]]:
    """Milliseconds of a round by stage, plain and speculative."""
    for name in ("plain", "speculative"):
        stages = line[name]["stages"]
        yield (name, *(f"{stages[field]:.2f}" for field, _ in STAGES), f"{stages['outside_kernels']:.0%}")


def series_name(result: Json) -> str:
    """What was measured: the model and its drafts."""
    shape = result.get("shape") or f"chain of {result['depth']}"
    return f"{Path(str(result['model'])).name}, {Path(str(result['drafter'])).name}, {shape}"


def requests(count: int) -> str:
    return "1 request at a time" if count == 1 else f"{count} requests at a time"


def show(result: Json) -> str:
    """The whole result for a terminal."""
    memory = result["memory"]
    lines = [
        f"{series_name(result)}; {result['tokens']} tokens per request, temperature {result['temperature']:g}",
        f"import to first token {result['start_up_s']:.1f} s; weights {memory['weights_mib']:.0f} MiB, "
        f"KV pages {memory['kv_pages_mib']:.0f} MiB, peak beyond both {memory['peak_beyond_mib']:.0f} MiB",
    ]
    for line in result["rows"]:
        lines += ["", style(requests(line["rows"]), "bold")]
        lines += text_table([HEAD, *(speed.cells() for speed in speeds(line))])
        same = style("yes", "green") if line["identical"] else style("NO", "red")
        lines.append(f"  the same tokens with and without speculation: {same}")
        lines.append(style("  where a round's time goes, ms; in a run of its own, with clocks between stages", "dim"))
        lines += text_table([("", *(label for _, label in STAGES), "outside kernels"), *stage_rows(line)])
    return "\n".join(lines)


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("   ".join([f"  {first:<{widths[0]}}", *cells]).rstrip())
    return lines
