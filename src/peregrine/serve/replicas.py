"""Replicas of a server on Ray Serve, behind one URL; needs the extra `ray`.

    serve run peregrine.serve.replicas:build model=merlin min_replicas=2 max_replicas=4

A front takes every HTTP request, finds the key of its prompt's beginning (`affinity.py`), and hands it to a replica by
Ray's consistent hashing over that key; a replica that has `max_ongoing` requests passes it on to the next one on the
ring. The number of replicas follows the number of requests that run and wait. Each replica is the application of
`peregrine serve` with an engine of its own. An answer that has not begun when its replica dies is asked for again
elsewhere: the same seed gives the same text there.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from peregrine.config import EngineConfig
from peregrine.errors import ConfigError
from peregrine.llm import LLM, engine_config
from peregrine.log import logger
from peregrine.serve.affinity import affinity_key
from peregrine.serve.app import make_app
from peregrine.serve.errors import ApiError
from peregrine.serve.responses import encode, event
from peregrine.serve.run import failed
from peregrine.serve.service import Service
from peregrine.serve.settings import ServeConfig
from peregrine.serve.streaming import error_response

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
ATTEMPTS = 3  # replicas that are asked for one answer
FRONT_REQUESTS = 1000  # open ones in one front
# They are about one replica, and the front reaches any of them.
OF_ONE_REPLICA = {"/metrics", "/flush_cache", "/get_load"}
LOST = (RayActorError, DeploymentUnavailableError)
REPLICA_LOST = "the replica that wrote this answer was lost; send the request again"


class Options(BaseModel):
    """How many replicas, what each one gets, and the server's settings; every other field is an engine option."""

    model_config = ConfigDict(extra="allow")

    model: str = "merlin"
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    fronts: int = Field(1, ge=1)
    max_rows: int = Field(16, ge=1)  # of each replica; routing and scaling go by it, so it is not left to the engine
    cpus: float = Field(1, ge=0)  # of each replica
    gpus: float = Field(0, ge=0)
    target_ongoing: int | None = Field(None, ge=1)  # requests per replica that scaling aims at; default: its rows
    max_ongoing: int | None = Field(None, ge=1)  # per replica before the next one is asked; default: twice its rows
    scale_up_seconds: float = Field(30, gt=0)  # for so long there must be more requests than that before one is added
    scale_down_seconds: float = Field(600, gt=0)  # and fewer, before one is removed
    name: str | None = None
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = ServeConfig().max_body_bytes
    drain_seconds: float = ServeConfig().drain_seconds

    def settings(self) -> ServeConfig:
        """The settings of each replica's server; where to listen is Ray's business."""
        return ServeConfig(
            host="0.0.0.0",
            name=self.name,
            api_keys=self.api_keys,
            max_body_bytes=self.max_body_bytes,
            drain_seconds=self.drain_seconds,
        )

    def engine(self) -> dict[str, object]:
        """The engine options, read from text where they are text (`serve run` passes all as text)."""
        hints, known = get_type_hints(EngineConfig), {entry.name for entry in fields(EngineConfig)}
        read: dict[str, object] = {"max_rows": self.max_rows}
        for option, value in (self.model_extra or {}).items():
            try:
                read[option] = TypeAdapter(hints[option]).validate_python(value) if option in known else value
            except ValidationError as error:
                said = error.errors()[0]["msg"]
                raise ConfigError(f"{option}={value!r}: {said[:1].lower() + said[1:]}; correct it") from error
        return read


def build(options: Options) -> serve.Application:
    """The application for `serve run` and `serve deploy`; ConfigError if an option cannot be honoured."""
    engine, settings = options.engine(), options.settings()
    asked = engine_config(options.model, engine)  # checks all options
    rows, ranks = asked.max_rows, asked.tensor_parallel
    if 0 < options.gpus < ranks:
        raise ConfigError(
            f"tensor_parallel={ranks}: each rank needs a GPU, and gpus={options.gpus:g}; use gpus={ranks}"
        )
    if options.max_replicas < options.min_replicas:
        raise ConfigError(f"max_replicas={options.max_replicas}: is less than min_replicas={options.min_replicas}")
    replicas = serve.deployment(
        Replica,
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_ongoing or rows,
            upscale_delay_s=options.scale_up_seconds,
            downscale_delay_s=options.scale_down_seconds,
            look_back_period_s=min(30, options.scale_up_seconds),
            metrics_interval_s=min(30, options.scale_up_seconds) / 3,
        ),
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        max_ongoing_requests=options.max_ongoing or 2 * rows,
        max_queued_requests=settings.max_queue * options.max_replicas,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        graceful_shutdown_timeout_s=settings.drain_seconds,
        health_check_period_s=2,
    )
    front = serve.deployment(
        Front,
        num_replicas=options.fronts,
        max_ongoing_requests=FRONT_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.drain_seconds,
    )
    return front.bind(replicas.bind(options.model, engine, settings), settings.max_body_bytes)


