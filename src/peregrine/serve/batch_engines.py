"""What answers the requests of a batch: an engine in this process, or one in each of several processes."""

import contextlib
import multiprocessing
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

import torch
from pydantic import ValidationError

from peregrine.engine.loop import Sink
from peregrine.engine.output import Delta
from peregrine.errors import EngineFault, PeregrineError, RequestError
from peregrine.llm import LLM
from peregrine.serve.choices import Json
from peregrine.serve.errors import ApiError, api_error, body_error
from peregrine.serve.job import named_as_in
from peregrine.serve.responses import ENDPOINTS, ResponseWriter
from peregrine.threads import usable_cores

ROWS_AHEAD = 2  # generations submitted to an engine, per row: its queue never runs dry
STOP_S = 10  # for a process to end by itself


@dataclass(frozen=True, slots=True)
class Answer:
    """The response to one request."""

    custom_id: str
    status: int
    body: Json
    num_tokens: int = 0


class Engines(Protocol):
    """Takes requests and gives answers, in any order."""

    num_open: int  # what was submitted and has not been answered: generations or requests
    num_tokens: int  # of all answers so far

    @property
    def has_room(self) -> bool:
        """Whether another request should be submitted now."""

    def submit(self, request: Json) -> Sequence[Answer]:
        """Take a request; returns its answer if it is known at once."""

    def collect(self) -> Sequence[Answer]:
        """Wait until something happens, and return the answers that are complete."""


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


class LocalEngine:
    """The engine of this process."""

    def __init__(self, llm: LLM, name: str) -> None:
        """`name` is the model's in bodies."""
        self.llm, self.name = llm, name
        self.num_open = self.num_tokens = 0  # generations; tokens
        self._queue: queue.SimpleQueue[tuple[Entry, int, Delta | EngineFault]] = queue.SimpleQueue()

    @property
    def has_room(self) -> bool:
        return self.num_open < ROWS_AHEAD * self.llm.engine.policy.max_rows

    def submit(self, request: Json) -> Sequence[Answer]:
        """Hand a request to the engine; returns its refusal if it is refused."""
        custom_id = str(request["custom_id"])
        try:
            writer = writer_of(request, self.name, self.llm)
            job = writer.job
            entry = Entry(custom_id, writer, [[] for _ in range(job.size)])
            with named_as_in(job.body):
                for index in range(job.size):
                    self.llm.loop.submit(*job.generation(index), self._sink(entry, index))
                    self.num_open += 1
        except EngineFault:
            raise
        except Exception as error:  # what is no refusal is logged, and costs the other lines nothing
            return [refusal(custom_id, error)]
        return []

    def _sink(self, entry: Entry, index: int) -> Sink:
        return lambda delta: self._queue.put((entry, index, delta))

    def collect(self) -> Sequence[Answer]:
        """Wait for deltas, take all there are, and return the answers they complete."""
        answers = []
        while True:
            entry, index, delta = self._queue.get()
            if isinstance(delta, EngineFault):
                raise delta
            entry.deltas[index].append(delta)
            self.num_tokens += len(delta.token_ids)
            self.num_open -= delta.output is not None
            if entry.complete:
                answers.append(answer_of(entry))
            if self._queue.empty():
                return answers


class EngineProcesses:
    """An engine in each of several processes; a request goes to the one that has the fewest."""

    def __init__(self, count: int, options: dict[str, object], name: str) -> None:
        """Start the processes; they load the model while requests are submitted already."""
        self.num_open = self.num_tokens = 0  # requests; tokens
        context = multiprocessing.get_context("spawn")
        self._open: dict[Connection, int] = {}  # requests of each
        self._processes: dict[Connection, SpawnProcess] = {}
        for index in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=answer_all, args=(theirs, index, count, options, name), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is seen
            self._processes[ours], self._open[ours] = process, 0
        # Every process says how many rows it has once its model is loaded, or why it cannot be.
        self._rows: int = min(self._receive(connection) for connection in self._open)

    @property
    def has_room(self) -> bool:
        return min(self._open.values()) < ROWS_AHEAD * self._rows

    def submit(self, request: Json) -> Sequence[Answer]:
        """Send a request to the process that has the fewest."""
        connection = min(self._open, key=lambda each: self._open[each])
        self._send(connection, request)
        self._open[connection] += 1
        self.num_open += 1
        return []

    def collect(self) -> Sequence[Answer]:
        """Wait for a process to send answers, and return those of all that have."""
        answers: list[Answer] = []
        for connection in wait(list(self._open)):
            assert isinstance(connection, Connection)
            sent: list[Answer] = self._receive(connection)
            self._open[connection] -= len(sent)
            answers += sent
        self.num_open -= len(answers)
        self.num_tokens += sum(answer.num_tokens for answer in answers)
        return answers

    def _send(self, connection: Connection, request: Json) -> None:
        with self._watching(connection):
            connection.send(request)

    def _receive(self, connection: Connection) -> Any:
        with self._watching(connection):
            received = connection.recv()
        if isinstance(received, Exception):
            raise received
        return received

    @contextlib.contextmanager
    def _watching(self, connection: Connection) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            process = self._processes[connection]
            process.join(STOP_S)
            message = f"process {process.pid} of the batch has ended (exit code {process.exitcode}); run it again"
            raise EngineFault(message) from error

    def __enter__(self) -> "EngineProcesses":
        return self

    def __exit__(self, *error: object) -> None:
        for connection, process in self._processes.items():
            connection.close()
            if error[0] is not None:
                process.terminate()
        for process in self._processes.values():
            process.join(STOP_S)
            process.kill()


def answer_all(connection: Connection, index: int, count: int, options: dict[str, object], name: str) -> None:
    """A process of a batch: answer what comes through the connection until it is closed. GPUs are taken in turn."""
    torch.set_num_threads(max(1, usable_cores() // count))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and options.get("device", "auto") in ("auto", "cuda"):
        options["device"] = f"cuda:{index % gpus}"
    inbox: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
    try:
        with LLM(**options) as llm:  # type: ignore[arg-type]
            engine = LocalEngine(llm, name)
            connection.send(llm.engine.policy.max_rows)
            # A thread of its own: neither side may wait to send while the other one does.
            threading.Thread(target=take_in, args=(connection, inbox), daemon=True).start()
            while True:
                while not engine.num_open or not inbox.empty():
                    if (request := inbox.get()) is None:
                        return
                    send_some(connection, engine.submit(request))
                send_some(connection, engine.collect())
    except (BrokenPipeError, KeyboardInterrupt):
        return  # the batch has ended
    except PeregrineError as error:
        connection.send(error if not isinstance(error, RequestError) else EngineFault(str(error)))


def take_in(connection: Connection, inbox: "queue.SimpleQueue[Json | None]") -> None:
    """Put what the connection brings into the queue; None when it is closed."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(connection.recv())
    inbox.put(None)


def send_some(connection: Connection, answers: Sequence[Answer]) -> None:
    """Send answers, if there are any."""
    if answers:
        connection.send(list(answers))


def answer_of(entry: Entry) -> Answer:
    """The answer to a request whose generations have all ended."""
    count = sum(len(delta.token_ids) for deltas in entry.deltas for delta in deltas)
    try:
        return Answer(entry.custom_id, 200, entry.writer.whole(entry.deltas), count)
    except ApiError as error:  # this request's own, such as logits that hold NaN
        return refusal(entry.custom_id, error)


def refusal(custom_id: str, error: Exception) -> Answer:
    """The answer to a request that is refused, or at which something failed."""
    refused = api_error(error)
    return Answer(custom_id, refused.status, refused.body())


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
