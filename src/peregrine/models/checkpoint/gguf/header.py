"""The header of a GGUF file: metadata, and where each tensor lies.

Every length is compared with the file's size before it is believed, so a truncated or corrupted file is refused before
memory is taken for it. Numbers are little-endian; float32 values are read as the shortest decimal that means them.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peregrine.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
# ggml's number of a type -> (name, weights in a block, bytes of a block): the types that are read.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
# Types that files hold and this engine does not read, for the refusal.
_OTHER_TYPES = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}
# Metadata's number of a type -> struct's letter; 8 and 9 are texts and arrays.
_SCALARS = {i: letter for i, letter in enumerate("BbHhIif?__Qqd") if letter != "_"}
_TEXT, _ARRAY = 8, 9

Place = tuple[str, tuple[int, ...], int, int]  # name, shape, type and offset of a tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the file: its shape in rows first, its number format, and its bytes."""

    shape: tuple[int, ...]
    kind: str
    start: int  # of its bytes in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says about itself."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]
    unread: dict[str, str]  # tensors in a number format that is not read, with its name


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file: by its ending or by its first bytes."""
    path = Path(path)
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_header(path: str | Path) -> Header:
    """The header of a GGUF file; CheckpointError says what is wrong with it."""
    path = Path(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).read()
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{str(path)!r} cannot be read ({error}); download it again") from error


class _Reader:
    """A place in the file that moves on with what is read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def read(self) -> Header:
        if self._take(4) != MAGIC:
            raise self._refusal("is no GGUF file, which begins with the letters GGUF", "download it again")
        version = self._number("I")
        if version not in VERSIONS:
            raise self._refusal(f"version {version} is not read; versions {VERSIONS} are", "convert the model again")
        num_tensors, num_fields = self._count("tensors", 24), self._count("metadata fields", 13)
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text()
            metadata[name] = self._value(self._number("I"), name)
        places = [self._place() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._refusal(f"general.alignment={alignment!r} is no power of two", "download the file again")
        return self._header(metadata, places, -(-self.at // alignment) * alignment)

    def _header(
        self, metadata: dict[str, Any], places: list[tuple[str, tuple[int, ...], int, int]], data: int
    ) -> Header:
        tensors: dict[str, Stored] = {}
        unread: dict[str, str] = {}
        for name, shape, number, offset in places:
            if number not in TYPES:
                unread[name] = _OTHER_TYPES.get(number, f"type {number}")
                continue
            kind, weights, size = TYPES[number]
            if name in tensors or shape[-1] % weights:
                problem = "is there twice" if name in tensors else f"has rows of {shape[-1]}, not whole {kind} blocks"
                raise self._refusal(f"tensor {name!r} {problem}", "download the file again")
            stored = Stored(shape, kind, data + offset, math.prod(shape) // weights * size)
            if stored.start + stored.num_bytes > len(self.data):
                missing = stored.start + stored.num_bytes - len(self.data)
                problem = f"tensor {name!r} ends {missing} bytes past the end of the file: it is truncated"
                raise self._refusal(problem, "download the file again")
            tensors[name] = stored
        return Header(self.path, metadata, tensors, unread)

    def _place(self) -> Place:
        """A tensor's name, shape, type and offset; the file lists dimensions innermost first."""
        name, num_dims = self._text(), self._number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._refusal(f"tensor {name!r} has {num_dims} dimensions", "download the file again")
        shape = tuple(self._number("Q") for _ in range(num_dims))[::-1]
        if 0 in shape:
            raise self._refusal(f"tensor {name!r} has shape {list(shape)}", "download the file again")
        return name, shape, self._number("I"), self._number("Q")

    def _value(self, kind: int, name: str) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            return self._array(name)
        letter = _SCALARS.get(kind)
        if letter is None:
            raise self._refusal(f"metadata field {name!r} has the unknown type {kind}", "download the file again")
        return self._shortest(self._number(letter), letter)

    def _array(self, name: str) -> list[Any]:
        kind = self._number("I")
        if kind == _TEXT:
            return [self._text() for _ in range(self._count(name, 8))]
        letter = _SCALARS.get(kind)
        if letter is None:
            raise self._refusal(f"metadata field {name!r} is an array of the unknown type {kind}", "download it again")
        size = struct.calcsize(f"<{letter}")
        count = self._count(name, size)
        return list(struct.unpack(f"<{count}{letter}", self._take(count * size)))

    def _count(self, what: str, smallest: int) -> int:
        """How many of something follow, each of at least `smallest` bytes; refused if the file is too short."""
        count: int = self._number("Q")
        if count * smallest > len(self.data) - self.at:
            raise self._refusal(
                f"{count} {what} do not fit the file: it is truncated or corrupted", "download it again"
            )
        return count

    def _text(self) -> str:
        raw = self._take(self._count("characters of a text", 1))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._refusal(f"a text at byte {self.at - len(raw)} is not UTF-8", "download it again") from error

    def _number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]

    @staticmethod
    def _shortest(value: Any, letter: str) -> Any:
        return float(str(np.float32(value))) if letter == "f" else value

    def _take(self, size: int) -> bytes:
        if self.at + size > len(self.data):
            raise self._refusal("the file ends inside its header: it is truncated", "download it again")
        self.at += size
        return self.data[self.at - size : self.at]

    def _refusal(self, problem: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"{str(self.path)!r}: {problem}; {remedy}")
