"""`peregrine bench report`: results of the other benchmarks as one HTML page that needs nothing but a browser."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment

from peregrine import __version__
from peregrine.bench import plots
from peregrine.bench.offline_table import HEAD, STAGES, requests, speeds
from peregrine.bench.offline_table import series_name as offline_name
from peregrine.bench.serve_table import COLUMNS, title_of
from peregrine.errors import ConfigError, read_user_text

TEMPLATE = Path(__file__).with_name("report.html")
LOOK = Path(__file__).parents[1] / "assets" / "look.css"  # the playground's
PERCENTILES = ("p50", "p90", "p99")
GIB = 2**30
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What one benchmark wrote, under a name that says what was measured."""

    name: str
    kind: str
    data: Json


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with its title and one sentence about its result."""

    title: str
    text: str
    picture: str
    wide: bool = False


def read_results(files: Sequence[Path]) -> list[Result]:
    """The result in every file; ConfigError names a file that holds none."""
    found = []
    for file in files:
        text = read_user_text("result", file)
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: cannot be read as JSON ({error}); write one with --out FILE") from error
        found.append((kind_of(file, data), data))
    names = series_names(found)
    return [Result(name, kind, data) for name, (kind, data) in zip(names, found, strict=True)]


def series_names(found: Sequence[tuple[str, Json]]) -> list[str]:
    """What each result is of; where two are of the same, with the machine, and then with a number."""
    names = [series_name(kind, data) for kind, data in found]
    several = Counter(names)
    names = [
        f"{name}, {processor(data['machine'])}" if several[name] > 1 else name
        for name, (_, data) in zip(names, found, strict=True)
    ]
    several = Counter(names)
    seen: Counter[str] = Counter()
    numbered = []
    for name in names:
        seen[name] += 1
        numbered.append(f"{name} ({seen[name]})" if several[name] > 1 else name)
    return numbered


def series_name(kind: str, data: Json) -> str:
    """What one result is of."""
    if kind == "offline":
        return offline_name(data)
    if kind == "serve":
        return f"{data['model']} at {str(data['url']).partition('://')[2] or data['url']}"
    drafters = dict.fromkeys(str(line["drafter"]) for line in data["shapes"] if line.get("drafter", "none") != "none")
    return ", ".join([Path(str(data["model"])).name, *(Path(name).name for name in drafters), "sweep"])


def processor(machine: Json) -> str:
    """The machine in one name: its GPU, or its CPU."""
    return str(machine["gpus"][0]["name"] if machine["gpus"] else machine["cpu"]["name"])


def kind_of(file: Path, data: object) -> str:
    """Which benchmark wrote this result."""
    match data:
        case {"benchmark": "serve", "cases": list()}:
            return "serve"
        case {"benchmark": "sweep", "shapes": list()}:
            return "sweep"
        case {"rows": list(), "start_up_s": _, "machine": dict()}:
            return "offline"
    raise ConfigError(f"{file}: is no result of bench serve, sweep or offline; write one with --out FILE")


def render(results: Sequence[Result], title: str) -> str:
    """The page."""
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    figures = [
        *throughput_figures(of_kind(results, "serve")),
        *acceptance_figures(results),
        *sweep_figures(of_kind(results, "sweep")),
        *round_figures(of_kind(results, "offline")),
        *latency_figures(of_kind(results, "serve")),
    ]
    return template.render(
        title=title,
        look=LOOK.read_text(encoding="utf-8"),
        version=__version__,
        models=list(dict.fromkeys(str(result.data["model"]) for result in results)),
        tiles=list(tiles(results)),
        figures=figures,
        offline=of_kind(results, "offline"),
        head=HEAD,
        speeds=speeds,
        requests=requests,
        serve=of_kind(results, "serve"),
        columns=COLUMNS,
        title_of=title_of,
        machines=machines(results),
        commands=[(result.name, result.data.get("command") or "not recorded") for result in results],
    )


def of_kind(results: Sequence[Result], kind: str) -> list[Result]:
    return [result for result in results if result.kind == kind]


def tiles(results: Sequence[Result]) -> Iterator[tuple[str, str, str]]:
    """The main figures: value, unit, what it is."""
    for result in of_kind(results, "offline"):
        for line in result.data["rows"]:
            fast = speeds(line)[-1]
            yield f"{fast.of_plain:.2f}x", "", f"of plain decoding, {requests(line['rows'])} ({result.name})"
        same = all(each["identical"] for each in result.data["rows"])
        yield "yes" if same else "NO", "", f"identical with and without speculation ({result.name})"
    for result in of_kind(results, "sweep"):
        best = next((line for line in result.data["shapes"] if line["shape"] == result.data["best"]), None)
        if best is not None:
            word = "has the highest median" if result.data["tied"] else "is fastest"
            yield best["shape"], "", f"{word}: {plots.short(best['tokens_per_s'])} tokens/s ({result.name})"
    for result in of_kind(results, "serve"):
        best = max(result.data["cases"], key=lambda case: float(case["output_tokens_per_s"]))
        yield (plots.short(best["output_tokens_per_s"]), "tokens/s", f"served, {title_of(best)} ({result.name})")


def throughput_figures(served: Sequence[Result]) -> Iterator[Figure]:
    """Tokens/s by concurrency and by arrival rate, each if it was measured."""
    for field, label in (("concurrency", "requests at a time"), ("rate", "arrivals per second")):
        places = sorted({case[field] for result in served for case in result.data["cases"] if case[field]})
        series = {}
        for result in served:
            speeds = {case[field]: case["output_tokens_per_s"] for case in reversed(result.data["cases"])}
            if any(place in speeds for place in places):
                series[result.name] = [speeds.get(place) for place in places]
        if series:
            best = max((value or 0, name) for name, values in series.items() for value in values)
            text = f"At most {plots.short(best[0])} tokens/s, from {best[1]}. Output tokens of all requests together."
            picture = plots.lines(series, [f"{place:g}" for place in places], label, "tokens/s")
            yield Figure(f"Throughput by {label}", text, picture)


def acceptance_figures(results: Sequence[Result]) -> Iterator[Figure]:
    """The share of rounds whose draft was right at each depth."""
    found: list[tuple[str, Json]] = []
    for result in of_kind(results, "serve"):
        told = [case["acceptance"] for case in result.data["cases"] if case["acceptance"]]
        # Cases of one server differ little: the one with the most rounds is shown.
        found += [(result.name, max(told, key=lambda each: int(each["rounds"])))] if told else []
    for result in of_kind(results, "sweep"):
        longest = [line for line in result.data["shapes"] if line.get("by_position")]
        for kind in ("chain", "tree"):
            of_one = [line for line in longest if line["shape"].startswith(kind)]
            if of_one:
                deepest = max(of_one, key=lambda line: len(line["by_position"]))
                found.append((f"{result.name}, {deepest['shape']}", deepest))
    found = [(name, told) for name, told in found if told["by_position"]]
    if found:
        depth = max(len(told["by_position"]) for _, told in found)
        series = {name: [*told["by_position"], *[None] * (depth - len(told["by_position"]))] for name, told in found}
        lengths = "; ".join(f"{name} {told['accept_length']:.2f}" for name, told in found)
        picture = plots.lines(series, [str(place + 1) for place in range(depth)], "draft", "share accepted", top=1)
        yield Figure("Acceptance by position", f"Tokens per round, bonus included: {lengths}.", picture)


def sweep_figures(swept: Sequence[Result]) -> Iterator[Figure]:
    """Every shape's speed with the spread over repeats."""
    for result in swept:
        ran = [line for line in result.data["shapes"] if "refused" not in line]
        if not ran:
            continue
        entries = [
            plots.Bar(
                line["shape"],
                line["tokens_per_s"],
                line["slowest"],
                line["fastest"],
                f", {line['accept_length']:.2f} a round",
                line["shape"] == result.data["best"],
            )
            for line in ran
        ]
        tied = result.data["tied"]
        text = f"{result.data['best']} is fastest on these prompts, {requests(result.data['rows'])}, "
        text += f"but the repeats do not tell it from {', '.join(tied)}." if tied else "beyond the spread of repeats."
        text += (
            " All shapes gave the same tokens." if result.data["identical"] else " THE SHAPES GAVE DIFFERENT TOKENS."
        )
        yield Figure(f"Which drafts pay ({result.name})", text, plots.bars(entries, "tokens/s"))


