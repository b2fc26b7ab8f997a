"""The engine's thread: requests go in as messages, deltas come out through a callback per request."""

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from peregrine.engine.engine import Engine
from peregrine.engine.output import Delta
from peregrine.engine.request import Request
from peregrine.errors import EngineFault
from peregrine.sampling import SamplingParams

# Called in the engine's thread, once per delta; after an EngineFault nothing follows.
Sink = Callable[[Delta | EngineFault], None]
Value = TypeVar("Value")
FORKED = 'the engine is in the process that this one was forked from; make the LLM here, or start processes by "spawn"'
CHECK_SECONDS = 1.0
CLOSED = "the engine has been closed; make a new one"


class EngineLoop:
    """Steps the engine while it has work, sleeps while it has none.

    `check` raises if what the engine needs is gone; it is called after every step, and now and then without work.
    """

    def __init__(self, engine: Engine, check: Callable[[], None] | None = None) -> None:
        self.engine, self._check = engine, check
        self.fault: EngineFault | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._calls: set[Future[Any]] = set()  # posted and not done
        self._busy_since: float | None = None  # when the current step began; None while there is no work
        self._open = True
        self._process = os.getpid()
        self._entrance = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="peregrine-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: list[int], params: SamplingParams, sink: Sink) -> Request:
        """Admit a request in the caller's thread (RequestError is raised here) and hand it to the engine."""
        request = self.prepare(prompt, params)
        self.start(sink, request)
        return request

    def prepare(self, prompt: list[int], params: SamplingParams) -> Request:
        """Admit a request in the caller's thread: RequestError is raised here."""
        self._check_process()
        return self.engine.prepare(prompt, params)

    def start(self, sink: Sink, *requests: Request) -> None:
        """Hand prepared requests to the engine, which begins with all of them."""
        with self._entrance:  # a sink added after the engine's end would never be called
            self._check_open()
            self._sinks |= {request.id: sink for request in requests}

        def enqueue() -> None:
            for request in requests:
                self.engine.enqueue(request)

        self._inbox.put(enqueue)

    def abort(self, request: Request) -> None:
        """End a request soon; unless it has ended, its sink gets a last delta with finish_reason "abort"."""
        self._inbox.put(lambda: self.engine.abort(request))

    def post(self, action: Callable[[], Value]) -> "Future[Value]":
        """Run `action` in the engine's thread between two steps; what it raises is its caller's alone."""
        self._check_process()
        future: Future[Value] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(action())
                except BaseException as error:
                    future.set_exception(error)

        with self._entrance:
            self._check_open()
            self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._inbox.put(run)
        return future

    def call(self, action: Callable[[], Value]) -> Value:
        """`post`, and wait for the result."""
        return self.post(action).result()

    def _check_open(self) -> None:
        if self.fault is not None:
            raise self.fault
        if not self._open:
            raise EngineFault(CLOSED)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread can still serve."""
        return self._open and self._thread.is_alive()

    @property
    def step_seconds(self) -> float:
        """How long the current step has taken until now; 0 while there is no work. One that only grows is a hang."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def stack(self) -> str:
        """Where the engine's thread is now, as a traceback: for the report of a hang."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "the thread has ended"

    def close(self) -> None:
        """Stop after the current step; the sinks of unfinished requests get a fault."""
        if self._open and os.getpid() == self._process:
            with self._entrance:
                self._open = False
            self._inbox.put(lambda: None)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _check_process(self) -> None:
        """Refuse calls from a fork, which has the engine's memory and not its thread: they would wait for ever."""
        if os.getpid() != self._process:
            raise EngineFault(FORKED)

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while self._open:
                self._listen()
                self._busy_since = time.monotonic()
                deltas = self.engine.step()
                if self._check is not None:
                    self._check()
                for delta in deltas:
                    self._deliver(delta)
            self._end(EngineFault("the engine was closed while the request was in flight"))
        except BaseException as error:  # a panic in a Rust library is no Exception; nobody may wait for ever
            cause = error
            try:  # a rank that is gone may have been noticed as an error of the device
                if self._check is not None:
                    self._check()
            except EngineFault as lost:
                cause = lost
            fault = EngineFault(f"the engine stopped: {type(cause).__name__}: {cause}")
            fault.__cause__ = error
            with self._entrance:
                self.fault = fault
            self._end(fault)

    def _listen(self) -> None:
        """Handle every message in the inbox; wait for one when there is no work."""
        if not self.engine.has_work:
            self._busy_since = None
            message = self._next_message()
            self._busy_since = time.monotonic()
            message()
        while not self._inbox.empty():
            self._inbox.get()()

    def _next_message(self) -> Callable[[], None]:
        while self._check is not None:
            try:
                return self._inbox.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                self._check()
        return self._inbox.get()

    def _deliver(self, delta: Delta) -> None:
        sink = self._sinks[delta.request_id] if delta.output is None else self._sinks.pop(delta.request_id)
        sink(delta)

    def _end(self, fault: EngineFault) -> None:
        sinks, self._sinks = list(self._sinks.values()), {}
        for sink in sinks:
            sink(fault)
        for future in list(self._calls):
            if future.set_running_or_notify_cancel():
                future.set_exception(fault)
        self._busy_since = None
