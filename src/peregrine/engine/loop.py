"""The engine's thread: requests go in as messages, deltas come out through a callback per request."""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

from peregrine.engine.engine import Engine
from peregrine.engine.request import Delta, Request
from peregrine.errors import EngineFault
from peregrine.sampling import SamplingParams

# Called in the engine's thread, once per delta; after an EngineFault nothing follows.
Sink = Callable[[Delta | EngineFault], None]
Value = TypeVar("Value")
FORKED = 'the engine is in the process that this one was forked from; make the LLM here, or start processes by "spawn"'
CLOSED = "the engine has been closed; make a new one"


class EngineLoop:
    """Steps the engine while it has work, sleeps while it has none."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.fault: EngineFault | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._open = True
        self._process = os.getpid()
        self._entrance = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="peregrine-engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: list[int], params: SamplingParams, sink: Sink) -> Request:
        """Admit a request in the caller's thread (RequestError is raised here) and hand it to the engine."""
        self._check_process()
        request = self.engine.prepare(prompt, params)
        with self._entrance:  # a sink added after the engine's end would never be called
            if self.fault is not None:
                raise self.fault
            if not self._open:
                raise EngineFault(CLOSED)
            self._sinks[request.id] = sink
        self._inbox.put(lambda: self.engine.enqueue(request))
        return request

    def abort(self, request: Request) -> None:
        """End a request soon; unless it has ended, its sink gets a last delta with finish_reason "abort"."""
        self._inbox.put(lambda: self.engine.abort(request))

    def call(self, action: Callable[[], Value]) -> Value:
        """Run `action` in the engine's thread between two steps; returns its result or raises its exception here."""
        self._check_process()
        future: Future[Value] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except Exception as error:  # the caller's alone: the engine goes on
                future.set_exception(error)

        self._inbox.put(run)
        while not wait([future], timeout=0.1).done:
            if not self._thread.is_alive() and not future.done():
                raise self.fault or EngineFault(CLOSED)
        return future.result()

    @property
    def alive(self) -> bool:
        """Whether the engine's thread can still serve."""
        return self._open and self._thread.is_alive()

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
                for delta in self.engine.step():
                    self._deliver(delta)
            self._end(EngineFault("the engine was closed while the request was in flight"))
        except Exception as error:
            fault = EngineFault(f"the engine stopped: {type(error).__name__}: {error}")
            fault.__cause__ = error
            with self._entrance:
                self.fault = fault
            self._end(fault)

    def _listen(self) -> None:
        """Handle every message in the inbox; wait for one when there is no work."""
        if not self.engine.has_work:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _deliver(self, delta: Delta) -> None:
        sink = self._sinks[delta.request_id] if delta.output is None else self._sinks.pop(delta.request_id)
        sink(delta)

    def _end(self, fault: EngineFault) -> None:
        sinks, self._sinks = list(self._sinks.values()), {}
        for sink in sinks:
            sink(fault)
