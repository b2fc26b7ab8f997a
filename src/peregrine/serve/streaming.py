"""HTTP responses that follow a job to its end, whole or as server-sent events; a client that leaves ends its job."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from peregrine.engine.output import Delta, Output
from peregrine.errors import PeregrineError
from peregrine.serve.errors import ApiError, api_error
from peregrine.serve.gateway import ClientGone, Gateway, Reply
from peregrine.serve.protocol import ChatBody, CompletionBody
from peregrine.serve.request_log import MAX_PROMPT_SHOWN, record_of
from peregrine.serve.responses import Endpoint, ResponseWriter, encode, encode_slowly, event, final_output
from peregrine.serve.workers import Workers

EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass events on as they come
]
LIGHT = 256  # small things in a piece of JSON that is written in the event loop: a millisecond
PIECE = 2**18  # bytes given to a connection at a time


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


async def send_body(send: Send, body: bytes, more: bool) -> None:
    """Send a body, or a part of one, a piece at a time, as the client reads it."""
    for start in range(0, max(1, len(body)), PIECE):
        more_pieces = more or start + PIECE < len(body)
        await send({"type": "http.response.body", "body": body[start : start + PIECE], "more_body": more_pieces})


class LargeResponse(Response):
    """A response whose body may be large."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_body(send, bytes(self.body), more=False)


class JobResponse(Response):
    """Runs a job while its client waits."""

    def __init__(
        self,
        gateway: Gateway,
        workers: Workers,
        endpoint: Endpoint,
        body: CompletionBody | ChatBody,
        model: str,
        log_prompts: bool,
    ) -> None:
        super().__init__()
        self._gateway, self._workers = gateway, workers
        self._endpoint, self._asked, self._model, self._log_prompts = endpoint, body, model, log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, record = self._asked, record_of(scope)
        streamed = body.stream is True
        with contextlib.suppress(ClientGone):
            try:
                with self._gateway.room(body):
                    writer, shown = await self._workers.run(self._begin)
                    await self._gateway.compile(writer.job)
                    requests = await self._workers.run(self._gateway.prepare, writer.job)
                record.note(self._model, shown)
                async with self._gateway.submit(writer.job, requests, streamed) as reply, watched(receive, reply):
                    try:
                        if streamed:
                            await self._stream(writer, reply, send)
                        else:
                            whole = await self._whole(writer, [deltas for _, deltas in await reply.fetch()])
                            await whole(scope, receive, send)
                    finally:
                        record.note_end(writer.job, reply.num_tokens, reply.outputs)
            except PeregrineError as error:
                await error_response(api_error(error))(scope, receive, send)

    def _begin(self) -> tuple[ResponseWriter, str | None]:
        """The writer with its job, and the prompt for the log, if it is wanted there."""
        llm = self._gateway.llm
        writer = ResponseWriter(self._endpoint, self._asked, llm, self._model)
        prompt = writer.job.prompts[0][:MAX_PROMPT_SHOWN]
        return writer, llm.tokenizer.decode(prompt, False) if self._log_prompts else None

    async def _whole(self, writer: ResponseWriter, deltas: list[list[Delta]]) -> Response:
        if sum(map(writer.weight, deltas)) <= LIGHT:
            return json_response(writer.whole(deltas))
        body = await self._workers.run(lambda: encode_slowly(writer.whole(deltas)))
        return LargeResponse(body, media_type="application/json")

    async def _event(self, writer: ResponseWriter, index: int, deltas: list[Delta]) -> bytes:
        if writer.weight(deltas) <= LIGHT:
            return writer.event(index, deltas)
        return await self._workers.run(writer.event, index, deltas, True)

    async def _stream(self, writer: ResponseWriter, reply: Reply, send: Send) -> None:
        """One event per generation and fetch; an error before the first event is an ordinary response."""
        fetched = await reply.fetch()
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        ended: dict[int, Output] = {}  # generations whose last event has been sent
        try:
            while True:
                for index, deltas in fetched:
                    if deltas[-1].output is not None:
                        ended[index] = final_output(deltas)
                    await send_body(send, await self._event(writer, index, deltas), more=True)
                if len(ended) == writer.job.size:
                    break
                fetched = await reply.fetch()
            outputs = [ended[index] for index in sorted(ended)]
            await send_body(send, writer.last_events(outputs), more=False)
        except PeregrineError as error:
            await send_body(send, event(encode(api_error(error).body())), more=False)


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
