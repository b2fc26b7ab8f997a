"""The command as a whole: help is instant and teaches, refusals are one line, a bench keeps its flags."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from peregrine.cli.main import build_parser

SRC = Path(__file__).parents[2] / "src"
Run = Callable[..., tuple[int, str, str]]
IMPORTED = """
import sys
from peregrine.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(sorted({"torch", "numpy", "tokenizers", "numba"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("argv", [["--help"], ["generate", "--help"], ["demo", "--help"], ["doctor", "--help"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    command = [sys.executable, "-c", IMPORTED, *argv]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stderr.strip() == "[]"
    assert "examples:" in done.stdout


def test_importing_the_package_does_not_import_torch() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    program = "import sys, peregrine; peregrine.SamplingParams; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_no_command_prints_help(peregrine: Run) -> None:
    code, out, _ = peregrine()
    assert code == 0
    assert "peregrine generate" in out


def test_refusal_is_one_line_and_code_2(calls: object, peregrine: Run) -> None:
    code, out, err = peregrine("generate", "hi", "--device", "toaster")
    assert (code, out) == (2, "")
    assert err == "error: device='toaster': is unknown; choose cpu\n"


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


def test_every_command_has_examples() -> None:
    commands = next(a for a in build_parser()._actions if a.metavar == "COMMAND").choices
    assert isinstance(commands, dict)
    benchmarks = next(a for a in commands["bench"]._actions if a.metavar == "BENCHMARK").choices
    assert isinstance(benchmarks, dict)
    for name, parser in {**commands, "bench": benchmarks["offline"]}.items():
        assert f"peregrine {name}" in parser.epilog
