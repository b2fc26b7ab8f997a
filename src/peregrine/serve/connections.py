"""Connections: how many there may be, how long a client may take, and in how many pieces it may send a body."""

import asyncio
import json
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from peregrine.log import logger
from peregrine.serve.errors import ApiError

HEAD_SECONDS = 10.0  # for the head of a request to arrive
READ_SECONDS = 120.0  # for a client to read something of what waits for it
FEW_PIECES, SMALL_PIECE = 1024, 64  # pieces of a body that may have any size; bytes that each further one must have
MAX_FILES = 65536
OWN_FILES = 64  # descriptors that are not connections: libraries, model files, the log
REPEAT_SECONDS, MAX_KINDS = 10.0, 100  # the same trouble is logged once in this time
CLOSES = {"Retry-After": "5", "Connection": "close", "Content-Type": "application/json"}
FULL = ApiError(503, "too many connections are open; try again in 5 s", code="too_many_connections", headers=CLOSES)


class LeanConnection(h11.Connection):
    """Refuses a body in very many very small pieces: parsing one takes longer than sending it.

    The pieces of a stream, in contrast, are many and small: they are framed here, as they change no state of h11's.
    """

    _num_pieces = _num_bytes = 0
    _in_chunks = False  # the response's body has no length announced

    def send(self, event: Any) -> Any:
        if self._in_chunks and isinstance(event, h11.Data) and self.our_state is h11.SEND_BODY:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        output = super().send(event)
        if isinstance(event, h11.Response):
            self._in_chunks = b"transfer-encoding: chunked" in (output or b"").lower()
        return output

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_pieces = self._num_bytes = 0
        elif isinstance(event, h11.Data):
            self._num_pieces += 1
            self._num_bytes += len(event.data)
            if self._num_pieces > FEW_PIECES and self._num_bytes < SMALL_PIECE * self._num_pieces:
                raise h11.RemoteProtocolError("the body comes in too many small pieces")
        return event


class LimitedConnection(H11Protocol):
    """uvicorn's connection with a limit on their number, on the time for a head, and on the time a reader may pause."""

    def __init__(self, *args: Any, max_connections: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = LeanConnection(h11.SERVER)
        self._max_connections = max_connections
        self._head_alarm, self._read_alarm = Alarm(self.loop), Alarm(self.loop)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.write(plain_response(FULL))
            transport.close()
        else:
            self._head_alarm.set(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waits_for_head = self.cycle is None or self.cycle.response_complete
        if not waits_for_head:
            self._head_alarm.clear()
        elif not self.transport.is_closing():
            self._head_alarm.set(HEAD_SECONDS, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_alarm.set(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_alarm.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_alarm.clear()
        self._read_alarm.clear()


def plain_response(error: ApiError) -> bytes:
    """An error as it is sent on a connection that no application serves."""
    body = json.dumps(error.body())
    headers = {**error.headers, "Content-Length": str(len(body))}
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"
    return "\r\n".join([status, *map(": ".join, headers.items()), "", body]).encode()


class Alarm:
    """A call that happens later unless it is cleared before; setting it again changes nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, action: Callable[[], None]) -> None:
        self._timer = self._timer or self._loop.call_later(seconds, action)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def fit_connections(wanted: int) -> int:
    """Raise the limit on open files so that `wanted` connections fit; returns how many do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, max(MAX_FILES, soft))
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):  # macOS has a lower limit that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    room = wanted if soft == resource.RLIM_INFINITY else max(1, soft - OWN_FILES)
    if room < wanted:
        logger.warning("max_connections=%d: the limit on open files leaves %d; raise it (ulimit -n)", wanted, room)
    return min(wanted, room)


class SeldomLog:
    """The event loop's handler of errors: the same one is logged once in a while, not thousands of times a second."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, message, now = context.get("exception"), str(context.get("message")), time.monotonic()
        kind = f"{message}: {type(error).__name__}"
        if now - self._logged.get(kind, -REPEAT_SECONDS) >= REPEAT_SECONDS:
            self._logged = {**self._logged, kind: now} if len(self._logged) < MAX_KINDS else {kind: now}
            logger.error("%s", kind, exc_info=error)
