"""The one logger, and text styles for terminals. Environment read here: PEREGRINE_LOG, NO_COLOR, TERM."""

import logging
import os
import queue
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from peregrine.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
STYLES = {"bold": 1, "dim": 2, "underline": 4, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
COLOURS = {name for name, code in STYLES.items() if code >= 30}  # NO_COLOR turns these off, and no other style
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # C0 without tab and line feed, delete, C1
LEVEL_STYLES = {"DEBUG": "dim", "INFO": "cyan", "WARNING": "yellow", "ERROR": "red"}

logger = logging.getLogger("peregrine")


def style(text: str, *names: str, stream: TextIO | None = None) -> str:
    """`text` in the named styles where `stream` (stdout unless given) is a terminal, else `text` as it is."""
    stream = sys.stdout if stream is None else stream
    kept = [name for name in names if name not in COLOURS or not os.environ.get("NO_COLOR")]
    codes = ";".join(str(STYLES[name]) for name in kept)
    if not text or not codes or not is_terminal(stream):
        return text
    return f"\033[{codes}m{text}\033[0m"


def visible(text: str, stream: TextIO | None = None) -> str:
    """Foreign text for `stream` (stdout unless given): on a terminal, control characters are shown and not obeyed.

    A model can write escape sequences, which move the cursor, rename the window or answer in the user's name. A pipe or
    a file gets the text as it is: what reads it is a program that wants the exact text.
    """
    return CONTROL.sub(control_picture, text) if (sys.stdout if stream is None else stream).isatty() else text


def control_picture(found: re.Match[str]) -> str:
    """The printable stand-in of a control character."""
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "\N{SYMBOL FOR DELETE}" if code == 0x7F else f"\\x{code:02x}"


def is_terminal(stream: TextIO) -> bool:
    """Whether the stream is a terminal that understands escape codes."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def start_logging(default: str = "warning") -> None:
    """Send the logger to stderr, at the level PEREGRINE_LOG names (else `default`). Safe to call again."""
    level = os.environ.get("PEREGRINE_LOG", "").strip().lower() or default
    if level not in LEVELS:
        raise ConfigError(f"PEREGRINE_LOG={level!r}: no such level; choose one of {', '.join(LEVELS)}")
    logger.setLevel(level.upper())
    if not any(isinstance(handler.formatter, LineFormatter) for handler in logger.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(LineFormatter())
        logger.addHandler(handler)
        logger.propagate = False


@contextmanager
def background_logging() -> Iterator[None]:
    """Inside the block a thread writes what is logged: a reader of stderr that has stopped reading holds nobody."""
    before, handler = list(logger.handlers), BackgroundHandler(list(logger.handlers))
    logger.handlers[:] = [handler]
    try:
        yield
    finally:
        logger.handlers[:] = before
        handler.end()


class BackgroundHandler(logging.Handler):
    """Hands records to a thread that writes them; when it cannot keep up, records are dropped."""

    def __init__(self, handlers: list[logging.Handler], most: int = 1000, end_seconds: float = 1.0) -> None:
        super().__init__()
        self._handlers, self._end_seconds = handlers, end_seconds
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(most)
        self._thread = threading.Thread(target=self._write, name="peregrine-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(queue.Full):
            self._records.put_nowait(record)

    def end(self) -> None:
        """Write what is left, if that takes no longer than a moment."""
        with suppress(queue.Full):
            self._records.put(None, timeout=self._end_seconds)
            self._thread.join(self._end_seconds)

    def _write(self) -> None:
        while (record := self._records.get()) is not None:
            for handler in self._handlers:
                handler.handle(record)


class LineFormatter(logging.Formatter):
    """`12:30:01 warning: text`, the level coloured on a terminal; a traceback follows where there is one."""

    def __init__(self) -> None:
        super().__init__(fmt="%(asctime)s %(levelname)s: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        colour = LEVEL_STYLES.get(record.levelname, "red")
        level = style(record.levelname.lower(), colour, stream=sys.stderr)
        return f"{record.asctime} {level}: {visible(record.message, sys.stderr)}"
