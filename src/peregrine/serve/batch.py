"""A file of requests through a local engine, in OpenAI's batch format; an interrupted run can be continued.

    in   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    out  {"id": "x", "custom_id": "a", "response": {"status_code": 200, "request_id": "y", "body": {}}, "error": null}

Responses are written in the order they are finished. A request that is refused has its refusal as its response. An
answer's id says which request it answers, and by which model (`batch_identity.py`).
"""

import json
import queue
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from tqdm import tqdm

from peregrine.engine.loop import Sink
from peregrine.engine.request import Delta
from peregrine.errors import ConfigError, EngineFault, PeregrineError, RequestError
from peregrine.llm import LLM
from peregrine.serve.batch_identity import answer_id
from peregrine.serve.batch_output import BatchOutput
from peregrine.serve.choices import Json
from peregrine.serve.errors import ApiError, api_error, body_error
from peregrine.serve.job import named_as_in
from peregrine.serve.responses import ENDPOINTS, ResponseWriter

FIELDS = {"custom_id", "method", "url", "body"}
ROWS_AHEAD = 2  # generations submitted to the engine, per row: its queue never runs dry


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that the engine has."""

    custom_id: str
    writer: ResponseWriter
    deltas: list[list[Delta]]  # of each generation, so far

    @property
    def complete(self) -> bool:
        """Whether every generation has ended."""
        return all(deltas and deltas[-1].output is not None for deltas in self.deltas)


class Batch:
    """Feeds an engine from a file and writes what comes back."""

    def __init__(self, source: Path, output: BatchOutput, llm: LLM, name: str, wanted: Mapping[str, str]) -> None:
        """`wanted` has the id of an answer to each request (`check_source`)."""
        self.source, self.output, self.llm, self.name, self.wanted = source, output, llm, name, wanted
        self._num_open = 0  # generations the engine has and has not ended
        self._num_tokens = 0
        self._queue: queue.SimpleQueue[tuple[Entry, int, Delta | EngineFault]] = queue.SimpleQueue()

    def run(self) -> None:
        """Answer every request that has no line yet."""
        room = ROWS_AHEAD * self.llm.engine.policy.max_rows
        start = time.perf_counter()
        with tqdm(total=len(self.wanted), initial=len(self.output.answers), unit="request", disable=None) as bar:
            for request in read_requests(self.source):
                if request["custom_id"] not in self.output.answers:
                    bar.update(self._submit(request))
                while self._num_open >= room:
                    bar.update(self._collect())
                    bar.set_postfix_str(f"{self._num_tokens / (time.perf_counter() - start):.0f} tokens/s")
            while self._num_open:
                bar.update(self._collect())

    def _submit(self, request: Json) -> int:
        """Hand a request to the engine; returns the number of lines written: 1 if it was refused, else 0."""
        custom_id = str(request["custom_id"])
        try:
            writer = writer_of(request, self.name, self.llm)
            job = writer.job
            entry = Entry(custom_id, writer, [[] for _ in range(job.size)])
            with named_as_in(job.body):
                for index in range(job.size):
                    self.llm.loop.submit(*job.generation(index), self._sink(entry, index))
                    self._num_open += 1
        except EngineFault:
            raise
        except PeregrineError as error:
            self.output.append([self._refusal(custom_id, error)])
            return 1
        return 0

    def _sink(self, entry: Entry, index: int) -> Sink:
        return lambda delta: self._queue.put((entry, index, delta))

    def _collect(self) -> int:
        """Wait for deltas, take all there are, and write the requests they complete; returns how many."""
        lines = []
        while True:
            entry, index, delta = self._queue.get()
            if isinstance(delta, EngineFault):
                raise delta
            entry.deltas[index].append(delta)
            self._num_tokens += len(delta.token_ids)
            self._num_open -= delta.output is not None
            if entry.complete:
                lines.append(self._line(entry))
            if self._queue.empty():
                break
        if lines:
            self.output.append(lines)
        return len(lines)

    def _line(self, entry: Entry) -> Json:
        try:
            return self._response(entry.custom_id, 200, entry.writer.whole(entry.deltas))
        except ApiError as error:  # this request's own, such as logits that hold NaN
            return self._refusal(entry.custom_id, error)

    def _refusal(self, custom_id: str, error: PeregrineError) -> Json:
        refusal = api_error(error)
        return self._response(custom_id, refusal.status, refusal.body())

    def _response(self, custom_id: str, status: int, body: Json) -> Json:
        response = {"status_code": status, "request_id": f"req_{secrets.token_hex(12)}", "body": body}
        return {"id": self.wanted[custom_id], "custom_id": custom_id, "response": response, "error": None}


def writer_of(request: Json, name: str, llm: LLM) -> ResponseWriter:
    """The request of one line, ready for the engine; PeregrineError if it is refused."""
    body, url = request["body"], request["url"]
    if request["method"] != "POST":
        raise RequestError("method", request["method"], "is not POST", "use POST")
    if isinstance(body, dict) and body.get("stream"):
        raise RequestError("stream", body["stream"], "is for connections, not for files", "leave it out")
    if isinstance(body, dict) and body.get("model") not in (None, name):
        message = f"model={body['model']!r}: is not loaded; use {name!r}, or leave it out"
        raise ApiError(404, message, "model", "model_not_found")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise ApiError(404, f"url={url!r}: is not one of {' and '.join(ENDPOINTS)}", "url")
    try:
        return ResponseWriter(ENDPOINTS[url], ENDPOINTS[url].body.model_validate(body), llm, name)
    except ValidationError as error:
        raise body_error(error.errors()) from error


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