def round_figures(measured: Sequence[Result]) -> Iterator[Figure]:
    """Where a round's time goes, plain and speculative, at each batch size."""
    for result in measured:
        for line in result.data["rows"]:
            totals = {
                name: sum(line[name]["stages"][field] for field, _ in STAGES) for name in ("plain", "speculative")
            }
            parts = []
            for name, total in totals.items():
                steps = {label: line[name]["stages"][field] for field, label in STAGES}
                waterfall = plots.waterfall(steps, max(totals.values()), "ms")
                parts.append(f"<h4>{name}, {total:.2f} ms with clocks between the stages</h4>{waterfall}")
            gained = line["speculative"]["accept_length"] / line["plain"]["accept_length"]
            ratio = speeds(line)[-1].of_plain
            text = f"A speculative round takes {gained / ratio:.2f}x a plain one's time and brings {gained:.2f}x "
            text += f"its tokens: {ratio:.2f}x the speed."
            yield Figure(f"Where a round's time goes, {requests(line['rows'])} ({result.name})", text, "".join(parts))


def latency_figures(served: Sequence[Result]) -> Iterator[Figure]:
    """Percentiles of each latency, case by case."""
    for result in served:
        cases = result.data["cases"]
        places = [f"{c['concurrency']}" if c["rate"] is None else f"{c['rate']:g}/s" for c in cases]
        parts = []
        for title, field in COLUMNS:
            series = {name: [c[field] and c[field][name] for c in cases] for name in PERCENTILES}
            plot = plots.ranges(series, places, "requests at a time, or arrivals/s", "ms")
            parts.append(f"<div><h4>{title}</h4>{plot}</div>")
        picture = f'<div class="four">{"".join(parts)}</div>'
        text = "TTFT: to the first token. TPOT: per further token. ITL: between chunks. E2E: the whole answer."
        yield Figure(f"Latency percentiles ({result.name})", text, picture, wide=True)


def machines(results: Sequence[Result]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The facts of every machine, each once, under the names of its results."""
    found: dict[str, tuple[list[str], list[tuple[str, str]]]] = {}
    for result in results:
        facts = machine_lines(result.data["machine"])
        found.setdefault(json.dumps(facts), ([], facts))[0].append(result.name)
    return [(", ".join(names), facts) for names, facts in found.values()]


def machine_lines(machine: Json) -> list[tuple[str, str]]:
    """A machine's facts as (name, text); what it does not have is left out."""
    cpu, memory = machine["cpu"], machine["memory_total_bytes"]
    gpus = [f"{gpu['name']}, {gpu['memory_total_bytes'] / GIB:.0f} GiB" for gpu in machine["gpus"]]
    facts = {
        "CPU": f"{cpu['name']}, {cpu['cores']} cores ({', '.join(cpu['flags'])})",
        "memory": f"{memory / GIB:.0f} GiB" if memory else "",
        "GPU": "; ".join(gpus),
        "system": machine["system"],
        **{name: machine[name] for name in ("python", "torch", "numba", "triton", "cuda")},
    }
    return [(name, str(value)) for name, value in facts.items() if value]
