"""A file of requests through engines, in OpenAI's batch format; an interrupted run can be continued.

    in   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    out  {"id": "x", "custom_id": "a", "response": {"status_code": 200, "request_id": "y", "body": {}}, "error": null}

Responses are written as they are finished, and put into the order of the requests when all are there. A request that
is refused has its refusal as its response. An answer's id says which request it answers, and by which model
(`batch_identity.py`). Of either file only names are held in memory.
"""

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from peregrine.errors import ConfigError
from peregrine.serve.batch_engines import Answer, Engines
from peregrine.serve.batch_identity import answer_id
from peregrine.serve.batch_output import BatchOutput
from peregrine.serve.choices import Json

FIELDS = {"custom_id", "method", "url", "body"}


class Batch:
    """Feeds engines from a file and writes what comes back."""

    def __init__(self, source: Path, output: BatchOutput, engines: Engines, wanted: Mapping[str, str]) -> None:
        """`wanted` has the id of an answer to each request (`check_source`), in the order of the file."""
        self.source, self.output, self.engines, self.wanted = source, output, engines, wanted

    def run(self) -> None:
        """Answer every request that has no line yet, then put the lines into the order of the requests."""
        start = time.perf_counter()
        with tqdm(total=len(self.wanted), initial=len(self.output.answers), unit="request", disable=None) as bar:

            def write(answers: Sequence[Answer]) -> None:
                self.output.append([self._line(answer) for answer in answers])
                bar.update(len(answers))
                bar.set_postfix_str(f"{self.engines.num_tokens / (time.perf_counter() - start):.0f} tokens/s")

            for request in read_requests(self.source):
                if request["custom_id"] in self.wanted and request["custom_id"] not in self.output.answers:
                    write(self.engines.submit(request))
                while not self.engines.has_room:
                    write(self.engines.collect())
            while self.engines.num_open:
                write(self.engines.collect())
        self.output.sort(self.wanted)

    def _line(self, answer: Answer) -> Json:
        response = {"status_code": answer.status, "request_id": f"req_{secrets.token_hex(12)}", "body": answer.body}
        return {"id": self.wanted[answer.custom_id], "custom_id": answer.custom_id, "response": response, "error": None}


def read_requests(source: Path) -> Iterator[Json]:
    """The requests of a file, in order; ConfigError names the first line that is not a request."""
    try:
        with source.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield check_request(line, f"{source}, line {number}")
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error}); check the path") from error


def check_request(line: bytes, place: str) -> Json:
    """A line as an object with the four fields; its body is not looked at."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: is not JSON ({error}); write one object in a line") from error
    if not isinstance(request, dict) or set(request) != FIELDS:
        raise ConfigError(f"{place}: is not an object with the fields {', '.join(sorted(FIELDS))}")
    if not isinstance(request["custom_id"], str) or not request["custom_id"]:
        raise ConfigError(f"{place}: custom_id={request['custom_id']!r}: is not a name; use a string")
    return request


def check_source(source: Path, served: str) -> dict[str, str]:
    """By custom_id: the id of an answer by what is `served`; ConfigError if the file is not a batch."""
    if source.exists() and not source.is_file():  # it is read twice
        raise ConfigError(f"{source}: is not a regular file; write the requests to one")
    wanted: dict[str, str] = {}
    for request in read_requests(source):
        custom_id = str(request["custom_id"])
        if custom_id in wanted:
            raise ConfigError(f"{source}: custom_id={custom_id!r} is there twice; rename one")
        wanted[custom_id] = answer_id(request, served)
    return wanted
