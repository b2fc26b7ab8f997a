"""The layer around the application: hosts, API keys, limits on bodies, headers, and a record of every request."""

import asyncio
import hmac
import ipaddress
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peregrine.serve.errors import ApiError
from peregrine.serve.request_log import SCOPE_KEY, new_record
from peregrine.serve.settings import ServeConfig
from peregrine.serve.streaming import error_response

# Open without a key: they show no text and change nothing.
OPEN_PATHS = {"/", "/docs", "/openapi.json", "/health", "/livez", "/version", "/metrics"}
BODY_SECONDS = 60.0
BODIES_AT_ONCE = 32  # of the largest size; more of them are not taken in at the same time


class AccessMiddleware:
    """Checks host and API key, reads the whole body within its limits, and hands the request to the application."""

    def __init__(self, app: ASGIApp, settings: ServeConfig, count: Callable[[str, int], None]) -> None:
        self._app, self._count = app, count
        self._keys = [key.encode() for key in settings.api_keys]
        self._max_bytes = settings.max_body_bytes
        self._num_bytes = 0  # of bodies that are being read
        self._checks_host = is_loopback(settings.host) and "*" not in settings.allow_hosts
        self._hosts = {name.lower() for name in settings.allow_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        record = scope[SCOPE_KEY] = new_record(headers)
        more_headers = [(b"x-request-id", record.id.encode()), (b"x-content-type-options", b"nosniff")]

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                self._count(scope["path"], record.status)
                message = {**message, "headers": [*message.get("headers", ()), *more_headers]}
            await send(message)

        try:
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read_body(headers, receive)
        except TimeoutError:
            error = ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s; send it again")
            await error_response(error)(scope, receive, recorded)
        except ApiError as error:
            await error_response(error)(scope, receive, recorded)
        else:
            if body is not None:
                await self._app(scope, replayed(body, receive), recorded)
        finally:
            record.write(scope["method"], scope["path"])

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Refuse strange names on a loopback address: a page of another site may have pointed its name there."""
        host = headers.get(b"host", b"localhost").decode("latin-1").lower()
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        if self._checks_host and not (is_loopback(name.strip("[]")) or name in self._hosts):
            message = f"Host={host[:80]!r}: is not a name of this server; start it with --allow-host for this name"
            raise ApiError(403, message, headers={"Connection": "close"})

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._keys or path in OPEN_PATHS or path.startswith("/static/"):
            return
        scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
        # Every key is compared, and each in constant time, so that response times reveal nothing about them.
        known = sum(hmac.compare_digest(sent, key) for key in self._keys)
        if scheme.lower() != b"bearer" or not known:
            message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
            raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer", "Connection": "close"})

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The whole body; None if the client went away before it was complete."""
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise self._too_large(int(announced))
        body = bytearray()
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part = message.get("body", b"")
                body += part
                self._num_bytes += len(part)
                if len(body) > self._max_bytes:
                    raise self._too_large(len(body))
                if self._num_bytes > BODIES_AT_ONCE * self._max_bytes:
                    close = {"Retry-After": "5", "Connection": "close"}
                    raise ApiError(503, "too many large bodies arrive at once; try again in 5 s", headers=close)
                if not message.get("more_body"):
                    return bytes(body)
        finally:
            self._num_bytes -= len(body)

    def _too_large(self, size: int) -> ApiError:
        # The rest of the body is not read, so the connection cannot be used again.
        message = f"the body has {size} bytes or more, the limit is {self._max_bytes}; send less at a time"
        return ApiError(413, message, headers={"Connection": "close"})


def is_loopback(name: str) -> bool:
    """Whether a name or address is this machine's own."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def replayed(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body once more, then what comes after it."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        return next(messages, None) or await receive()

    return replay
