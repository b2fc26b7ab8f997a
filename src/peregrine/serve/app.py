"""The routes. Each turns a body into a job, or reads off what the service knows."""

import asyncio
from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from peregrine import __version__
from peregrine.errors import PeregrineError
from peregrine.llm import LLM
from peregrine.serve.answer import Answer
from peregrine.serve.desk import Desk
from peregrine.serve.errors import ApiError, api_error, body_error
from peregrine.serve.guard import Guard
from peregrine.serve.info import server_info
from peregrine.serve.job import Job, chat_job, completion_job, plain_messages
from peregrine.serve.pages import pages
from peregrine.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, ErrorBody, TokenizeBody
from peregrine.serve.responses import JobResponse, error_response, json_response
from peregrine.serve.service import Service

LARGE_BODY = 32 * 2**10  # bytes; encoding a longer prompt would hold up the event loop
POLL_S = 0.02
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Body = TypeVar("Body", CompletionBody, ChatBody)


def refusals(*statuses: int) -> dict[int | str, dict[str, object]]:
    """For the API's description: which errors an endpoint may answer."""
    return {status: {"model": ErrorBody} for status in statuses}


def make_app(service: Service) -> FastAPI:
    """The application of one service."""
    app = FastAPI(
        title="Peregrine",
        version=__version__,
        description="OpenAI's API over a speculative decoding engine.",
        responses=refusals(401, 408, 413, 500),
        docs_url=None,  # FastAPI's own pages load their scripts from other hosts; /docs is ours
        redoc_url=None,
    )
    app.include_router(generation_routes(service))
    app.include_router(text_routes(service))
    app.include_router(model_routes(service))
    app.include_router(service_routes(service))
    app.include_router(pages())
    app.add_exception_handler(RequestValidationError, refuse_body)
    app.add_exception_handler(PeregrineError, refuse)
    app.add_exception_handler(HTTPException, refuse_route)
    app.add_exception_handler(Exception, refuse)
    app.add_middleware(Guard, settings=service.settings, count=service.metrics.count_http)
    return app


async def refuse_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(body_error(error.errors()))


async def refuse(request: Request, error: Exception) -> Response:
    return error_response(api_error(error))


async def refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; see /docs for what there is"
    return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))


def generation_routes(service: Service) -> APIRouter:
    """What generates."""
    answers: dict[int | str, dict[str, object]] = {
        200: {"content": {"application/json": {}, "text/event-stream": {}}},
        **refusals(400, 404, 429, 503),
    }
    router = APIRouter(tags=["generate"], responses=answers)

    async def respond(request: Request, body: Body, make: Callable[[Body, LLM], Job]) -> Response:
        desk = service.open_desk
        service.check_name(body.model)
        if len(await request.body()) > LARGE_BODY:
            job = await asyncio.to_thread(make, body, desk.llm)
        else:
            job = make(body, desk.llm)
        return JobResponse(desk, Answer.to(job, service.name, desk.llm.tokenizer))

    @router.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        """Continue prompts."""
        return await respond(request, body, completion_job)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        """Take the assistant's turn in a chat."""
        return await respond(request, body, chat_job)

    return router


def text_routes(service: Service) -> APIRouter:
    """What needs the tokenizer alone."""
    router = APIRouter(tags=["text"], responses=refusals(400, 404, 503))

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a text or a chat."""
        llm = service.desk.llm
        service.check_name(body.model)
        if body.messages is not None:
            ids = await asyncio.to_thread(llm.encode_chat, plain_messages(body.messages))
        else:
            ids = await asyncio.to_thread(llm.tokenizer.encode, body.prompt or "", body.add_special_tokens)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": llm.engine.limits.max_len})

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids."""
        llm = service.desk.llm
        service.check_name(body.model)
        llm.engine.limits.check_ids("tokens", body.tokens)
        text = await asyncio.to_thread(llm.tokenizer.decode, body.tokens, body.skip_special_tokens)
        return json_response({"prompt": text})

    return router


def model_routes(service: Service) -> APIRouter:
    """Which model there is."""
    router = APIRouter(tags=["server"], responses=refusals(503))

    def card() -> dict[str, object]:
        return {
            "id": service.name,
            "object": "model",
            "created": int(service.started),
            "owned_by": "peregrine",
            "max_model_len": service.desk.llm.engine.limits.max_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model there is."""
        return json_response({"object": "list", "data": [card()]})

    @router.get("/v1/models/{model:path}", responses=refusals(404))
    async def model(model: str) -> Response:
        """The same by its name."""
        service.check_name(model)
        return json_response(card())

    return router


def service_routes(service: Service) -> APIRouter:
    """What is said about the server, and the one thing that can be done to it."""
    router = APIRouter(tags=["server"])

    @router.get("/health", responses=refusals(503))
    async def health() -> Response:
        """200 when a request sent now would be served, else 503 with the reason."""
        if service.trouble is not None:
            return error_response(ApiError(503, service.trouble, code=service.phase))
        return json_response({"status": service.phase})

    @router.get("/version")
    async def version() -> Response:
        """The server's version."""
        return json_response({"version": __version__})

    @router.get("/server_info", responses=refusals(503))
    async def info() -> Response:
        """What the engine decided and why, its limits, and how speculation went so far."""
        return json_response(server_info(service))

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type=METRICS_TYPE)

    @router.post("/flush_cache", responses=refusals(400, 409, 503))
    async def flush_cache(timeout: Annotated[float, Query(ge=0, le=3600, allow_inf_nan=False)] = 0) -> Response:
        """Empty the prefix cache; waits up to `timeout` seconds for the engine to be idle."""
        return json_response({"pages_freed": await drop_cached(service.desk, timeout)})

    return router


async def drop_cached(desk: Desk, seconds: float) -> int:
    """Empty the prefix cache as soon as nothing runs; ApiError if that takes too long."""
    clock = asyncio.get_running_loop()
    end = clock.time() + seconds
    while True:
        freed = await asyncio.to_thread(desk.llm.drop_cached)
        if freed is not None:
            return freed
        if clock.time() >= end:
            count = desk.llm.engine.num_requests
            raise ApiError(409, f"{count} generations are running or waiting; wait with ?timeout=SECONDS")
        await asyncio.sleep(POLL_S)
