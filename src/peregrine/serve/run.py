"""Run a server: listen at once, load the model meanwhile, drain on SIGTERM."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from peregrine.errors import ConfigError
from peregrine.llm import LLM
from peregrine.log import logger
from peregrine.serve.app import make_app
from peregrine.serve.service import Service
from peregrine.serve.settings import ServeConfig

POLL_S = 0.02
BACKLOG = 2048  # connections that may knock at once
LAST_WORDS_S = 5  # for connections to hear that their request was cut off


class Listener(uvicorn.Server):
    """uvicorn without its own signal handlers: this server drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(model: str, open_llm: Callable[[], LLM], settings: ServeConfig) -> None:
    """Serve until a signal ends it; a model that cannot be loaded raises what was wrong with it."""
    listening = open_socket(settings)

    async def until_signal() -> None:
        ending = asyncio.Event()
        handle_signals(ending)
        await serve_on(listening, Service(model, settings), open_llm, ending)

    try:
        asyncio.run(until_signal())
    finally:
        listening.close()


def open_socket(settings: ServeConfig) -> socket.socket:
    """The listening socket; ConfigError if the address cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        address = f"host={settings.host!r}, port={settings.port}"
        raise ConfigError(f"{address}: cannot listen there ({error}); choose another") from error


async def serve_on(
    listening: socket.socket, service: Service, open_llm: Callable[[], LLM], ending: asyncio.Event
) -> None:
    """Listen on a socket from loading to the last answer, which comes after `ending` is set."""
    config = uvicorn.Config(
        make_app(service),
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )
    listener = Listener(config)
    host, port = listening.getsockname()[:2]
    logger.info("listening on http://%s:%d, loading %s", host, port, service.name)
    answering = asyncio.create_task(listener.serve([listening]))
    llm = None
    try:
        llm = await load(open_llm, ending)
        if llm is not None:
            service.open(llm)
            logger.info("ready: %s on http://%s:%d", service.name, host, port)
            await ending.wait()
            await drain(service)
    finally:
        listener.should_exit = True
        await answering
        if llm is not None:
            llm.close()


async def load(open_llm: Callable[[], LLM], ending: asyncio.Event) -> LLM | None:
    """The model, or None if a signal came first."""
    events = asyncio.get_running_loop()
    loaded: asyncio.Future[LLM] = events.create_future()

    def settle(set_result: Callable[..., None], value: object) -> None:
        if not loaded.done():
            set_result(value)

    def run() -> None:
        try:
            llm = open_llm()
        except BaseException as error:
            events.call_soon_threadsafe(settle, loaded.set_exception, error)
        else:
            events.call_soon_threadsafe(settle, loaded.set_result, llm)

    # A daemon: a signal does not wait for a large model to be read to its end.
    threading.Thread(target=run, name="peregrine-load", daemon=True).start()
    stopped = asyncio.create_task(ending.wait())
    either: set[asyncio.Future[Any]] = {loaded, stopped}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return loaded.result() if loaded.done() else None


async def drain(service: Service) -> None:
    """Let what runs go on until the deadline, take nothing new, then cut off the rest."""
    service.draining = True
    desk = service.desk
    logger.info("draining: %d generations, %g s at most", desk.num_open, service.settings.drain_seconds)
    await until(lambda: not desk.num_open or desk.llm.loop.fault is not None, service.settings.drain_seconds)
    desk.abort_all()


async def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition, but not forever."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition() and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(POLL_S)


def handle_signals(ending: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT begins the end; a second one is not waited for."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def end() -> None:
        ending.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, end)
