"""`peregrine generate`: sources of the prompt, parameters passed to the engine, stdout and stderr."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Terminal

Run = Callable[..., tuple[int, str, str]]


def test_streams_text_and_keeps_stats_off_stdout(calls: Any, peregrine: Run) -> None:
    code, out, err = peregrine("generate", "hi", "--seed", "7", "--model", "m", "--drafter", "ngram")
    assert (code, out) == (0, "A bird fell é\n")
    assert calls.prompts == ["hi"]
    assert calls.options == [{"model": "m", "drafter": "ngram"}]
    assert calls.params[0].seed == 7
    assert calls.closed == 1
    assert err.startswith("5 tokens in 0.50 s (10.0 tokens/s); first after 125 ms")
    assert "5.00 tokens per round (bonus included); 2 of 3 drafts right; ended by length; seed 7\n" in err


def test_json_is_the_whole_output(calls: Any, peregrine: Run) -> None:
    code, out, err = peregrine("generate", "hi", "--json", "--drafter", "ngram")
    result = json.loads(out)
    assert (code, err) == (0, "")
    assert result["text"] == "A bird fell é"
    assert result["drafted"] == [False, True, True, False, False]
    assert result["stats"]["correct"] == 2


def test_chat_sends_a_user_message_through_the_template(calls: Any, peregrine: Run) -> None:
    peregrine("generate", "--chat", "hello")
    assert calls.prompts == [[5, 99]]


def test_prompt_from_a_file(calls: Any, peregrine: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("é one\ntwo\n", encoding="utf-8")
    peregrine("generate", "--file", str(file))
    assert calls.prompts == ["é one\ntwo"]


def test_prompt_from_standard_input(calls: Any, peregrine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    peregrine("generate")
    assert calls.prompts == ["one\ntwo"]


def test_a_prompt_in_another_encoding_is_refused(
    calls: Any, peregrine: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("café olé".encode("latin-1"))
    said = "is not UTF-8 (byte 0xe9 at 3); convert it, such as with iconv -f LATIN1 -t UTF-8\n"
    assert peregrine("generate", "--file", str(file)) == (2, "", f"error: file={str(file)!r}: {said}")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file.open("rb"), encoding="utf-8"))
    assert peregrine("generate") == (2, "", f"error: standard input: {said}")
    file.write_bytes(b"\xef\xbb\xbfhi\n")
    peregrine("generate", "--file", str(file))
    assert calls.prompts == ["hi"]  # without the byte order mark


def test_logprobs_are_shown_without_json(calls: Any, peregrine: Run) -> None:
    code, out, err = peregrine("generate", "hi", "--logprobs", "2", "--prompt-logprobs", "1")
    assert (code, out) == (0, "A bird fell é\n")
    lines = err.splitlines()
    assert lines[0].split() == ["prompt", "logprob", "likeliest"]
    assert lines[1].split() == ["'A'", "-0.250", "'A'", "-0.250"]
    assert lines[2].split() == ["token", "logprob", "likeliest"]
    assert lines[4].split() == ["'", "bird'", "-0.500", "'A'", "-0.250,", "'", "bird'", "-0.500"]


@pytest.mark.parametrize("command", ["chat", "demo"])
def test_commands_that_show_no_logprobs_do_not_take_them(peregrine: Run, command: str) -> None:
    code, _, err = peregrine(command, "--logprobs", "2")
    assert code == 2
    assert f"--logprobs: peregrine {command} has no such option" in err


def test_a_prompt_is_not_read_from_a_terminal(calls: Any, peregrine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("typed"))
    code, _, err = peregrine("generate")
    assert code == 2
    assert "--file" in err
    assert calls.options == []


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["hi", "--file", "x"], "both were given"),
        (["--file", "/no/such/file"], "file='/no/such/file'"),
        (["hi", "--temperature", "-1"], "temperature=-1.0"),
        (["hi", "--model", "broken"], "no config.json in 'broken'"),
    ],
)
def test_refusals(calls: Any, peregrine: Run, argv: list[str], named: str) -> None:
    code, out, err = peregrine("generate", *argv)
    assert (code, out) == (2, "")
    assert named in err


def test_bad_parameters_are_refused_before_the_model_loads(calls: Any, peregrine: Run) -> None:
    peregrine("generate", "hi", "--top-p", "7")
    assert calls.options == []


def test_failed_generation_is_an_error(calls: Any, peregrine: Run) -> None:
    calls.reason = "error"
    code, _, err = peregrine("generate", "hi")
    assert code == 2
    assert "error: the generation failed: the weather" in err
