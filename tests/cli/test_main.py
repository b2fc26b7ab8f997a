"""The command line: help is quick and has examples, errors are one line, benchmarks pass their flags on."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peregrine.cli.main import build_parser

SRC = Path(__file__).parents[2] / "src"
Run = Callable[..., tuple[int, str, str]]
HEAVY = ("torch", "numpy", "tokenizers", "numba", "matplotlib", "fastapi", "pydantic", "uvicorn")
# Prints, per command: its help, and what it had imported by then.
HELP_OF_ALL = f"""
import contextlib, io, json, sys
import peregrine; peregrine.SamplingParams
from peregrine.cli.main import main
for argv in json.loads(sys.argv[1]):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*argv, "--help"])
    print(json.dumps([argv, text.getvalue(), [name for name in {HEAVY} if name in sys.modules]]))
"""


def all_commands() -> list[list[str]]:
    """Every command that has a help text, the command line itself included."""

    def walk(argv: list[str], parser: argparse.ArgumentParser) -> Iterator[list[str]]:
        yield argv
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, below in action.choices.items():
                    yield from walk([*argv, name], below)

    return list(walk([], build_parser()))


def test_help_imports_nothing_heavy_and_has_examples() -> None:
    """In a new process, since this one has imported everything."""
    commands = all_commands()
    assert [] in commands
    assert ["bench", "offline"] in commands
    command = [sys.executable, "-c", HELP_OF_ALL, json.dumps(commands)]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [argv for argv, _, _ in answers] == commands
    for argv, text, imported in answers:
        assert not imported, argv
        assert "usage: peregrine" in text
        if argv != ["bench"]:  # it lists benchmarks, which have examples
            assert "examples:" in text, argv
            assert f"peregrine {' '.join(argv)}" in text.partition("examples:")[2], argv


def test_no_command_prints_help(peregrine: Run) -> None:
    code, out, _ = peregrine()
    assert code == 0
    assert "peregrine generate" in out


def test_refusal_is_one_line_and_code_2(calls: object, peregrine: Run) -> None:
    code, out, err = peregrine("generate", "hi", "--device", "toaster")
    assert (code, out) == (2, "")
    assert err == "error: device='toaster': is unknown; choose cpu\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generate", "hi", "--temprature", "1"], "--temprature: peregrine generate has no such option"),
        (["generate", "hi", "--temprature=0.5"], "did you mean --temperature?"),
        (["generate", "hi", "--temp", "0.5"], "no such option; did you mean --temperature?"),
        (["generate", "hi", "--pres", "1"], "did you mean --presence-penalty?"),
        (["generate", "hi", "--max", "5"], "did you mean --max-tokens or --max-rows or --max-len or --max-stall-ms?"),
        (
            ["bench", "offline", "--drafer", "ngram"],
            "peregrine bench offline has no such option; did you mean --drafter",
        ),
        (["bench", "offlin"], "'offlin': no such command; did you mean offline?"),
        (["genrate", "hi"], "'genrate': no such command; did you mean generate?"),
        (["xyz"], "'xyz': no such command; choose from demo, chat, generate"),
        (
            ["train", "head", "--target", "x", "--data", "x", "--out", "x", "--stop-after", "never"],
            "--stop-after: 'never' is no choice of it; choose from prompts, samples",
        ),
        (["generate", "x", "--choice", "a", "b"], "an option again for each of several values"),
        (
            ["generate", "Once", "upon", "a", "time"],
            "'upon': peregrine generate expects no such argument; write a text",
        ),
        (["generate", "--top-k", "few"], "--top-k: 'few' is not a whole number; peregrine generate --help lists all"),
        (["generate", "--temperature", "hot"], "--temperature: 'hot' is not a number; "),
        (["generate", "--num-drafts", "autoo"], "--num-drafts: 'autoo' is neither a whole number nor none or auto; "),
        (["bench", "throughput", "--input-len", "0"], "--input-len: 0 is too small; pass 1 or more; "),
        (["bench", "latency", "--batch-size", "0"], "--batch-size: 0 is too small; pass 1 or more; "),
        (["bench", "latency", "--num-iters-warmup", "-1"], "--num-iters-warmup: -1 is too small; pass 0 or more; "),
        (["bench", "offline", "--rows", "1", "0"], "--rows: 0 is too small; pass 1 or more; "),
        (["bench", "http", "--temperature", "nan"], "--temperature: nan is too small; pass 0 or more; "),
        (["bench", "serve", "--url", "http://x", "--concurrency", "0"], "--concurrency: 0 is too small; "),
        (["batch", "in", "out", "--processes", "0"], "--processes: 0 is too small; pass 1 or more; "),
        (["train", "merlin", "data", "--out", "x", "--steps", "0"], "--steps: 0 is too small; pass 1 or more; "),
        (["doctor", "--tensor-parallel", "9"], "tensor_parallel=9: depends on the model; pass --model, too"),
        (["batch", "in.jsonl"], "the following arguments are required: OUT"),
        (["--versoin"], "--versoin: peregrine has no such option; did you mean --version?"),
    ],
)
def test_a_mistake_is_one_line_with_what_was_meant(peregrine: Run, argv: list[str], said: str) -> None:
    code, out, err = peregrine(*argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_wrong_log_level_is_refused(monkeypatch: pytest.MonkeyPatch, peregrine: Run) -> None:
    monkeypatch.setenv("PEREGRINE_LOG", "chatty")
    code, _, err = peregrine("doctor")
    assert code == 2
    assert err.startswith("error: PEREGRINE_LOG='chatty'")


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, peregrine: Run) -> None:
    monkeypatch.setattr("peregrine.cli.generate.read_prompt", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        peregrine("generate", "hi")


def test_interruption_is_quiet(monkeypatch: pytest.MonkeyPatch, peregrine: Run) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("peregrine.cli.generate.read_prompt", interrupt)
    assert peregrine("generate", "hi") == (130, "", "")


def test_bench_passes_its_plan_and_the_engine_options_on(
    monkeypatch: pytest.MonkeyPatch, peregrine: Run, tmp_path: Path
) -> None:
    seen: list[object] = []
    monkeypatch.setattr("peregrine.bench.offline.run", lambda plan, options: seen.append((plan, options)) or {"a": 1})
    file = tmp_path / "new" / "result.json"
    argv = ["--rows", "1", "4", "--tokens", "9", "--drafter", "ngram", "--json", "--out", str(file)]
    code, out, _ = peregrine("bench", "offline", *argv)
    [(plan, options)] = seen
    assert code == 0
    assert (plan.rows, plan.tokens) == ((1, 4), 9)
    assert options == {"drafter": "ngram"}
    written = json.loads(file.read_text())
    assert json.loads(out) == written
    assert written["command"].split()[0] == "peregrine"
    assert written["a"] == 1
