"""The output file of a batch: whole lines, each on the disk before it counts, so that a kill loses and repeats none."""

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path

from peregrine.errors import ConfigError


class BatchOutput:
    """Appends lines and knows which requests have one; locked, so that one process writes it at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error}); name another file") from error
        try:
            self._lock()
            self._drop_torn_line()
            self.finished = self._read_ids()
        except BaseException:
            os.close(self._file)
            raise
        sync_folder(path)

    def append(self, lines: Sequence[dict[str, object]]) -> None:
        """Write whole lines; they are on the disk when this returns."""
        written = memoryview("".join(json.dumps(line) + "\n" for line in lines).encode())
        while written:
            written = written[os.write(self._file, written) :]
        os.fsync(self._file)
        self.finished.update(str(line["custom_id"]) for line in lines)

    def __enter__(self) -> "BatchOutput":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{self.path}: another batch is writing it; wait for that one") from error

    def _drop_torn_line(self) -> None:
        """Cut off a last line without its line break: a kill interrupted it, and it never counted."""
        with self.path.open("rb") as file:
            whole = sum(len(line) for line in file if line.endswith(b"\n"))
        os.ftruncate(self._file, whole)
        os.fsync(self._file)

    def _read_ids(self) -> set[str]:
        finished = set()
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    finished.add(str(json.loads(line)["custom_id"]))
                except (ValueError, KeyError, TypeError) as error:
                    problem = "is not a line of a batch's output"
                    raise ConfigError(f"{self.path}, line {number}: {problem}; name another file") from error
        return finished


def sync_folder(path: Path) -> None:
    """Bring the folder's entry of a new file to the disk."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
