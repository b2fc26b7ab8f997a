"""A checkpoint folder's JSON files, read field by field.

A caller names the type it expects; a value that does not fit is refused with the file, the field, the value and the
remedy.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peregrine.errors import CheckpointError


def open_folder(folder: str | Path) -> Path:
    """The folder as a path; refused if it is not there or is not a folder."""
    path = Path(folder)
    try:
        found = path.exists()
    except OSError as error:
        raise CheckpointError(
            f"model folder {str(path)!r} cannot be read ({error.strerror}); check its permissions"
        ) from error
    if not found:
        raise CheckpointError(f"model folder {str(path)!r} does not exist; check the path or download it first")
    if not path.is_dir():
        raise CheckpointError(
            f"model folder {str(path)!r} is a file; give the folder that holds config.json and the weights"
        )
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; refused if the file is missing, unreadable, or holds anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no {path.name} in {str(path.parent)!r}; give a folder in Hugging Face format") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {str(path)!r} ({error.strerror}); check its permissions") from error
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is not valid JSON ({error}); download the checkpoint again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{str(path)!r} holds a JSON {type(values).__name__}, not an object; it is no config")
    return values


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object, and the file it came from for messages."""

    source: str
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """The fields of a JSON file."""
        return cls(str(path), read_json(path))

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def refusal(self, name: str, problem: str, remedy: str) -> CheckpointError:
        """The error that says why this field cannot be honoured."""
        shown = repr(self.values.get(name))
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return CheckpointError(f"{self.source}: {name}={shown}: {problem}; {remedy}")

    def whole(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; refused when absent without a default."""
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.refusal(name, "the field is missing", "the config must give it as a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.refusal(name, f"not a whole number of at least {minimum}", "correct the config")
        return value

    def number(self, name: str, default: float | None = None, minimum: float = 0.0) -> float:
        """A number above `minimum`; refused when absent without a default."""
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise self.refusal(name, "the field is missing", "the config must give it as a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > minimum:
            raise self.refusal(name, f"not a number above {minimum:g}", "correct the config")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; the default when absent."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refusal(name, "neither true nor false", "correct the config")
        return value

    def text(self, name: str, default: str) -> str:
        """A string; the default when absent."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.refusal(name, "not a string", "correct the config")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        value = self.values.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.refusal(name, "not a list of strings", "correct the config")
        return tuple(value)

    def wholes(self, name: str, minimum: int = 0) -> tuple[int, ...]:
        """A whole number or a list of them, as a tuple; empty when absent."""
        value = self.values.get(name)
        value = [] if value is None else value
        value = value if isinstance(value, list) else [value]
        if not all(isinstance(entry, int) and not isinstance(entry, bool) and entry >= minimum for entry in value):
            raise self.refusal(name, "not a whole number or a list of them", "correct the config")
        return tuple(value)

    def inner(self, name: str) -> "Fields":
        """The JSON object under a field; empty when absent."""
        value = self.values.get(name)
        value = {} if value is None else value
        if not isinstance(value, dict):
            raise self.refusal(name, "not a JSON object", "correct the config")
        return Fields(f"{self.source}, {name}", value)
