"""Run a server: listen at once, load the model meanwhile, drain on SIGTERM."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import uvicorn

from peregrine.errors import ConfigError
from peregrine.llm import LLM
from peregrine.log import logger
from peregrine.serve.app import make_app
from peregrine.serve.service import Service
from peregrine.serve.settings import ServeConfig

BACKLOG = 2048  # connections that may wait to be accepted
SHUTDOWN_S = 5  # for responses to be sent after the last generation has ended


class Listener(uvicorn.Server):
    """uvicorn without its own signal handlers: this server drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(model: str, open_llm: Callable[[], LLM], settings: ServeConfig) -> None:
    """Serve until a signal ends it; what `open_llm` raises is raised here."""
    listening = open_socket(settings)

    async def until_signal() -> None:
        ending = asyncio.Event()
        handle_signals(ending)
        await serve_on(listening, Service(model, settings), open_llm, ending)

    with listening:
        asyncio.run(until_signal())


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
    """Listen on a socket while the model loads and until `ending` is set; then drain."""
    config = uvicorn.Config(
        make_app(service),
        log_level="warning",
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
        if llm is not None:
            service.open(llm)
            logger.info("ready: %s on http://%s:%d", service.name, host, port)
            await ending.wait()
            await drain(service)
    finally:
        listener.should_exit = True
        await listens
        if llm is not None:
            llm.close()


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


async def drain(service: Service) -> None:
    """Let what runs go on until the deadline, take nothing new, then abort the rest."""
    service.draining = True
    gateway, seconds = service.gateway, service.settings.drain_seconds
    logger.info("draining: %d generations, %g s at most", gateway.num_open, seconds)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await gateway.idle.wait()
    gateway.abort_all()


def handle_signals(ending: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT sets `ending`; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)

    def end() -> None:
        ending.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, end)
