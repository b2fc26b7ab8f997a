"""The output file of a batch: whole lines, each on the disk before it counts, so that a kill loses and repeats none.

An answer's `id` is a hash of what it answers (`batch_identity.py`), so the file itself says whether a line answers the
request of its `custom_id` as it is asked now. A file is not changed before all of it was found to be ours.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peregrine.errors import ConfigError
from peregrine.serve.batch_identity import ID_PREFIX

LINE_START = f'{{"id": "{ID_PREFIX}'.encode()  # of every line that this module writes


@dataclass(frozen=True, slots=True)
class Answer:
    """What a line of the file says."""

    custom_id: str
    id: str
    refused: bool


class BatchOutput:
    """Appends lines and knows which requests have one; locked, so that one process writes it at a time."""

    def __init__(self, path: Path) -> None:
        """Open and read the file, which is left as it is."""
        self.path = path
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: is not a regular file; name another one")
        try:
            self._files = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)]
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error}); name another file") from error
        try:
            self._lock()
            self.answers, self._whole_bytes = self._read()
        except BaseException:
            self.__exit__()
            raise

    @property
    def num_refused(self) -> int:
        """How many answers are refusals."""
        return sum(answer.refused for answer in self.answers.values())

    def resume(self, wanted: Mapping[str, str], redo: bool = False) -> None:
        """Make the file ready to be continued; `wanted` has the id of an answer to each request.

        A line of a request that is not asked is refused, and so is an answer to something else than what is asked now,
        unless `redo`: then such answers are dropped, and refusals, too, so that both are asked again.
        """
        strange = [name for name in self.answers if name not in wanted]
        stale = [name for name, answer in self.answers.items() if answer.id != wanted.get(name)]
        if strange:
            raise ConfigError(f"{self.path}: answers {strange[0]!r}, which is not asked; name another output file")
        if stale and not redo:
            raise ConfigError(
                f"{self.path}: body, model, data type or sampling defaults have changed since it answered {len(stale)} "
                f"of the requests ({stale[0]!r} first); name another output file, or pass --redo to ask those again"
            )
        dropped = {name for name, answer in self.answers.items() if answer.refused} | set(stale) if redo else set()
        if dropped:
            self._rewrite([name for name in self.answers if name not in dropped])
        else:  # a last line without its line break was interrupted by a kill and never counted
            os.ftruncate(self._files[-1], self._whole_bytes)
            os.fsync(self._files[-1])
        sync_folder(self.path)

    def sort(self, order: Collection[str]) -> None:
        """Put the lines into this order, once all of these have one; a file that is in order is left as it is."""
        names = list(order)
        if list(self.answers) != names:
            self._rewrite(names)
            sync_folder(self.path)

    def append(self, lines: Sequence[dict[str, object]]) -> None:
        """Write whole lines; they are on the disk when this returns."""
        written = "".join(json.dumps(line) + "\n" for line in lines).encode()
        write_all(self._files[-1], written)
        self.answers.update((made.custom_id, made) for line in written.splitlines() if (made := parse_answer(line)))

    def __enter__(self) -> "BatchOutput":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            os.close(file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"{self.path}: another batch is writing it; wait for that one") from error

    def _read(self) -> tuple[dict[str, Answer], int]:
        """The answers by custom_id, and the bytes of whole lines; ConfigError names a line that is not ours."""
        answers: dict[str, Answer] = {}
        whole_bytes = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                place = f"{self.path}, line {number}"
                if not line.endswith(b"\n") and (line.startswith(LINE_START) or LINE_START.startswith(line)):
                    break  # torn; only the last line can be
                answer = parse_answer(line) if line.endswith(b"\n") else None
                if answer is None:
                    raise ConfigError(f"{place}: is not a line of a batch's output; name another file")
                if answer.custom_id in answers:
                    raise ConfigError(f"{place}: answers {answer.custom_id!r} again; name another file")
                answers[answer.custom_id] = answer
                whole_bytes += len(line)
        return answers, whole_bytes

    def _rewrite(self, names: Collection[str]) -> None:
        """Replace the file by one with these answers alone, in this order, at once; the old one stays locked."""
        path = self.path.resolve()
        made, written = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        self._files.append(made)
        self._lock()
        try:
            with path.open("rb") as file:
                places: dict[str, int] = {}  # where the line of an answer begins
                while line := file.readline():
                    answer = parse_answer(line) if line.endswith(b"\n") else None
                    if answer is not None:
                        places[answer.custom_id] = file.tell() - len(line)
                for name in names:
                    file.seek(places[name])
                    write_all(made, file.readline(), sync=False)
            os.fchmod(made, os.fstat(self._files[0]).st_mode & 0o777)
            os.fsync(made)
            os.replace(written, path)
        except BaseException:
            os.unlink(written)
            raise
        self.answers = {name: self.answers[name] for name in names}


def parse_answer(line: bytes) -> Answer | None:
    """A line of a batch's output; None if it is something else."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    match fields:
        case {
            "id": str(id),
            "custom_id": str(custom_id),
            "response": {"status_code": int(status), "request_id": str(), "body": _},
            "error": None,
        } if len(fields) == 4 and id.startswith(ID_PREFIX):
            return Answer(custom_id, id, refused=status >= 400)
    return None


def write_all(file: int, data: bytes, sync: bool = True) -> None:
    """Write every byte; with `sync` they are on the disk when this returns."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
    if sync:
        os.fsync(file)


def sync_folder(path: Path) -> None:
    """Bring the folder's entry of a new file to the disk."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
