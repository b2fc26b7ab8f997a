"""The outermost layer: API keys, limits on the size and duration of bodies, and a count of responses."""

import asyncio
import hmac
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peregrine.serve.errors import ApiError
from peregrine.serve.settings import ServeConfig
from peregrine.serve.streaming import error_response

# Open without a key: they show no text and change nothing.
OPEN_PATHS = {"/", "/docs", "/openapi.json", "/health", "/version", "/metrics"}
BODY_SECONDS = 60.0


class AccessMiddleware:
    """Checks the API key, then reads the whole body within its limits, then hands the request to the application."""

    def __init__(self, app: ASGIApp, settings: ServeConfig, count: Callable[[str, int], None]) -> None:
        self._app, self._count = app, count
        self._keys = [key.encode() for key in settings.api_keys]
        self._max_bytes = settings.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope["path"], message["status"])
            await send(message)

        try:
            self._check_key(scope)
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read_body(scope, receive)
        except TimeoutError:
            error = ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s; send it again")
            await error_response(error)(scope, receive, counted)
        except ApiError as error:
            await error_response(error)(scope, receive, counted)
        else:
            if body is not None:
                await self._app(scope, replayed(body, receive), counted)

    def _check_key(self, scope: Scope) -> None:
        path = scope["path"]
        if not self._keys or path in OPEN_PATHS or path.startswith("/static/"):
            return
        scheme, _, sent = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        # Every key is compared, and each in constant time, so that response times reveal nothing about them.
        known = sum(hmac.compare_digest(sent, key) for key in self._keys)
        if scheme.lower() != b"bearer" or not known:
            message = "the API key is missing or wrong; send it as `Authorization: Bearer KEY`"
            raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client went away before it was complete."""
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise self._too_large(int(announced))
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_large(size)
            if not message.get("more_body"):
                return b"".join(parts)

    def _too_large(self, size: int) -> ApiError:
        # The rest of the body is not read, so the connection cannot be used again.
        message = f"the body has {size} bytes or more, the limit is {self._max_bytes}; send less at a time"
        return ApiError(413, message, headers={"Connection": "close"})


def replayed(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body once more, then what comes after it."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        return next(messages, None) or await receive()

    return replay
