"""Files for browsers: the playground at the root, the page of /docs, and their scripts and styles under /static."""

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"
LOOK = Path(__file__).parents[1] / "assets" / "look.css"  # shared with the report of benchmarks
# A browser asks again each time, so that page, style and script are of one version.
REVALIDATE = {"Cache-Control": "no-cache"}
# A browser loads nothing from other hosts for the page, whatever text a model writes into it, sends no form anywhere,
# and shows the page in no other page; data: is the icon.
POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
PAGE_HEADERS = {**REVALIDATE, "Content-Security-Policy": POLICY}


class RevalidatedFiles(StaticFiles):
    """Static files that a browser does not take from its cache without asking."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(PAGE_HEADERS)
        return response


def static_routes() -> APIRouter:
    """Routes that are no part of the API."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index() -> Response:
        return FileResponse(STATIC / "index.html", headers=PAGE_HEADERS)

    @router.get("/docs")
    async def docs() -> Response:
        return FileResponse(STATIC / "api.html", headers=PAGE_HEADERS)

    @router.get("/static/look.css")
    async def look() -> Response:
        return FileResponse(LOOK, headers=REVALIDATE)

    router.routes.append(Mount("/static", RevalidatedFiles(directory=STATIC)))
    return router
