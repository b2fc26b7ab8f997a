"""Any request, valid by the API schema or not, never gets a 5xx response."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from peregrine.serve.app import make_app
from peregrine.serve.service import Service
from peregrine.serve.settings import ServeConfig
from serve.conftest import Served

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
)
EXAMPLES = 15  # per operation and mode
DESCRIPTION = make_app(Service("merlin", ServeConfig())).openapi()
OPERATIONS = [found.ok() for found in schemathesis.openapi.from_dict(DESCRIPTION).get_all_operations()]

SENT = [
    pytest.param(operation, mode, id=f"{operation.label} {mode.value}")
    for operation in OPERATIONS
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or operation.body or operation.query  # the operation has a body or parameters
]


@pytest.mark.parametrize(("operation", "mode"), SENT)
def test_no_response_is_a_server_error(server: Served, operation: APIOperation, mode: GenerationMode) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case) -> None:
        shorten(case)
        case.call_and_validate(base_url=server.url, checks=list(CHECKS), timeout=60)

    check()


def shorten(case: schemathesis.Case) -> None:
    """Limit max_tokens to two: a longer text takes longer and tests nothing more."""
    if isinstance(case.body, dict):
        lengths = [name for name in ("max_tokens", "max_completion_tokens", "n") if is_large(case.body.get(name))]
        case.body = {**case.body, **dict.fromkeys(lengths, 2)}
        if case.path.startswith("/v1/") and not lengths:  # /tokenize would refuse the field
            case.body = {"max_tokens": 2, **case.body}
    if case.query and is_large(case.query.get("timeout")):
        case.query["timeout"] = 0


def is_large(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 2


def test_every_route_is_described(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert set(paths) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/livez",
        "/version",
        "/server_info",
        "/get_server_info",
        "/model_info",
        "/get_model_info",
        "/get_load",
        "/flush_cache",
        "/metrics",
    }
