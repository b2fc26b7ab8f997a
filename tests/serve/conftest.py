"""One server for most tests: merlin, in this process, on a free port."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest

from peregrine import LLM
from peregrine.errors import EngineFault
from peregrine.serve.run import serve_on
from peregrine.serve.service import Service
from peregrine.serve.settings import ServeConfig


@dataclass
class Served:
    """A running server, with access to its engine."""

    service: Service
    url: str
    stop: Callable[[], None]
    result: list[EngineFault | None]  # what `serve_on` returned, once it has

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop:
        return self.service.gateway._event_loop

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    @property
    def llm(self) -> LLM:
        return self.service.gateway.llm

    def http(self, **options: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)  # type: ignore[arg-type]

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def wait_idle(self) -> None:
        """Wait until nothing runs: the engine learns of a disconnected client a little later."""
        for _ in range(3000):
            if not self.service.gateway.num_open and not self.llm.engine.has_work:
                return
            threading.Event().wait(0.01)
        raise AssertionError("something still runs")


class Lent:
    """The LLM of a running server lent to a second server, which does not close it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> object:
        return getattr(self._llm, name)

    def close(self) -> None:
        pass


def start(open_llm: Callable[[], LLM], **settings: object) -> Served:
    """Listen on a free port; returns at once, while the model loads."""
    config = ServeConfig(port=0, **{"drain_seconds": 0.2, **settings})  # type: ignore[arg-type]
    service = Service("merlin", config)
    listening = socket.create_server((config.host, 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # a reader that stops is soon noticed
    ready: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    begun = threading.Event()
    result: list[EngineFault | None] = []

    async def main() -> None:
        ready.append((asyncio.get_running_loop(), asyncio.Event()))
        begun.set()
        result.append(await serve_on(listening, service, open_llm, ready[0][1]))

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    begun.wait()

    def stop() -> None:
        loop, ending = ready[0]
        with contextlib.suppress(RuntimeError):  # the server has ended by itself
            loop.call_soon_threadsafe(ending.set)
        thread.join()
        listening.close()

    return Served(service, f"http://127.0.0.1:{listening.getsockname()[1]}", stop, result)


def wait_ready(served: Served) -> None:
    for _ in range(6000):
        if served.service.status.trouble is None:
            return
        threading.Event().wait(0.01)
    raise AssertionError(served.service.status.trouble)


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    served = start(lambda: LLM("merlin", num_pages=400, windows="fixed"))
    wait_ready(served)
    yield served
    served.stop()


@pytest.fixture(scope="session")
def client(server: Served) -> openai.OpenAI:
    return server.openai()


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with server.http() as made:
        yield made
