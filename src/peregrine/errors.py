"""Every error Peregrine raises on purpose, with messages a user can act on."""

import importlib.util


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


class RequestError(PeregrineError, ValueError):
    """A request refused at admission: which field, what it held, and what to do instead."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        super().__init__(f"{field}={shown}: {problem}; {remedy}")
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy


def need_packages(*names: str, instead: str = "") -> None:
    """Refuse in one line where optional packages are not installed; `instead` is what also helps.

    The line names the packages themselves, which is right in a clone and beside a wheel alike.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed; run: pip install {' '.join(missing)}{instead}")
