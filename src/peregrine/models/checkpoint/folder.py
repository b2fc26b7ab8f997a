"""A checkpoint folder's JSON files, read field by field.

A caller names the type it expects; a value that does not fit is refused with the file, the field, the value and the
remedy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peregrine.errors import CheckpointError, shown
from peregrine.files import read_object
from peregrine.models.checkpoint.gguf.header import is_gguf

MAX_WHOLE = 2**31 - 1  # more than any size of a model
SMALLEST, LARGEST = 1e-30, 1e30  # of a positive number that float32 can compute with


def open_folder(folder: str | Path) -> Path:
    """The folder or GGUF file as a path; refused if it is not there or is another kind of file."""
    path = Path(folder)
    try:
        found = path.exists()
    except OSError as error:
        raise CheckpointError(
            f"model folder {str(path)!r} cannot be read ({error.strerror}); check its permissions"
        ) from error
    if not found:
        raise CheckpointError(f"model folder {str(path)!r} does not exist; check the path or download it first")
    if not path.is_dir() and not is_gguf(path):
        raise CheckpointError(
            f"model folder {str(path)!r} is a file; give the folder that holds config.json and the weights, "
            "or a GGUF file"
        )
    return path


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object, and the file it came from for messages."""

    source: str
    values: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Fields":
        """The fields of a JSON file."""
        return cls(str(path), read_object(path))

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str, default: object) -> Any:
        """The value of a field; the default where it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def refusal(self, name: str, problem: str, remedy: str) -> CheckpointError:
        """The error that says why this field cannot be honoured."""
        return CheckpointError(f"{self.source}: {name}={shown(self.values.get(name))}: {problem}; {remedy}")

    def whole(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_WHOLE) -> int:
        """A whole number from `minimum` to `maximum`; refused when absent without a default."""
        value = self.get(name, default)
        if value is None:
            raise self.refusal(name, "the field is missing", "the config must give it as a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.refusal(name, f"not a whole number of at least {minimum}", "correct the config")
        if value > maximum:
            raise self.refusal(name, f"is above {maximum}, the most that is supported", "correct the config")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number that float32 can compute with; refused when absent without a default."""
        value = self.get(name, default)
        if value is None:
            raise self.refusal(name, "the field is missing", "the config must give it as a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not SMALLEST <= value <= LARGEST:
            raise self.refusal(name, "not a number above 0 that float32 can hold", "correct the config")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; the default when absent."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "neither true nor false", "correct the config")
        return value

    def text(self, name: str, default: str) -> str:
        """A string; the default when absent."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise self.refusal(name, "not a string", "correct the config")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.refusal(name, "not a list of strings", "correct the config")
        return tuple(value)

    def wholes(self, name: str, minimum: int = 0) -> tuple[int, ...]:
        """A whole number or a list of them, as a tuple; empty when absent."""
        value = self.get(name, [])
        value = value if isinstance(value, list) else [value]
        if not all(
            isinstance(entry, int) and not isinstance(entry, bool) and minimum <= entry <= MAX_WHOLE for entry in value
        ):
            raise self.refusal(name, "not a whole number or a list of them", "correct the config")
        return tuple(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers above zero; empty when absent."""
        value = self.get(name, [])
        kinds = isinstance(value, list) and all(type(entry) in (int, float) for entry in value)
        if not kinds or not all(SMALLEST <= entry <= LARGEST for entry in value):
            raise self.refusal(name, "not a list of numbers above 0 that float32 can hold", "correct the config")
        return tuple(float(entry) for entry in value)

    def inner(self, name: str) -> "Fields":
        """The JSON object under a field; empty when absent."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.refusal(name, "not a JSON object", "correct the config")
        return Fields(f"{self.source}, {name}", value)
