"""Run a server: listen at once, load the model meanwhile, drain on SIGTERM, end when the engine fails."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from types import FrameType

import uvicorn

from peregrine.errors import ConfigError, EngineFault
from peregrine.llm import LLM
from peregrine.log import background_logging, logger
from peregrine.serve.app import make_app
from peregrine.serve.connections import LimitedConnection, SeldomLog, fit_connections
from peregrine.serve.service import Service
from peregrine.serve.settings import ServeConfig

BACKLOG = 2048  # connections that may wait to be accepted
SHUTDOWN_S = 5  # for responses to be sent after the last generation has ended
GRACE_S = 5  # for the process to end by itself after that
FAULT_S = 2  # during which a failed server still says so to clients and probes
LAST_WORDS_S = 0.2  # for the log to be written


class Listener(uvicorn.Server):
    """uvicorn without its own signal handlers: this server drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(model: str, open_llm: Callable[[], LLM], settings: ServeConfig) -> int:
    """Serve until a signal or a fault of the engine ends it; returns 0 or 1. What `open_llm` raises is raised here."""
    listening = open_socket(settings)
    service = Service(model, settings)

    def insist() -> None:
        end_within(settings.drain_seconds + SHUTDOWN_S + GRACE_S)

    def open_and_freeze() -> LLM:
        """Garbage collection stops every thread: it need not look again and again at what is loaded."""
        llm = open_llm()
        gc.collect()
        gc.freeze()
        return llm

    async def until_end() -> EngineFault | None:
        ending = asyncio.Event()
        with signals(ending, insist):
            return await serve_on(listening, service, open_and_freeze, ending, insist)

    with listening, background_logging():
        fault = asyncio.run(until_end())
        if service.hangs:  # its thread cannot be ended, and Python would wait for it
            end_within(0)
    return 0 if fault is None else 1


def end_within(seconds: float) -> None:
    """End the process with code 1 if it has not ended by then, whatever its threads do."""

    def end() -> None:
        time.sleep(seconds)
        logger.error("the server did not end by itself, so it is ended")
        time.sleep(LAST_WORDS_S)
        os._exit(1)

    threading.Thread(target=end, name="peregrine-end", daemon=True).start()


def open_socket(settings: ServeConfig) -> socket.socket:
    """The listening socket; ConfigError if the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        address = f"host={settings.host!r}, port={settings.port}"
        raise ConfigError(f"{address}: cannot listen there ({error}); choose another") from error


async def serve_on(
    listening: socket.socket,
    service: Service,
    open_llm: Callable[[], LLM],
    ending: asyncio.Event,
    insist: Callable[[], None] = lambda: None,
) -> EngineFault | None:
    """Listen on a socket while the model loads and until `ending` is set, then drain; or until the engine fails.

    Returns the fault that ended it, if one did; `insist` is called first.
    """
    asyncio.get_running_loop().set_exception_handler(SeldomLog())
    most = fit_connections(service.settings.max_connections)
    config = uvicorn.Config(
        make_app(service),
        http=partial(LimitedConnection, max_connections=most),  # type: ignore[arg-type]
        log_level="critical",  # what clients do wrong is no news, and what fails here is logged here
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    listener = Listener(config)
    host, port = listening.getsockname()[:2]
    logger.info("listening on http://%s:%d, loading %s", host, port, service.name)
    listens = asyncio.create_task(listener.serve([listening]))
    llm = None
    try:
        llm = await load(open_llm, ending)
        if llm is None:
            return None
        service.open(llm)
        logger.info("ready: %s on http://%s:%d", service.name, host, port)
        ends, fails = asyncio.create_task(drained(service, ending)), asyncio.create_task(failed(service))
        await asyncio.wait((ends, fails), return_when=asyncio.FIRST_COMPLETED)
        ends.cancel()
        fault = await fails if fails.done() or llm.loop.fault is not None else None
        fails.cancel()
        if fault is not None:
            insist()
            service.gateway.fail_all(fault)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAULT_S):
                    await ending.wait()
        return fault
    finally:
        listener.should_exit = True
        await listens
        service.workers.close()
        if llm is not None and not service.hangs:
            llm.close()


async def failed(service: Service) -> EngineFault:
    """Wait for the engine to fail or to hang, and log why."""
    loop, limit = service.gateway.llm.loop, service.settings.hang_seconds
    pause = min(1.0, limit / 4)
    stuck = 0.0
    while loop.fault is None:
        await asyncio.sleep(pause)
        # Counted in pauses of its own: while the process was stopped, no step could end.
        stuck = min(loop.step_seconds, stuck + 2 * pause)
        if stuck >= limit:
            service.hangs = True
            logger.error("the engine hangs: a step has taken %.0f s; it is here:\n%s", loop.step_seconds, loop.stack())
            return EngineFault(f"the engine hangs: a step has taken longer than {limit:g} s")
    logger.error("the engine has failed", exc_info=loop.fault)
    return loop.fault


async def load(open_llm: Callable[[], LLM], ending: asyncio.Event) -> LLM | None:
    """The model, loaded in a thread; None if a signal came first."""
    future: Future[LLM] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(open_llm())
        except BaseException as error:
            future.set_exception(error)

    # A daemon: a signal does not wait for a large model to be read to its end.
    threading.Thread(target=run, name="peregrine-load", daemon=True).start()
    loaded, ended = asyncio.wrap_future(future), asyncio.create_task(ending.wait())
    await asyncio.wait((loaded, ended), return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    if loaded.done():
        return loaded.result()
    loaded.cancel()
    return None


async def drained(service: Service, ending: asyncio.Event) -> None:
    """Wait for the end; then let what runs go on until the deadline, take nothing new, and abort the rest."""
    await ending.wait()
    service.draining = True
    gateway, seconds = service.gateway, service.settings.drain_seconds
    logger.info("draining: %d generations, %g s at most", gateway.num_open, seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while gateway.num_open:  # `idle` is also set between the end of a preparation and what it leads to
                await gateway.idle.wait()
    gateway.abort_all()


@contextlib.contextmanager
def signals(ending: asyncio.Event, insist: Callable[[], None]) -> Iterator[None]:
    """The first SIGTERM or SIGINT calls `insist` and sets `ending`; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        insist()
        loop.call_soon_threadsafe(ending.set)

    # Not the event loop's own handlers: these are called even if it is stuck.
    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
