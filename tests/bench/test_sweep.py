"""`peregrine bench sweep`: shapes run in one process, acceptance by position, ties reported as ties."""

import json
from pathlib import Path
from typing import Any

import pytest

from peregrine.bench import sweep
from peregrine.cli.main import main
from peregrine.engine.output import Output, Timing
from peregrine.engine.stats import Stats
from peregrine.errors import ConfigError


def line(shape: str, slowest: float, median: float, fastest: float) -> dict[str, Any]:
    return {
        "shape": shape,
        "tokens_per_s": median,
        "slowest": slowest,
        "fastest": fastest,
        "accept_length": 1.5,
        "by_position": [0.5],
    }


def output(*correct_of_rounds: int) -> Output:
    stats = Stats()
    for correct in correct_of_rounds:
        stats.count(drafted=3, correct=correct, accepted=correct + 1)
    nothing = Timing(0.0, 0.0, 0.0, 0.0)
    return Output(0, [1], "", [], "length", None, None, 0, [], None, stats, nothing, False)


def test_acceptance_by_position_is_the_share_of_rounds_that_reached_it() -> None:
    told = sweep.acceptance_of([output(0, 2, 3), output(1)])
    assert told == {"rounds": 4, "accept_length": 10 / 4, "by_position": [0.75, 0.5, 0.25]}
    assert sweep.acceptance_of([output(0, 0)]) == {"rounds": 2, "accept_length": 1.0, "by_position": []}


def test_the_best_has_the_highest_median_and_ties_are_reported() -> None:
    lines = [line("plain", 90, 95, 99), line("chain 2", 100, 120, 125), line("chain 3", 98, 110, 101)]
    lines.append({"shape": "tree 3,2,8", "refused": "no trees here"})
    best = sweep.best_of(lines)
    assert best == "chain 2"
    assert sweep.tied_with(best, lines) == ["chain 3"]  # its fastest reaches the best one's slowest
    result = {"shapes": lines, "best": best, "tied": ["chain 3"]}
    text = "best for this machine and these prompts: chain 2, 1.26x plain decoding"
    assert sweep.verdict(result) == f"{text}; within the spread of repeats it equals chain 3"
    assert sweep.verdict(result | {"tied": []}) == text
    assert sweep.best_of(lines[3:]) is None
    assert sweep.tied_with(None, lines[3:]) == []


def test_shapes_become_options() -> None:
    plan = sweep.Plan(drafts=(0, 2), trees=((3, 2, 8),), prompts=["x"])
    assert plan.shapes() == {
        "auto": {},
        "plain": {"num_drafts": 0, "windows": "fixed"},
        "chain 2": {"num_drafts": 2, "windows": "fixed"},
        "tree 3,2,8": {"tree": (3, 2, 8)},
    }


def test_a_plan_without_shapes_is_refused() -> None:
    with pytest.raises(ConfigError, match="both are empty"):
        sweep.Plan(drafts=(), trees=(), prompts=["x"])


def test_what_is_swept_cannot_be_fixed() -> None:
    with pytest.raises(ConfigError, match=r"num_drafts=2: .*--drafts and --trees"):
        sweep.run(sweep.Plan(drafts=(1,), trees=(), prompts=["x"]), {"num_drafts": 2})


def test_a_sweep_of_merlin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.json"
    shapes = ["--drafts", "0", "2", "99", "--trees", "2,2,6"]
    short = ["--tokens", "8", "--repeats", "2", "--max-prompts", "2", "--num-pages", "100"]
    assert main(["bench", "sweep", *shapes, *short, "--out", str(out)]) == 0
    table = capsys.readouterr().out
    result = json.loads(out.read_text())
    auto, plain, chain, refused, tree = result["shapes"]
    assert [auto["shape"], auto["drafter"]] == ["auto", "eagle3"]
    assert sum(auto["plans"].values()) == auto["rounds"]
    assert not chain["plans"]
    assert "rounds: plain " in table
    assert [plain["shape"], plain["drafter"], plain["by_position"]] == ["plain", "none", []]
    assert plain["rounds"] == 16
    assert [chain["shape"], chain["drafter"]] == ["chain 2", "eagle3"]
    assert chain["accept_length"] > 1
    assert len(tree["by_position"]) <= 2
    assert "num_drafts=99" in refused["refused"]
    assert "refused: num_drafts=99" in table
    assert result["identical"] is True
    assert result["best"] in ("auto", "plain", "chain 2", "tree 2,2,6")
    for ran in (auto, plain, chain, tree):
        assert 0 < ran["slowest"] <= ran["tokens_per_s"] <= ran["fastest"]
