"""Routes whose JSON body is parsed and checked by pydantic, in a thread where it is large.

FastAPI would do both in the event loop, where two megabytes of messages hold every other client for a second. It still
describes the bodies in /openapi.json.
"""

from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from peregrine.serve.errors import ApiError, body_error
from peregrine.serve.workers import Workers

SMALL_BODY = 8 * 2**10  # bytes


def body_route(workers: Workers) -> type[APIRoute]:
    """The class of routes whose endpoint takes a `body` and nothing else."""

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            model: type[BaseModel] = get_type_hints(self.endpoint)["body"]

            async def handle(request: Request) -> Response:
                raw = await request.body()
                check_content_type(request.headers.get("content-type", ""))
                if len(raw) <= SMALL_BODY:
                    body = parse_body(model, raw)
                else:
                    body = await workers.run(parse_body, model, raw)
                response: Response = await self.endpoint(body)
                return response

            return handle

    return BodyRoute


def check_content_type(sent: str) -> None:
    """Refuse what a page of another site may send without being asked: any other type than JSON."""
    kind = sent.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = f"Content-Type={sent[:80]!r}: is not JSON; send the body as application/json"
        raise ApiError(400, message, "Content-Type")


def parse_body(model: type[BaseModel], raw: bytes) -> BaseModel:
    """The body as its model; ApiError names the first mistake."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise body_error(error.errors(include_url=False)) from error
