"""A client for OpenAI-compatible servers that records when each chunk of a stream arrived.

It shares the machine with the server it measures, so it does little: one connection per request, opened before the
request's clock starts, no compression, and one reading of the clock per chunk.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from http.client import responses
from types import SimpleNamespace
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from peregrine.bench.serve_metrics import Exchange
from peregrine.errors import ConfigError

REQUEST_S = 1800  # a request that takes longer has failed
# What a server, a proxy or the network may do to an exchange.
TROUBLE = (aiohttp.ClientError, OSError, ValueError, TimeoutError)


def is_server(url: str) -> bool:
    """Whether this may be the address of a server."""
    try:
        parts = urlsplit(url)
    except ValueError:  # of brackets that are no IPv6 address
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


class Client:
    """Sends requests to one server inside `async with`; `url` may end in /v1."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if not is_server(url):
            raise ConfigError(f"url={url!r}: is not the address of a server; write http://HOST:PORT or https://HOST")
        self.url, self.clock, self.sleep = url, clock, sleep
        self._root = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=REQUEST_S),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            trace_configs=[connection_times(self.clock)],
            read_bufsize=2**20,  # half of the longest line that can be read
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def ask(self, method: str, path: str) -> tuple[int, bytes]:
        """Status and body of one request without a body; raises OSError for everything that goes wrong."""
        try:
            async with self._session.request(method, self._root + path) as response:
                return response.status, await response.read()
        except TROUBLE as error:
            raise OSError(describe(error)) from error

    async def stream(self, path: str, body: Mapping[str, object]) -> Exchange:
        """One streamed generation; a failure is part of the result."""
        times = SimpleNamespace(began=self.clock(), sent=self.clock())
        try:
            async with self._session.post(self._root + path, json=body, trace_request_ctx=times) as response:
                if response.status != 200:
                    return Exchange.failed(times.sent, server_error(response.status, await response.read()))
                return await self._read_stream(response, times)
        except TROUBLE as error:
            return Exchange.failed(times.sent, describe(error))

    async def _read_stream(self, response: aiohttp.ClientResponse, times: SimpleNamespace) -> Exchange:
        """Read server-sent events to the end; fields other than `data` and comments are skipped."""
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        ended = False
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                ended = True
                continue
            now = self.clock()
            chunk = json.loads(data)
            if chunk.get("error"):
                return Exchange.failed(times.sent, server_error(response.status, data))
            usage = chunk.get("usage") or usage
            choices = chunk.get("choices") or []
            ended = ended or any(choice.get("finish_reason") is not None for choice in choices)
            if not all(map(only_names_role, choices)):
                arrivals.append(now)
        if not arrivals:
            return Exchange.failed(times.sent, "the stream held no token")
        if not ended:
            return Exchange.failed(times.sent, "the stream broke off")
        return Exchange(
            sent=times.sent,
            times=tuple(arrivals),
            output_tokens=usage.get("completion_tokens") or len(arrivals),
            prompt_tokens=usage.get("prompt_tokens"),
            from_usage=bool(usage.get("completion_tokens")),
            connect_s=times.sent - times.began,
        )


def connection_times(clock: Callable[[], float]) -> aiohttp.TraceConfig:
    """Writes when a request's connection was begun and made (`began`, `sent`) into its trace context."""
    trace = aiohttp.TraceConfig()

    async def began(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.began = clock()

    async def made(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.sent = clock()

    trace.on_connection_create_start.append(began)
    trace.on_connection_create_end.append(made)
    return trace


def only_names_role(choice: Mapping[str, Any]) -> bool:
    """Whether a chat chunk holds the role alone: some servers send one before the first token exists."""
    delta = choice.get("delta") or {}
    content = [value for name, value in delta.items() if name != "role"]
    return "role" in delta and not any(content) and choice.get("finish_reason") is None


def server_error(status: int, body: bytes) -> str:
    """The status and the server's own message."""
    try:
        said = json.loads(body)
        error = said.get("error", said)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = body.decode(errors="replace")
    return f"HTTP {status}: {text.strip()[:300] or responses.get(status, 'no reason given')}"


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
