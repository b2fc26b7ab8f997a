"""Figures in the docs are those of the result files that stand beside them."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ROW = re.compile(
    r"\| (?P<rows>\d+) x (?P<context>\d+) \| (?P<ms>[\d.]+) \| (?P<speed>[\d,]+) \| (`(?P<file>[^`]+)`)? ?\|$"
)


def test_rounds_on_the_page_about_scale() -> None:
    """A row without a file is of the file above it."""
    file, found = "", 0
    for line in (ROOT / "docs" / "scale.md").read_text().splitlines():
        if (row := ROW.search(line)) is None:
            continue
        file, found = row["file"] or file, found + 1
        (case,) = (
            case
            for case in json.loads((RESULTS / file).read_text())["cases"]
            if (case["rows"], case["context"]) == (int(row["rows"]), int(row["context"]))
        )
        assert float(row["ms"]) == pytest.approx(case["ms_per_round"], abs=0.0051), line
        assert int(row["speed"].replace(",", "")) == pytest.approx(case["tokens_per_s"], abs=0.51), line
    assert found == 8
