"""Pages for people: the playground at the root, the API's description, and their files under /static."""

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"
FRESH = {"Cache-Control": "no-cache"}  # ask again each time: page, style and script must be of one version
# A browser loads nothing for the page from other hosts, whatever a model writes; data: is the icon.
SHUT = {"Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'"}


class Files(StaticFiles):
    """Static files that are never taken from a cache unasked."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(FRESH)
        return response


def pages() -> APIRouter:
    """Routes that are no part of the API."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index() -> Response:
        return FileResponse(STATIC / "index.html", headers=FRESH | SHUT)

    @router.get("/docs")
    async def docs() -> Response:
        return FileResponse(STATIC / "api.html", headers=FRESH | SHUT)

    router.routes.append(Mount("/static", Files(directory=STATIC)))
    return router
