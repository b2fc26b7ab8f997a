"""`peregrine bench report`: one self-contained page, with plots of what was measured."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from peregrine.bench import plots
from peregrine.bench.report import Result, machine_lines, read_results, render
from peregrine.cli.main import main
from peregrine.errors import ConfigError

VOID = {"meta", "br", "img", "link", "input", "hr"}
MACHINE: dict[str, Any] = {
    "python": "3.11",
    "system": "Linux",
    "torch": "2",
    "numba": None,
    "triton": None,
    "cuda": None,
    "cpu": {"name": "Abacus", "cores": 2, "flags": ["beads"]},
    "memory_total_bytes": 8 * 2**30,
    "gpus": [],
}
TIMES = {"mean": 10.0, "p50": 9.0, "p90": 20.0, "p99": 31.0}
CASE: dict[str, Any] = {
    "concurrency": 4,
    "rate": None,
    "completed": 8,
    "failed": 0,
    "errors": {},
    "output_tokens_per_s": 321.0,
    "good_requests_per_s": 1.25,
    "ttft_ms": TIMES,
    "tpot_ms": TIMES,
    "itl_ms": TIMES,
    "e2e_ms": TIMES,
    "acceptance": {"rounds": 9, "accept_length": 2.34, "by_position": [0.8, 0.5]},
}
SERVE: dict[str, Any] = {
    "benchmark": "serve",
    "command": "peregrine bench serve --url http://x",
    "machine": MACHINE,
    "model": "merlin",
    "url": "http://x",
    "requests": 8,
    "prompts": 8,
    "max_tokens": 16,
    "temperature": 0.0,
    "flushed": True,
    "cases": [CASE],
}
SWEEP: dict[str, Any] = {
    "benchmark": "sweep",
    "machine": MACHINE,
    "model": "merlin",
    "rows": 1,
    "best": "chain 2",
    "tied": ["plain"],
    "identical": True,
    "shapes": [
        {
            "shape": "plain",
            "tokens_per_s": 100.0,
            "slowest": 90.0,
            "fastest": 130.0,
            "accept_length": 1.0,
            "by_position": [],
        },
        {
            "shape": "chain 2",
            "tokens_per_s": 125.0,
            "slowest": 120.0,
            "fastest": 128.0,
            "accept_length": 2.0,
            "by_position": [0.7, 0.3],
        },
        {"shape": "tree 9,9,9", "refused": "too wide"},
    ],
}
STAGES = {"target_ms": 4.5, "propose_ms": 3.0, "rest_ms": 1.0, "host_between_rounds_ms": 0.5}
OFFLINE: dict[str, Any] = {
    "machine": MACHINE,
    "model": "merlin",
    "drafter": "/heads/eagle3",
    "shape": "chain of 3",
    "tokens": 8,
    "temperature": 0.0,
    "start_up_s": 1.0,
    "rows": [
        {
            "rows": 1,
            "transformers": {"tokens_per_s": 40.0},
            "identical": True,
            "plain": {"tokens_per_s": 100.0, "accept_length": 1.0, "stages": STAGES | {"propose_ms": 0.0}},
            "speculative": {"tokens_per_s": 150.0, "accept_length": 2.0, "stages": STAGES},
        }
    ],
}


class Page(HTMLParser):
    """Tags that are open, and everything a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page() -> str:
    results = [Result("there", "serve", SERVE), Result("here", "sweep", SWEEP), Result("o", "offline", OFFLINE)]
    return render(results, "A & B")


def test_the_page_is_complete_and_fetches_nothing(page: str) -> None:
    parsed = Page(page)
    assert parsed.open == []
    assert all(link.startswith("#") for link in parsed.fetched)  # parts of the page itself
    assert "script" not in parsed.tags
    assert not re.search(r"url\((?!#)|@import", page)
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert "<title>A &amp; B</title>" in page
    assert re.search(r"</svg>\s*A &amp; B\s", page)


@pytest.mark.parametrize(
    "said",
    [
        "1.50x",  # speculative over plain, offline
        "321",  # tokens/s served
        "there 2.34; here, chain 2 2.00",  # acceptance by position
        "but the repeats do not tell it from plain. All shapes gave the same tokens.",
        "has the highest median: 125 tokens/s",
        "<b>yes</b><span>identical with and without speculation (o)</span>",
        "A speculative round takes 1.33x a plain one&#39;s time and brings 2.00x its tokens: 1.50x the speed.",
        "<td>speculative</td><td>150.0</td><td>1.50x</td><td>2.00</td><td>13.33</td>",
        "<td>transformers</td><td>40.0</td><td>0.40x</td><td></td><td></td>",
        "<h4>speculative, 9.00 ms with clocks between the stages</h4>",
        "Abacus, 2 cores (beads)",
        "peregrine bench serve --url http://x",
        "not recorded",  # the two results without a command
        "there, here, o",  # one machine, named once
    ],
)
def test_the_page_says(page: str, said: str) -> None:
    assert said in page


def test_every_plot_is_there(page: str) -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        "Speed (o)",
        "Throughput by requests at a time",
        "Acceptance by position",
        "Which drafts pay (here)",
        "Where a round&#39;s time goes, 1 request at a time (o)",
        "Latency percentiles (there)",
        "Every case (there)",
        "Machine",
        "Commands",
    ]
    assert page.count('<svg class="plot"') == 1 + 1 + 1 + 2 + 4


