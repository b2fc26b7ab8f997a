"""Responses that follow a job to its end: whole, or as server-sent events. A client that goes away ends its job."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from peregrine.engine.request import Output
from peregrine.errors import PeregrineError
from peregrine.serve.answer import Answer, encode, error_event, output_of
from peregrine.serve.desk import ClientGone, Desk, Reply
from peregrine.serve.errors import ApiError, api_error

JSON_TYPE = "application/json"


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, JSON_TYPE)


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


class JobResponse(Response):
    """Runs a job while its client waits."""

    def __init__(self, desk: Desk, answer: Answer) -> None:
        super().__init__()
        self._desk, self._answer = desk, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streamed = self._answer.job.body.stream is True
        tell = self._stream if streamed else self._whole
        with contextlib.suppress(ClientGone):
            try:
                async with self._desk.take(self._answer.job, eager=streamed) as reply, watched(receive, reply):
                    await tell(scope, receive, send, reply)
            except PeregrineError as error:
                await error_response(api_error(error))(scope, receive, send)

    async def _whole(self, scope: Scope, receive: Receive, send: Send, reply: Reply) -> None:
        fetched = await reply.fetch()
        body = self._answer.whole([deltas for _, deltas in fetched])
        await json_response(body)(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send, reply: Reply) -> None:
        """One event per generation and fetch; an error before the first event is an ordinary response."""
        news = await reply.fetch()
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        told: dict[int, Output] = {}  # what has arrived meanwhile does not count until it is told
        try:
            while True:
                for index, deltas in news:
                    if deltas[-1].output is not None:
                        told[index] = output_of(deltas)
                    await send_body(send, self._answer.event(index, deltas), more=True)
                if len(told) == self._answer.job.size:
                    break
                news = await reply.fetch()
            outputs = [told[index] for index in sorted(told)]
            await send_body(send, self._answer.last_events(outputs), more=False)
        except PeregrineError as error:
            await send_body(send, error_event(api_error(error)), more=False)


EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass events on as they come
]


async def send_body(send: Send, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


@contextlib.asynccontextmanager
async def watched(receive: Receive, reply: Reply) -> AsyncIterator[None]:
    """Tell the reply when the client goes away."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        reply.abandon()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
