"""`peregrine demo`: plain and speculative decoding compared, drafted tokens marked, a stand-in model announced."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Terminal

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tmp_path)


def test_compares_plain_and_speculative(calls: Any, peregrine: Run, model: str) -> None:
    code, out, _ = peregrine("demo", "--model", model)
    assert code == 0
    assert [options["drafter"] for options in calls.options] == ["none", "ngram"]
    assert out.count("A bird fell é\n") == 2
    assert "acceptance: 5.00 tokens per round (bonus included), 2 of 3 drafts right" in out
    assert "tokens/s:   plain 10.0, with speculation 10.0 (1.00 x)" in out
    assert out.endswith("identical:  yes\n")
    assert "\033" not in out


def test_a_model_with_a_head_uses_it(calls: Any, peregrine: Run, model: str) -> None:
    (Path(model) / "eagle3").mkdir()
    (Path(model) / "eagle3" / "config.json").write_text("{}")
    peregrine("demo", "--model", model)
    assert [options["drafter"] for options in calls.options] == ["none", "auto"]


def test_different_tokens_are_reported_and_fail(calls: Any, peregrine: Run, model: str) -> None:
    calls.tokens_with_drafter = [0, 1, 2]
    code, out, _ = peregrine("demo", "--model", model)
    assert code == 1
    assert out.endswith("identical:  no\n")


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