def test_failures_and_foreign_text_are_shown_escaped() -> None:
    case = CASE | {"failed": 2, "errors": {"HTTP 500: <b>no</b>": 2}, "ttft_ms": None, "acceptance": None}
    page = render([Result("<i>", "serve", SERVE | {"cases": [case], "model": "<m>"})], "t")
    assert "2 x HTTP 500: &lt;b&gt;no&lt;/b&gt;" in page
    assert "<td class=bad>2</td>" in page
    assert "<i>" not in page.replace("</b><i>tokens/s</i>", "")
    assert "<m>" not in page
    assert Page(page).open == []


def test_tokens_that_differ_are_reported() -> None:
    rows = [*OFFLINE["rows"], OFFLINE["rows"][0] | {"identical": False}]
    page = render(
        [Result("o", "offline", OFFLINE | {"rows": rows}), Result("s", "sweep", SWEEP | {"identical": False})], "t"
    )
    assert "<b>NO</b><span>identical with and without speculation (o)</span>" in page
    assert "THE SHAPES GAVE DIFFERENT TOKENS." in page


def test_loads_of_both_kinds_have_a_plot_each() -> None:
    cases = [CASE, CASE | {"concurrency": None, "rate": 2.5}]
    page = render([Result("a", "serve", SERVE | {"cases": cases})], "t")
    assert "Throughput by arrivals per second" in page
    assert "2.5/s" in page


def paths(picture: str, colour: str, part: str) -> list[list[tuple[float, float]]]:
    """The points of every path of this colour; `part` is the SVG property that has it."""
    drawn = re.findall(rf'<path d="([^"]*)"[^>]*style="{part}: var\(--{colour}\)', picture)
    numbers = [[float(number) for number in re.findall(r"-?[\d.]+", path)] for path in drawn]
    return [list(zip(path[::2], path[1::2], strict=True)) for path in numbers]


def test_a_line_is_drawn_to_scale_in_a_colour_of_the_page() -> None:
    picture = plots.lines({"a": [0.0, 50.0, 100.0]}, ["1", "2", "3"], "x", "y")
    [points] = [path for path in paths(picture, "c0", "fill: none; stroke") if len(path) == 3]
    ys = [y for _, y in points]
    assert ys[0] > ys[1] > ys[2]
    assert ys[1] == pytest.approx((ys[0] + ys[2]) / 2, abs=0.01)
    assert not any(colour in picture for colour in plots.VARIABLES)


def test_a_waterfall_steps_down_without_gaps() -> None:
    picture = plots.waterfall({"a": 1.0, "b": 3.0}, 4.0, "ms")
    [first], [second] = paths(picture, "c0", "fill"), paths(picture, "c1", "fill")
    assert second[0][0] == pytest.approx(first[1][0], abs=0.1)
    assert second[1][0] - second[0][0] == pytest.approx(3 * (first[1][0] - first[0][0]), abs=0.2)
    assert min(y for _, y in second) > max(y for _, y in first)


def test_a_machine_with_a_gpu() -> None:
    gpu = {"name": "Fast", "memory_total_bytes": 80 * 2**30}
    assert ("GPU", "Fast, 80 GiB") in machine_lines(MACHINE | {"gpus": [gpu]})


def test_from_files_to_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, data in (("a", SERVE), ("b", SWEEP), ("c", OFFLINE)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    out = tmp_path / "made" / "report.html"
    files = [str(tmp_path / f"{name}.json") for name in "abc"]
    assert main(["bench", "report", *files, "--out", str(out), "--title", "Talk"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert "<title>Talk</title>" in out.read_text()


def test_results_are_named_by_what_they_are(tmp_path: Path) -> None:
    """Whatever the files are called; the machine and a number come in where two are of the same."""
    other = MACHINE | {"gpus": [{"name": "Fast", "memory_total_bytes": 1}]}
    shapes = [{"shape": "plain", "drafter": "none"}, {"shape": "chain 2", "drafter": "/heads/eagle3"}]
    results = [
        SERVE,
        OFFLINE,
        OFFLINE | {"machine": other},
        OFFLINE | {"machine": other},
        {name: value for name, value in OFFLINE.items() if name != "shape"} | {"depth": 2, "model": "/models/llama"},
        SWEEP | {"shapes": shapes},
    ]
    files = [tmp_path / f"{index}.json" for index in range(len(results))]
    for file, result in zip(files, results, strict=True):
        file.write_text(json.dumps(result))
    assert [result.name for result in read_results(files)] == [
        "merlin at x",
        "merlin, eagle3, chain of 3, Abacus",
        "merlin, eagle3, chain of 3, Fast (1)",
        "merlin, eagle3, chain of 3, Fast (2)",
        "llama, eagle3, chain of 2",
        "merlin, eagle3, sweep",
    ]


def test_the_report_has_the_look_of_the_playground(page: str) -> None:
    look = (Path(plots.__file__).parents[1] / "assets" / "look.css").read_text()
    assert look in page
    named = set(re.findall(r"var\((--[\w-]+)\)", page))
    assert named <= set(re.findall(r"(--[\w-]+):", page))
    light = look.partition("@media")[0]
    assert all(colour in light for colour in (plots.COLOURS[0], plots.INK, plots.SOFT, plots.RULE))  # plots match it


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "cannot be read as JSON"), ('{"benchmark": "round"}', "is no result"), ("[]", "is no result")],
)
def test_a_file_that_is_not_a_result_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"x.json: .*{said}"):
        read_results([file])
