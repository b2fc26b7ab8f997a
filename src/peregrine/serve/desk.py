"""Between the event loop and the engine's thread: jobs go in if there is room, deltas come back in bundles.

Nobody waits for anybody. The engine only drops deltas into a bag and rings once for a whole round; a reply keeps
what its reader has not fetched, at most its own output; a reader fetches all there is as one piece.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable

from peregrine.engine.loop import Sink
from peregrine.engine.request import Delta, Output, Request
from peregrine.errors import EngineFault, RequestError
from peregrine.llm import LLM
from peregrine.serve.errors import ApiError
from peregrine.serve.job import Job, named_as_in
from peregrine.serve.settings import ServeConfig

LONGEST_WAIT_S = 60


class ClientGone(Exception):
    """There is nobody left to answer."""


class Reply:
    """What has come back of one job; used in the event loop alone."""

    def __init__(self, size: int, eager: bool) -> None:
        self.deltas: list[list[Delta]] = [[] for _ in range(size)]  # not fetched yet, per generation
        self.outputs: list[Output | None] = [None] * size
        self.fault: EngineFault | None = None
        self.abandoned = False  # the client has gone
        self._eager = eager  # wake the reader for every piece, not only at the end
        self._news = asyncio.Event()

    @property
    def complete(self) -> bool:
        return None not in self.outputs

    def put(self, index: int, delta: Delta | EngineFault) -> None:
        """Take in what the engine sent."""
        if isinstance(delta, EngineFault):
            self.fault = delta
        else:
            self.deltas[index].append(delta)
            self.outputs[index] = delta.output
        if self._eager or self.fault is not None or self.complete:
            self._news.set()

    def abandon(self) -> None:
        """Nobody listens any more; whoever waits in `fetch` hears of it."""
        self.abandoned = True
        self._news.set()

    async def fetch(self) -> list[tuple[int, list[Delta]]]:
        """Wait for something new, and take it: (generation, its deltas). A fault is raised, and so is ClientGone."""
        await self._news.wait()
        self._news.clear()
        if self.abandoned:
            raise ClientGone
        if self.fault is not None:
            raise self.fault
        fetched = [(index, pile) for index, pile in enumerate(self.deltas) if pile]
        self.deltas = [[] for _ in self.deltas]
        return fetched


class Desk:
    """Admits jobs, bounds how many wait, and hands out what the engine sends back."""

    def __init__(self, llm: LLM, settings: ServeConfig, observe: Callable[[Delta], None]) -> None:
        self.llm, self.max_prompt = llm, settings.max_prompt
        self.num_rows = llm.engine.policy.max_rows
        self.capacity = self.num_rows + settings.max_queue
        self._open: dict[int, Request] = {}  # what the engine has and has not ended, by id
        self._observe = observe
        self._events = asyncio.get_running_loop()
        self._bag: deque[tuple[Reply, int, Delta | EngineFault]] = deque()
        self._rung = False
        self._seconds = 1.0  # a generation's, once it runs; a moving average

    @property
    def num_open(self) -> int:
        """Generations that run or wait."""
        return len(self._open)

    def abort_all(self) -> None:
        """End every generation now; their replies hear it as an abort."""
        for request in self._open.values():
            self.llm.loop.abort(request)

    @contextlib.asynccontextmanager
    async def take(self, job: Job, eager: bool) -> AsyncIterator[Reply]:
        """Hand a job to the engine; whoever leaves early takes its generations back."""
        self._check_prompts(job)
        self._check_room(job)
        reply = Reply(job.size, eager)
        requests: list[Request] = []
        try:
            with named_as_in(job.body):
                for index in range(job.size):
                    ids, params = job.generation(index)
                    request = self.llm.loop.submit(ids, params, self._sink(reply, index))
                    self._open[request.id] = request
                    requests.append(request)
            yield reply
        finally:
            for request, output in zip(requests, reply.outputs, strict=False):
                if output is None:
                    self.llm.loop.abort(request)

    def _check_prompts(self, job: Job) -> None:
        longest = max(len(prompt) for prompt in job.prompts)
        if self.max_prompt is not None and longest > self.max_prompt:
            problem = f"exceeds this server's limit of {self.max_prompt}"
            with named_as_in(job.body):
                raise RequestError("prompt", f"{longest} tokens", problem, "shorten it")

    def _check_room(self, job: Job) -> None:
        if job.size > self.capacity:
            problem = f"the body asks for {job.size} generations, more than the {self.capacity} this server takes"
            raise RequestError("n", job.body.n, problem, "send fewer prompts or a smaller n")
        if self.num_open + job.size > self.capacity:
            ahead = max(0, self.num_open - self.num_rows)
            wait = min(LONGEST_WAIT_S, max(1, math.ceil(self._seconds * ahead / self.num_rows)))
            message = f"the queue is full: {ahead} generations wait already; try again in {wait} s"
            raise ApiError(429, message, headers={"Retry-After": str(wait)})

    def _sink(self, reply: Reply, index: int) -> Sink:
        def put(delta: Delta | EngineFault) -> None:
            self._bag.append((reply, index, delta))
            if not self._rung:
                self._rung = True
                with contextlib.suppress(RuntimeError):  # the event loop has gone; nobody listens
                    self._events.call_soon_threadsafe(self._hand_out)

        return put

    def _hand_out(self) -> None:
        # Before the bag is emptied: what is dropped into it from now on rings again.
        self._rung = False
        while self._bag:
            reply, index, delta = self._bag.popleft()
            if isinstance(delta, EngineFault):
                self._open.clear()  # it is the end of all
            else:
                self._observe(delta)
                if delta.output is not None:
                    del self._open[delta.request_id]
                    timing = delta.output.timing
                    self._seconds += 0.1 * (timing.total_s - timing.queue_s - self._seconds)
            reply.put(index, delta)
