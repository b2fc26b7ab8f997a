"""Every error Peregrine raises on purpose, with messages a user can act on."""

import importlib.util
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_SHOWN = 80  # characters of a value in a message
MAX_NAME = 200  # and of the name of a field


def shown(value: object) -> str:
    """The value as a message shows it: one short line."""
    try:
        text = repr(beginning(value))
    except Exception:  # a number of many thousand digits, or an object of the caller's
        text = f"<{type(value).__name__}>"
    text = text.replace("\n", " ")
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def beginning(value: object, levels: int = 2) -> object:
    """As much of a value as a message can show; to write all of a large one would take long."""
    match value:
        case str() | bytes():
            return value[:MAX_SHOWN]
        case list() | tuple() | dict() if not levels:
            return ...
        case list() | tuple():
            items = [beginning(item, levels - 1) for item in value[:MAX_SHOWN]]
            return items if isinstance(value, list) else tuple(items)
        case dict():
            return {key: beginning(item, levels - 1) for key, item in itertools.islice(value.items(), MAX_SHOWN)}
    return value


class PeregrineError(Exception):
    """Base class; the message is written for the user."""


class ConfigError(PeregrineError, ValueError):
    """An engine option that cannot be honoured."""


class CheckpointError(PeregrineError):
    """A model folder that cannot be loaded: missing, malformed, unsupported, or not matching its config."""


class OutOfPages(PeregrineError):
    """Fewer free pages than were asked for; none were taken."""


class EngineFault(PeregrineError):
    """The engine itself failed; requests in flight end with this reason."""


def short_name(field: str) -> str:
    """A field's name in one short line: clients choose some of them."""
    name = field if field.isprintable() else field.encode("unicode_escape").decode()
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}..."


class RequestError(PeregrineError, ValueError):
    """A request refused at admission: which field, what it held, and what to do instead."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        field = short_name(field)
        super().__init__(f"{field}={shown(value)}: {problem}; {remedy}")
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy


def need_packages(*names: str, instead: str = "") -> None:
    """Refuse in one line where optional packages are not installed; `instead` is what also helps.

    The line names the packages themselves, which is right in a clone and beside a wheel alike.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed; run: pip install {' '.join(missing)}{instead}")


@contextmanager
def reading_utf8(what: str) -> Iterator[None]:
    """Refuse text in another encoding that is read inside the block."""
    try:
        yield
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x} at {error.start}"
        remedy = "convert it, such as with iconv -f LATIN1 -t UTF-8"
        raise ConfigError(f"{what}: is not UTF-8 ({byte}); {remedy}") from error


def read_user_text(field: str, path: Path) -> str:
    """The text of a file that the user named, without a byte order mark; ConfigError says what is wrong with it."""
    with reading_utf8(f"{field}={str(path)!r}"):
        try:
            return path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise ConfigError(f"{field}={str(path)!r}: cannot be read ({error.strerror}); check the path") from error
