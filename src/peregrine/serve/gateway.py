"""Between the event loop and the engine's thread: jobs go in if there is room, deltas come back in batches.

Neither side waits for the other. The engine's thread appends deltas to a queue and wakes the event loop once for many;
a reply keeps what its reader has not fetched, at most its own output; a reader fetches all of it as one piece.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

from peregrine.engine.loop import Sink
from peregrine.engine.output import Delta, Output
from peregrine.engine.request import Request
from peregrine.errors import ConfigError, EngineFault, RequestError
from peregrine.llm import LLM
from peregrine.serve.errors import ApiError, shutting_down
from peregrine.serve.job import Job, named_as_in, num_generations
from peregrine.serve.protocol import ChatBody, CompletionBody
from peregrine.serve.settings import ServeConfig
from peregrine.serve.workers import Workers

LONGEST_WAIT_S = 60
COMPILERS = 2  # grammars compiled at once
MAX_OPEN_DETAILS = 2**22  # see Job.num_details; of all open jobs together


class ClientGone(Exception):
    """The client has closed its connection, so no response can be sent."""


class Reply:
    """What has come back of one job; used in the event loop alone."""

    def __init__(self, size: int, streamed: bool, interval: int = 1) -> None:
        self.outputs: list[Output | None] = [None] * size
        self._deltas: list[list[Delta]] = [[] for _ in range(size)]  # not fetched yet, per generation
        self._waiting = [0] * size  # their tokens
        self._due = [1] * size  # how many of its tokens wake the reader; after the first ones it is `interval`
        self._interval = interval
        self._fault: EngineFault | None = None
        self._abandoned = False
        self.num_tokens = 0  # generated until now, by all of them
        self._streamed = streamed  # wake the reader as tokens come, not only at the end
        self._news = asyncio.Event()

    def put(self, index: int, delta: Delta) -> None:
        """Take in what the engine sent for one generation."""
        count = len(delta.token_ids)
        self._deltas[index].append(delta)
        self._waiting[index] += count
        self.num_tokens += count
        self.outputs[index] = delta.output
        if self._streamed:
            due = delta.output is not None or self._waiting[index] >= self._due[index]
        else:
            due = None not in self.outputs
        if due:
            self._due[index] = self._interval
            self._news.set()

    def fail(self, fault: EngineFault) -> None:
        """Nothing more will come: `fetch` raises the fault."""
        self._fault = fault
        self._news.set()

    def abandon(self) -> None:
        """The client has gone: `fetch` raises ClientGone."""
        self._abandoned = True
        self._news.set()

    async def fetch(self) -> list[tuple[int, list[Delta]]]:
        """Wait for something new, and take it: (generation, its deltas). Raises ClientGone, or the engine's fault."""
        await self._news.wait()
        self._news.clear()
        if self._abandoned:
            raise ClientGone
        if self._fault is not None:
            raise self._fault
        fetched = [(index, deltas) for index, deltas in enumerate(self._deltas) if deltas]
        self._deltas, self._waiting = [[] for _ in self._deltas], [0] * len(self._deltas)
        return fetched