class Replica:
    """One engine with the application of `peregrine serve` around it."""

    async def __init__(self, model: str, engine: dict[str, Any], settings: ServeConfig) -> None:  # type: ignore[misc]
        self._service = Service(model, settings)
        self._llm = LLM(model, **engine)
        self._service.open(self._llm)
        self._app = make_app(self._service)
        self._watch = asyncio.create_task(self._fail_all())

    async def _fail_all(self) -> None:
        """End every request when the engine has failed or hangs."""
        self._service.gateway.fail_all(await failed(self._service))

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        phase, trouble = self._service.status
        if phase == "faulted":
            raise RuntimeError(trouble)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """The ASGI messages of the response to one request; closing this before its end aborts the request."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        left = asyncio.Event()
        received: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if received:
                return received.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        running = asyncio.create_task(self._app(scope, receive, sent.put))
        running.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                yield message
            await running
        finally:
            left.set()

    def __del__(self) -> None:
        """Called by Ray when the replica has drained."""
        self._service.draining = True
        self._watch.cancel()
        self._service.gateway.abort_all()
        self._llm.close()


class Front:
    """Hands each HTTP request to the replica that should have its prompt cached, and passes the answer on."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas, self._max_bytes = replicas, max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """The response of a replica, or an error in its form."""
        try:
            if request.url.path in OF_ONE_REPLICA:
                message = f"{request.url.path}: is about one replica, and there are several; see Ray's dashboard"
                raise ApiError(404, message)
            body = await self._read(request)
            key = affinity_key(body, request.headers.get("x-session-id"))
            for _ in range(ATTEMPTS):
                try:
                    return await self._ask(plain_scope(request), body, key)
                except LOST as error:
                    logger.warning("a replica was lost before its answer began: %s", str(error).splitlines()[0])
            raise ApiError(503, "no replica could answer; try again in 5 s", headers={"Retry-After": "5"})
        except BackPressureError:
            message = "the queue of all replicas is full; try again in 5 s"
            return error_response(ApiError(429, message, headers={"Retry-After": "5"}))
        except RayTaskError as error:
            logger.error("a request failed in its replica", exc_info=error)
            return error_response(ApiError(500, "the replica failed at this request, its log says why"))
        except ApiError as error:
            return error_response(error)

    async def _read(self, request: Request) -> bytes:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self._max_bytes:
                raise ApiError(413, f"the body has more than {self._max_bytes} bytes; send less at a time")
        return bytes(body)

    async def _ask(self, scope: dict[str, Any], body: bytes, key: str | None) -> Response:
        """A replica's response: whole, so that it can be asked for again, unless it is a stream of events."""
        asked = self._replicas.options(stream=True, method_name="answer", **({"session_id": key} if key else {}))
        messages = asked.remote(scope, body)
        try:
            start = await anext(messages)
            headers = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
            if headers.get("content-type", "").startswith("text/event-stream"):
                return StreamingResponse(events(messages), start["status"], headers)
            parts = [message.get("body", b"") async for message in messages]
        except asyncio.CancelledError:  # the client has left
            messages.cancel()
            raise
        return Response(b"".join(parts), start["status"], headers)


async def events(messages: Any) -> AsyncIterator[bytes]:
    """The events of a stream; if its replica is lost, the last one says so. A client that leaves ends the request."""
    ended = False
    try:
        async for message in messages:
            yield message.get("body", b"")
        ended = True
    except (*LOST, RayTaskError) as error:
        logger.warning("a replica was lost in the middle of an answer: %s", str(error).splitlines()[0])
        ended = True
        yield event(encode(ApiError(500, REPLICA_LOST, code="replica_lost").body()))
    finally:
        if not ended:
            messages.cancel()


def plain_scope(request: Request) -> dict[str, Any]:
    """What the application reads of a request, as values that travel between processes."""
    names = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")
    return {name: request.scope[name] for name in names if name in request.scope} | {"root_path": ""}
