"""What routers ask a replica for, under the names they know: which model it serves, and how busy it is.

sglang-router and vllm-router ask for `/health` and these; the gauges that others read are in `vllm_names.py`.
"""

from fastapi import APIRouter
from starlette.responses import Response

from peregrine.engine.engine import Engine
from peregrine.serve.errors import refusals
from peregrine.serve.info import server_info
from peregrine.serve.service import Service
from peregrine.serve.streaming import json_response


def router_routes(service: Service) -> APIRouter:
    """SGLang's endpoints about a server, each with its older name."""
    router = APIRouter(tags=["routers"], responses=refusals(503))

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def info() -> Response:
        """What the engine decided and why, its limits, and how speculation went so far."""
        return json_response(server_info(service))

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> Response:
        """The served model; routers take `model_path` for its name."""
        config = service.gateway.llm.config
        named = {"model_path": service.name, "served_model_name": service.name}
        return json_response({**named, "model_type": config.family, "is_generation": True})

    @router.get("/get_load")
    async def load() -> Response:
        """Requests, and the tokens they have; a list with one entry, because the engine is one data-parallel rank."""
        return json_response([{"dp_rank": 0, **engine_load(service.gateway.llm.engine)}])

    return router


def engine_load(engine: Engine) -> dict[str, int]:
    """Requests in all and in the queue, and the tokens that all of them have so far."""
    held, waiting = (*engine.running, *engine.reading), tuple(engine.waiting)
    return {
        "num_reqs": len(held) + len(waiting),
        "num_waiting_reqs": len(waiting),
        "num_tokens": sum(request.num_tokens for request in (*held, *waiting)),
    }