class Gateway:
    """Admits jobs, bounds how many generations wait, and hands out what the engine sends back."""

    def __init__(self, llm: LLM, settings: ServeConfig, observe: Callable[[Delta], None]) -> None:
        self.llm, self.max_prompt = llm, settings.max_prompt
        max_len = llm.engine.limits.max_len
        if self.max_prompt is not None and self.max_prompt > max_len:
            remedy = "lower it, leave it out, or raise max_len if the model can"
            raise ConfigError(f"max_prompt={self.max_prompt}: exceeds the context of {max_len} tokens; {remedy}")
        self.num_rows = llm.engine.policy.max_rows
        self.capacity = self.num_rows + settings.max_queue
        self.idle = asyncio.Event()  # set while no generation is open
        self.idle.set()
        self._requests: dict[int, Request] = {}  # by id: submitted to the engine and not ended
        self._replies: set[Reply] = set()
        self._num_preparing = 0  # generations that have room and are not submitted yet
        self._num_details = 0  # of open jobs
        self._ends = False  # no job is taken any more, not even one that has room
        self._observe, self._stream_interval = observe, settings.stream_interval
        self._event_loop = asyncio.get_running_loop()
        self._queue: deque[tuple[Reply, int, Delta | EngineFault]] = deque()  # from the engine's thread
        self._wakes = False  # a call of _deliver is scheduled
        self._compilers = Workers(COMPILERS, "peregrine-grammar")
        self._seconds = 1.0  # a generation's running time, as a moving average

    @property
    def num_open(self) -> int:
        """Generations that run, wait or are being prepared."""
        return len(self._requests) + self._num_preparing

    def abort_all(self) -> None:
        """End every generation now; their replies get an output with finish_reason "abort", or none is begun."""
        self._ends = True
        for request in self._requests.values():
            self.llm.loop.abort(request)

    def fail_all(self, fault: EngineFault) -> None:
        """The engine will send nothing more: end every reply."""
        self._requests.clear()
        self._note_idle()
        for reply in self._replies:
            reply.fail(fault)

    async def compile(self, job: Job) -> None:
        """Compile the job's grammar, if it has one, in a thread: neither the event loop nor the engine waits for it."""
        if job.params[0].constraint is not None:
            with named_as_in(job.body):
                await self._compilers.run(job.compile, self.llm)

    @contextlib.contextmanager
    def room(self, body: CompletionBody | ChatBody) -> Iterator[None]:
        """Keep room for a body's generations while they are prepared; refuses them if there is none."""
        size, choices = num_generations(body), body.n or 1
        if size > self.capacity:
            field, value = ("n", choices) if choices > 1 else ("prompt", f"{size} prompts")
            problem = f"the body asks for {size} generations, more than the {self.capacity} this server takes"
            raise RequestError(field, value, problem, "send fewer prompts or a smaller n")
        if self.num_open + size > self.capacity:
            ahead = max(0, self.num_open - self.num_rows)
            wait = min(LONGEST_WAIT_S, max(1, math.ceil(self._seconds * ahead / self.num_rows)))
            message = f"the queue is full: {ahead} generations wait already; try again in {wait} s"
            raise ApiError(429, message, headers={"Retry-After": str(wait)})
        self._num_preparing += size
        self.idle.clear()
        try:
            yield
        finally:
            self._num_preparing -= size
            self._note_idle()

    def prepare(self, job: Job) -> list[Request]:
        """The checked requests of a job; called in any thread."""
        with named_as_in(job.body):
            longest = max(len(prompt) for prompt in job.prompts)
            if self.max_prompt is not None and longest > self.max_prompt:
                problem = f"exceeds this server's limit of {self.max_prompt}"
                raise RequestError("prompt", f"{longest} tokens", problem, "shorten it")
            return [self.llm.engine.prepare(*job.generation(index)) for index in range(job.size)]

    @contextlib.asynccontextmanager
    async def submit(self, job: Job, requests: list[Request], streamed: bool) -> AsyncIterator[Reply]:
        """Hand a job to the engine; its generations are aborted if the block is left before they have ended."""
        if self._ends:
            raise shutting_down()
        if self._num_details + job.num_details > MAX_OPEN_DETAILS:
            message = "too many log-probabilities and drafts are being reported already; try again in 5 s"
            raise ApiError(429, message, headers={"Retry-After": "5"})
        reply = Reply(job.size, streamed, self._stream_interval)
        self._num_details += job.num_details
        self._replies.add(reply)
        try:
            for index, request in enumerate(requests):
                self.llm.loop.start(self._sink(reply, index), request)
                self._requests[request.id] = request
                self.idle.clear()
            yield reply
        finally:
            self._replies.discard(reply)
            self._num_details -= job.num_details
            for request, output in zip(requests, reply.outputs, strict=True):
                if output is None and request.id in self._requests:
                    self.llm.loop.abort(request)

    async def drop_cached(self) -> int | None:
        """Empty the prefix cache; the number of pages, or None if the engine has work."""
        return await asyncio.wrap_future(self.llm.loop.post(self.llm.engine.drop_cached))

    def _sink(self, reply: Reply, index: int) -> Sink:
        def put(delta: Delta | EngineFault) -> None:
            self._queue.append((reply, index, delta))
            if not self._wakes:
                self._wakes = True
                with contextlib.suppress(RuntimeError):  # the event loop is closed: the server has ended
                    self._event_loop.call_soon_threadsafe(self._deliver)

        return put

    def _deliver(self) -> None:
        # Before the queue is emptied: what the engine's thread appends from now on schedules another call.
        self._wakes = False
        while self._queue:
            reply, index, delta = self._queue.popleft()
            if isinstance(delta, EngineFault):
                self.fail_all(delta)
                continue
            self._observe(delta)
            reply.put(index, delta)
            if delta.output is not None:
                self._requests.pop(delta.request_id, None)
                timing = delta.output.timing
                self._seconds += 0.1 * (timing.total_s - timing.queue_s - self._seconds)
                self._note_idle()

    def _note_idle(self) -> None:
        if not self.num_open:
            self.idle.set()
