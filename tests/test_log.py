"""Styles are used on terminals only, and PEREGRINE_LOG sets the log level."""

import io
import logging
import threading
from collections.abc import Iterator

import pytest

from peregrine.errors import ConfigError
from peregrine.log import background_logging, logger, start_logging, style


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def fresh_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("PEREGRINE_LOG", raising=False)
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers.clear()
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_a_terminal_gets_codes_and_a_pipe_does_not() -> None:
    assert style("x", "red", "underline", stream=Terminal()) == "\033[31;4mx\033[0m"
    assert style("x", "red", "underline", stream=io.StringIO()) == "x"


def test_no_color_drops_colour_but_not_underline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert style("x", "red", "underline", stream=Terminal()) == "\033[4mx\033[0m"
    assert style("x", "red", stream=Terminal()) == "x"


def test_dumb_terminal_and_empty_text_get_no_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert style("", "red", stream=Terminal()) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert style("x", "red", stream=Terminal()) == "x"


def test_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    start_logging()
    logger.info("quiet")
    monkeypatch.setenv("PEREGRINE_LOG", "Info")
    start_logging()
    logging.getLogger("peregrine.engine").info("loud")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(" info: loud")


def test_unknown_level_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEREGRINE_LOG", "loud")
    with pytest.raises(ConfigError, match=r"PEREGRINE_LOG='loud'.*debug, info, warning, error"):
        start_logging()


def test_a_log_that_nobody_reads_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing to a full pipe blocks; the event loop of a server must not."""
    go_on, written = threading.Event(), list[str]()

    class Pipe(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            go_on.wait()
            written.append(record.getMessage())

    pipe = Pipe()
    monkeypatch.setattr(logger, "handlers", [pipe])  # other tests may have left handlers of their own
    logger.setLevel(logging.INFO)
    with background_logging():
        for number in range(3000):  # far more than a pipe or the queue holds
            logger.info("line %d", number)
        go_on.set()
    assert written[:2] == ["line 0", "line 1"]
    assert logger.handlers == [pipe]
