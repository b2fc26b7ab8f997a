"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} and a status."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from peregrine.errors import EngineFault, PeregrineError, RequestError
from peregrine.log import logger

# Causes may name files and addresses of the server's machine: they are in its log alone.
ENGINE_FAILED = "the engine has failed and the server ends, its log says why; send the request again later"
SERVER_FAILED = "the server failed at this request, its log says why"
UNION_TAG = re.compile(r"<\w+>")  # how the protocol marks the members of a union
# What is wrong with a value, and the remedy, by pydantic's name of the problem.
WORDS = {
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), ("is not an object", "send a JSON object")),
    "string_type": ("is not a string", "send one"),
    "list_type": ("is not a list", "send one"),
    "int_type": ("is not a whole number", "send one"),
    "float_type": ("is not a number", "send one"),
    "bool_type": ("is neither true nor false", "send one of them"),
    "greater_than_equal": ("is too small", "use at least {ge}"),
    "less_than_equal": ("is too large", "use at most {le}"),
    "none_required": ("is not null", "leave it out"),
    "too_short": ("has too few entries", "send at least {min_length}"),
    "too_long": ("has too many entries", "send at most {max_length}"),
    "string_too_short": ("is too short", "send more characters: {min_length} at least"),
}
KINDS = {
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "wrong_host"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("invalid_request_error", "body_timeout"),
    409: ("conflict_error", "busy"),
    413: ("invalid_request_error", "body_too_large"),
    429: ("rate_limit_error", "queue_full"),
    500: ("server_error", "engine_fault"),
    503: ("server_error", "not_ready"),
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The body of every error response, for the API's description."""

    error: ErrorDetail


class ApiError(PeregrineError):
    """A refusal with its HTTP status; `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.headers = status, param, headers or {}
        self.kind, usual = KINDS.get(status, ("invalid_request_error", "invalid_value"))
        self.code = code or usual

    def body(self) -> dict[str, object]:
        """The error as OpenAI's JSON."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def shutting_down() -> ApiError:
    """What a client hears whose generation ends, or is not begun, because the server does."""
    return ApiError(503, "the server is shutting down; send the request again", code="shutting_down")


def refusals(*statuses: int) -> dict[int | str, dict[str, object]]:
    """For the API's description: which error statuses an endpoint may have."""
    return {status: {"model": ErrorBody} for status in statuses}


def api_error(error: Exception) -> ApiError:
    """Any failure as the error its client gets."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), error.field)
        case EngineFault():
            return ApiError(500, ENGINE_FAILED)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, SERVER_FAILED, code="internal_error")


def body_error(problems: Sequence[Any]) -> ApiError:
    """What is wrong with a body, from pydantic's list of problems; the first one is reported."""
    problem = problems[0]
    place = field_path(problem["loc"])
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):  # raised by a model as a whole, so its place is the model's
        inner = f"{field}.{cause.field}" if field else cause.field
        refusal = RequestError(inner, cause.value, cause.problem, cause.remedy)
    elif not field or problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not a JSON object: {problem['msg']}; send one as application/json")
    elif problem["type"] == "missing":
        refusal = RequestError(field, None, "is missing", "add it")
    else:
        refusal = RequestError(field, problem["input"], *explained(problem))
    return ApiError(400, str(refusal), refusal.field)


def explained(problem: Any) -> tuple[str, str]:
    """What is wrong with a value, and the remedy."""
    if problem["type"] == "string_type" and problem["loc"][-1] == "<text>":
        return "is neither a string nor a list", "send one of them"
    if problem["type"] == "string_type" and problem["loc"][-1] == "<string>":
        return "is neither a string nor an object", "send one of them"
    if problem["type"] in WORDS:
        said, remedy = WORDS[problem["type"]]
        return said, remedy.format(**problem.get("ctx", {}))
    said = problem["msg"].removeprefix("Value error, ")
    return said[:1].lower() + said[1:], "correct it"


def field_path(location: Sequence[str | int]) -> list[Any]:
    """Where in the body a problem lies, without the tags of unions and the leading "body" that pydantic adds."""
    return [
        part
        for index, part in enumerate(location)
        if isinstance(part, int) or not (UNION_TAG.fullmatch(part) or (index == 0 and part in ("body", "query")))
    ]
