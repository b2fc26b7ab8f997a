"""`peregrine demo`: plain and speculative decoding compared, drafted tokens marked, a stand-in model announced."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Terminal, make_output
from peregrine.cli.demo import print_comparison
from peregrine.engine.output import Output
from peregrine.sampling import SamplingParams

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tmp_path)


def test_compares_plain_and_speculative(calls: Any, peregrine: Run, model: str) -> None:
    code, out, _ = peregrine("demo", "--model", model)
    assert code == 0
    assert [options["drafter"] for options in calls.options] == ["ngram", "none"], (
        "wrong options come to light before any text"
    )
    assert out.count("A bird fell é\n") == 2
    assert "acceptance: 5.00 tokens per round (bonus included), 2 of 3 drafts right" in out
    assert "tokens/s:   plain 10.0, with speculation 10.0 (1.00 x)" in out
    assert "medians of 7 runs in turns, 1.00 to 1.00 x; load average " in out
    assert "not faster: a round gave 5.00 tokens and took 1.00 x as long as a plain one; " in out
    assert out.endswith("identical:  yes\n")
    assert "\033" not in out


def test_options_of_speculation_are_for_that_engine_alone(calls: Any, peregrine: Run, model: str) -> None:
    """Plain decoding would refuse them."""
    assert (
        peregrine("demo", "--model", model, "--tree", "3,2,8", "--confidence-threshold", "0.5", "--max-rows", "2")[0]
        == 0
    )
    assert calls.options[1] == {"model": model, "drafter": "none", "max_rows": 2}


def test_a_model_with_a_head_uses_it(calls: Any, peregrine: Run, model: str) -> None:
    (Path(model) / "eagle3").mkdir()
    (Path(model) / "eagle3" / "config.json").write_text("{}")
    peregrine("demo", "--model", model)
    assert [options["drafter"] for options in calls.options] == ["auto", "none"]


def test_different_tokens_are_reported_and_fail(calls: Any, peregrine: Run, model: str) -> None:
    calls.tokens_with_drafter = [0, 1, 2]
    code, out, _ = peregrine("demo", "--model", model)
    assert code == 1
    assert out.endswith("identical:  no\n")


def made(seconds: float, rounds: int) -> Output:
    """100 tokens in so many seconds and rounds."""
    output = make_output([0, 1, 2, 3, 4], [], "length", [0], SamplingParams())
    output.stats.rounds, output.stats.accepted = rounds, 100
    return replace(output, token_ids=[1] * 100, timing=replace(output.timing, total_s=seconds))


def test_speeds_are_medians_with_their_spread(capsys: pytest.CaptureFixture[str]) -> None:
    slow = [made(seconds, 100) for seconds in (1.0, 9.0, 1.0)]  # something else had the cores for a while
    fast = [made(seconds, 40) for seconds in (0.5, 0.6, 0.5)]
    print_comparison(list(zip(slow, fast, strict=True)), load=0.0, identical=True)
    out = capsys.readouterr().out
    assert "tokens/s:   plain 100.0, with speculation 200.0 (2.00 x)" in out
    assert "medians of 3 runs in turns, 2.00 to 15.00 x; load average 0.0" in out
    assert "not faster" not in out


@pytest.mark.parametrize(
    ("load", "seconds", "reason"),
    [
        (0.1, [1.1, 1.1, 1.1], "took 2.75 x as long as a plain one; try another --num-drafts"),
        (0.1, [1.1, 1.1, 0.8], "some runs were faster, so it may be noise"),
        (64.0, [1.1, 1.1, 1.1], "run it on a quiet machine"),
    ],
)
def test_says_why_it_is_not_faster(
    capsys: pytest.CaptureFixture[str], load: float, seconds: list[float], reason: str
) -> None:
    print_comparison([(made(1.0, 100), made(taken, 40)) for taken in seconds], load, identical=True)
    out = capsys.readouterr().out
    assert "not faster: a round gave 2.50 tokens and " in out
    assert reason in out


def test_drafted_tokens_are_underlined_even_without_colour(
    calls: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peregrine.cli.main import main

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    main(["demo", "--model", model])
    assert "A\033[4m bird\033[0m\033[4m fell\033[0m é\n" in terminal.getvalue()
    monkeypatch.delenv("NO_COLOR")
    main(["demo", "--model", model])
    assert "A\033[32;4m bird\033[0m\033[32;4m fell\033[0m é\n" in terminal.getvalue()


def test_stand_in_model_is_announced(calls: Any, peregrine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peregrine.engine.folders.embedded_models", lambda: [])
    _, out, _ = peregrine("demo")
    assert "random weights" in out.splitlines()[0]
    assert "peregrine-demo-" in str(calls.options[0]["model"])
    assert not Path(str(calls.options[0]["model"])).exists()
