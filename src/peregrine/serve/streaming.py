"""HTTP responses that follow a job to its end, whole or as server-sent events; a client that leaves ends its job."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from peregrine.engine.request import Output
from peregrine.errors import PeregrineError
from peregrine.serve.errors import ApiError, api_error
from peregrine.serve.gateway import ClientGone, Gateway, Reply
from peregrine.serve.responses import ResponseWriter, encode, event, final_output

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass events on as they come
]


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


class JobResponse(Response):
    """Runs a job while its client waits."""

    def __init__(self, gateway: Gateway, writer: ResponseWriter) -> None:
        super().__init__()
        self._gateway, self._writer = gateway, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._writer.job
        streamed = job.body.stream is True
        with contextlib.suppress(ClientGone):
            try:
                async with self._gateway.submit(job, streamed) as reply, watched(receive, reply):
                    if streamed:
                        await self._stream(reply, send)
                    else:
                        fetched = await reply.fetch()
                        body = self._writer.whole([deltas for _, deltas in fetched])
                        await json_response(body)(scope, receive, send)
            except PeregrineError as error:
                await error_response(api_error(error))(scope, receive, send)

    async def _stream(self, reply: Reply, send: Send) -> None:
        """One event per generation and fetch; an error before the first event is an ordinary response."""

        async def send_body(body: bytes, more: bool) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        fetched = await reply.fetch()
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        ended: dict[int, Output] = {}  # generations whose last event has been sent
        try:
            while True:
                for index, deltas in fetched:
                    if deltas[-1].output is not None:
                        ended[index] = final_output(deltas)
                    await send_body(self._writer.event(index, deltas), more=True)
                if len(ended) == self._writer.job.size:
                    break
                fetched = await reply.fetch()
            outputs = [ended[index] for index in sorted(ended)]
            await send_body(self._writer.last_events(outputs), more=False)
        except PeregrineError as error:
            await send_body(event(api_error(error).body()), more=False)


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
