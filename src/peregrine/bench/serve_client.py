"""A client for OpenAI-compatible servers on asyncio's own streams.

The client shares the machine with what it measures, so it does little: a connection per request, opened before the
clock starts, and one look at the clock per chunk.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from peregrine.bench.serve_metrics import Exchange
from peregrine.errors import ConfigError

REQUEST_S = 1800  # a request that takes longer has failed
MOST_READ = 2**16  # bytes taken from a body at once
# What a server, a proxy or the network may do to an exchange.
TROUBLE = (OSError, EOFError, ValueError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response that was read to its end."""

    status: int
    body: bytes

    @property
    def trouble(self) -> str:
        """The status, and what the server says about it."""
        try:
            said = json.loads(self.body)
            error = said.get("error", said)
            text = str(error.get("message", error) if isinstance(error, dict) else error)
        except (ValueError, AttributeError):
            text = self.body.decode(errors="replace")
        return f"HTTP {self.status}: {text.strip()[:300] or phrase_of(self.status)}"


@dataclass(frozen=True, slots=True)
class Opened:
    """A request that was sent, and the body that comes back."""

    connect_s: float
    sent: float
    status: int
    body: AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class Client:
    """Sends requests to one server; `url` may end in /v1."""

    url: str
    api_key: str | None = None
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"url={self.url!r}: is not the address of a server; write http://HOST:PORT or https://HOST"
            )

    async def ask(self, method: str, path: str) -> Answer:
        """One request without a body; whatever goes wrong is an OSError."""
        try:
            async with asyncio.timeout(REQUEST_S), self._open(method, path, None) as opened:
                return Answer(opened.status, b"".join([block async for block in opened.body]))
        except TROUBLE as error:
            raise OSError(describe(error)) from error

    async def stream(self, path: str, body: Mapping[str, object]) -> Exchange:
        """One streamed generation as it was seen from here; failures are part of the result."""
        begun = self.clock()
        try:
            async with asyncio.timeout(REQUEST_S), self._open("POST", path, body) as opened:
                if opened.status != HTTPStatus.OK:
                    answer = Answer(opened.status, b"".join([block async for block in opened.body]))
                    return Exchange.failed(opened.sent, answer.trouble)
                return await self._read_stream(opened)
        except TROUBLE as error:
            return Exchange.failed(begun, describe(error))

    async def _read_stream(self, opened: Opened) -> Exchange:
        times: list[float] = []
        usage: dict[str, Any] = {}
        ended = False
        async for data in events(opened.body):
            if data == b"[DONE]":
                ended = True
                continue
            now = self.clock()
            chunk = json.loads(data)
            if chunk.get("error"):
                return Exchange.failed(opened.sent, Answer(opened.status, data).trouble)
            usage = chunk.get("usage") or usage
            choices = chunk.get("choices") or []
            ended = ended or any(choice.get("finish_reason") is not None for choice in choices)
            if not all(map(only_names_role, choices)):
                times.append(now)
        if not times:
            return Exchange.failed(opened.sent, "the stream held no token")
        if not ended:
            return Exchange.failed(opened.sent, "the stream broke off")
        return Exchange(
            sent=opened.sent,
            times=tuple(times),
            output_tokens=usage.get("completion_tokens") or len(times),
            prompt_tokens=usage.get("prompt_tokens"),
            from_usage=bool(usage.get("completion_tokens")),
            connect_s=opened.connect_s,
        )

    @asynccontextmanager
    async def _open(self, method: str, path: str, body: Mapping[str, object] | None) -> AsyncIterator[Opened]:
        parts = urlsplit(self.url)
        host, secure = parts.hostname or "", parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        sent = json.dumps(body).encode() if body is not None else b""
        head = [
            f"{method} {parts.path.rstrip('/').removesuffix('/v1')}{path} HTTP/1.1",
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(sent)}",
            *([f"Authorization: Bearer {self.api_key}"] if self.api_key else []),
        ]
        begun = self.clock()
        context = ssl.create_default_context() if secure else None
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        try:
            start = self.clock()
            writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + sent)
            await writer.drain()
            status, headers = await read_head(reader)
            yield Opened(start - begun, start, status, read_body(reader, headers))
        finally:
            writer.close()


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers, their names in lower case."""
    first = await reader.readline()
    if not first.startswith(b"HTTP/"):
        raise ValueError(f"not an HTTP server: it said {first[:80]!r}" if first else "the server hung up")
    headers: dict[str, str] = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(first.split()[1]), headers


async def read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The body in blocks as they come, however it is framed; EOFError if it ends too soon."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int((await reader.readline()).split(b";")[0] or b"-", 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        left = int(headers["content-length"])
        while left:
            block = await reader.read(min(left, MOST_READ))
            if not block:
                raise EOFError("the server hung up")
            left -= len(block)
            yield block
    else:
        while block := await reader.read(MOST_READ):
            yield block


async def events(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events; comments and other fields are passed over."""
    rest = b""
    async for block in blocks:
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def only_names_role(choice: Mapping[str, Any]) -> bool:
    """Whether a chat's chunk says who speaks and nothing else: some servers send it before there is a token."""
    delta = choice.get("delta") or {}
    said = [value for name, value in delta.items() if name != "role"]
    return "role" in delta and not any(said) and choice.get("finish_reason") is None


def phrase_of(status: int) -> str:
    """What a status is called."""
    return HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "no reason given"


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
