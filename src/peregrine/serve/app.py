"""The routes: each checks a body and hands it to the engine, or reports what the service knows."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from peregrine import __version__
from peregrine.errors import PeregrineError
from peregrine.serve.body_routes import body_route
from peregrine.serve.errors import ApiError, api_error, body_error, refusals
from peregrine.serve.gateway import Gateway
from peregrine.serve.job import plain_messages
from peregrine.serve.middleware import AccessMiddleware
from peregrine.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from peregrine.serve.responses import CHAT_COMPLETIONS, COMPLETIONS, Endpoint, encode_slowly
from peregrine.serve.router_routes import router_routes
from peregrine.serve.service import Service
from peregrine.serve.static_files import static_routes
from peregrine.serve.streaming import JobResponse, LargeResponse, error_response, json_response

POLL_S = 0.02
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(service: Service) -> FastAPI:
    """The application of one service."""
    app = FastAPI(
        title="Peregrine",
        version=__version__,
        description="OpenAI's API over a speculative decoding engine.",
        responses=refusals(401, 408, 413, 500),
        docs_url=None,  # FastAPI's own pages load their scripts from other hosts; static_routes has /docs
        redoc_url=None,
    )
    for routes in (generation_routes, text_routes, model_routes, router_routes, service_routes):
        app.include_router(routes(service))
    app.include_router(static_routes())
    for kind in (RequestValidationError, HTTPException, PeregrineError, Exception):
        app.add_exception_handler(kind, refuse)
    app.add_middleware(AccessMiddleware, settings=service.settings, count=service.metrics.count_http)
    if service.settings.allow_origins:  # the outermost layer: browsers ask without a key, and read errors, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


async def refuse(request: Request, error: Exception) -> Response:
    """The response to anything that a route or the framework raises."""
    match error:
        case RequestValidationError():
            return error_response(body_error(error.errors()))
        case HTTPException():
            allowed = (error.headers or {}).get("Allow")
            remedy = "see /docs for what there is" if allowed is None else f"use {allowed}"
            message = f"{request.method} {request.url.path}: {error.detail}; {remedy}"
            return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))
    return error_response(api_error(error))


def generation_routes(service: Service) -> APIRouter:
    """The endpoints that generate text."""
    described: dict[int | str, dict[str, object]] = {
        200: {"content": {"application/json": {}, "text/event-stream": {}}},
        **refusals(400, 404, 429, 503),
    }
    router = APIRouter(tags=["generate"], responses=described, route_class=body_route(service.workers))

    async def respond(endpoint: Endpoint, body: CompletionBody | ChatBody) -> Response:
        gateway = service.open_gateway
        service.check_name(body.model)
        return JobResponse(gateway, service.workers, endpoint, body, service.name, service.settings.log_prompts)

    @router.post("/v1/completions")
    async def completions(body: CompletionBody) -> Response:
        """Continue prompts."""
        return await respond(COMPLETIONS, body)

    @router.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody) -> Response:
        """Take the assistant's turn in a chat."""
        return await respond(CHAT_COMPLETIONS, body)

    return router


def text_routes(service: Service) -> APIRouter:
    """The endpoints that need the tokenizer alone."""
    workers = service.workers
    router = APIRouter(tags=["text"], responses=refusals(400, 404, 503), route_class=body_route(workers))

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a text or a chat."""
        llm = service.gateway.llm
        service.check_name(body.model)

        def encoded() -> bytes:
            if body.messages is not None:
                ids = llm.encode_chat(plain_messages(body.messages))
            else:
                ids = llm.tokenizer.encode(body.prompt or "", body.add_special_tokens)
            return encode_slowly({"tokens": ids, "count": len(ids), "max_model_len": llm.engine.limits.max_len})

        return LargeResponse(await workers.run(encoded), media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids."""
        llm = service.gateway.llm
        service.check_name(body.model)

        def decoded() -> bytes:
            llm.engine.limits.check_ids("tokens", body.tokens)
            return encode_slowly({"prompt": llm.tokenizer.decode(body.tokens, body.skip_special_tokens)})

        return LargeResponse(await workers.run(decoded), media_type="application/json")

    return router


def model_routes(service: Service) -> APIRouter:
    """The endpoints that describe the model."""
    router = APIRouter(tags=["server"], responses=refusals(503))

    def card() -> dict[str, object]:
        return {
            "id": service.name,
            "object": "model",
            "created": int(service.started),
            "owned_by": "peregrine",
            "max_model_len": service.gateway.llm.engine.limits.max_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model that is served."""
        return json_response({"object": "list", "data": [card()]})

    @router.get("/v1/models/{model:path}", responses=refusals(404))
    async def model(model: str) -> Response:
        """The served model, by its name."""
        service.check_name(model)
        return json_response(card())

    return router


def service_routes(service: Service) -> APIRouter:
    """The endpoints that report about the server, and /flush_cache."""
    router = APIRouter(tags=["server"])

    @router.get("/health", responses=refusals(503))
    async def health() -> Response:
        """200 when a request sent now would be served, else 503 with the reason."""
        phase, trouble = service.status
        if trouble is not None:
            return error_response(ApiError(503, trouble, code=phase))
        return json_response({"status": phase})

    @router.get("/livez", responses=refusals(503))
    async def livez() -> Response:
        """200 while the process should live: loading, ready and draining; 503 once its engine has failed."""
        phase, trouble = service.status
        if phase == "faulted":
            return error_response(ApiError(503, trouble or "", code=phase))
        return json_response({"status": phase})

    @router.get("/version")
    async def version() -> Response:
        """The server's version."""
        return json_response({"version": __version__})

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(service.metrics.text(), media_type=METRICS_TYPE)

    @router.post("/flush_cache", responses=refusals(400, 409, 503))
    async def flush_cache(timeout: Annotated[float, Query(ge=0, le=3600, allow_inf_nan=False)] = 0) -> Response:
        """Empty the prefix cache; waits up to `timeout` seconds for the engine to be idle."""
        return json_response({"pages_freed": await drop_cached(service.gateway, timeout)})

    return router


async def drop_cached(gateway: Gateway, seconds: float) -> int:
    """Empty the prefix cache as soon as nothing runs; ApiError if that takes too long."""
    freed = await gateway.drop_cached()  # not under the timeout: with 0 seconds it would end before the engine answers
    try:
        async with asyncio.timeout(seconds):
            while freed is None:
                await gateway.idle.wait()
                await asyncio.sleep(POLL_S)  # the engine ends its last round a little later
                freed = await gateway.drop_cached()
            return freed
    except TimeoutError:
        count = gateway.llm.engine.num_requests
        message = f"{count} generations are running or waiting; wait with ?timeout=SECONDS"
        raise ApiError(409, message) from None
