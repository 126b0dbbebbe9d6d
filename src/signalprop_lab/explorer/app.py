"""The web application: the page, its scripts, and two questions that they ask, `/curves` and `/report`.

It answers to this machine alone: requests for another host name are refused (DNS rebinding), no other origin may read
an answer (no CORS) and, as only JSON is taken, none may ask without the browser's leave. A content security policy lets
the page run no script but these and reach no server but this. A longer question than the page's is refused.
A connection carries one request, so that what is not read of a refused one ends with it.
"""

from __future__ import annotations

import json
import time
from importlib import resources

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from signalprop.errors import InputError, require
from signalprop.files.validation import Value
from signalprop_lab.explorer.curves import report, shown, takes_long
from signalprop_lab.explorer.page import SERVED, explorer_page
from signalprop_lab.explorer.settings import Settings

HOSTS = ["127.0.0.1", "localhost"]
_LARGEST_BODY = 65_536  # bytes; a question of seven curves has under 3,000
_KINDS = {"js": "text/javascript", "css": "text/css"}
_OF_REPORT = ("format.js", "charts.js", "tables.js", "sections.js", "page.css")
_OWN = ("explore.js", "explore.css")
HEADERS = {  # of every answer; the server adds them
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}


def application() -> Starlette:
    """The application."""
    files = _files()
    page = explorer_page(SERVED).encode()

    def index(_: Request) -> Response:
        return Response(page, media_type="text/html")

    def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            raise HTTPException(404)
        return Response(files[name], media_type=_KINDS[name.rpartition(".")[2]])

    return Starlette(
        routes=[
            Route("/", index),
            Route("/assets/{name}", asset),
            Route("/curves", _curves, methods=["POST"]),
            Route("/report", _report, methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)],
        exception_handlers={InputError: _refused, HTTPException: _failed, Exception: _broken},
    )


class _Question(Value):
    """What the page asks about."""

    current: Settings
    pinned: list[Settings]
    draft: bool


# Token kernels are computed one at a time: nobody waits for those of settings that have changed since.
_KERNELS = anyio.CapacityLimiter(1)


async def _curves(request: Request) -> Response:
    begun = time.perf_counter()
    asked = await _question(request)
    if asked.draft or not takes_long(asked.current):
        found = await run_in_threadpool(shown, asked.current, asked.pinned, draft=asked.draft)
    else:
        async with _KERNELS:
            if await request.is_disconnected():
                return Response(status_code=204)
            found = await run_in_threadpool(shown, asked.current, asked.pinned)
    found["milliseconds"] = round(1000 * (time.perf_counter() - begun), 1)
    return JSONResponse(found)


async def _report(request: Request) -> Response:
    asked = await _question(request)
    return Response(await run_in_threadpool(report, asked.current, asked.pinned), media_type="text/html")


async def _question(request: Request) -> _Question:
    """The question in a request's body.

    Raises:
        HTTPException: no such question. InputError: settings that are refused.
    """
    origin = request.headers.get("origin")
    if origin is not None and origin != f"http://{request.headers['host']}":
        raise HTTPException(403, "questions are taken from this page alone")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "expected a body of type application/json")
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or int(length) > _LARGEST_BODY:
        raise HTTPException(413, f"expected a body of at most {_LARGEST_BODY} bytes, and its Content-Length")
    try:
        data = dict(json.loads(await request.body()))
    except (TypeError, ValueError, RecursionError):
        raise HTTPException(400, "the body is no JSON object; expected one with current, pinned and draft") from None
    return _Question(**data)


def _refused(_: Request, error: Exception) -> Response:
    """Settings that make no network are an everyday answer, not a failed request, which a browser would log."""
    return JSONResponse({"refused": str(error)})


def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


def _broken(_: Request, error: Exception) -> Response:
    """A mistake of ours: one line on the page, too."""
    return JSONResponse({"error": " ".join(f"{type(error).__name__}: {error}".split())}, 500)


def _files() -> dict[str, bytes]:
    """What may be asked for under /assets/, by name."""
    plotly = require("plotly", "explore")
    report_assets = resources.files("signalprop.report.html").joinpath("assets")
    own_assets = resources.files(__package__).joinpath("assets")
    found = {name: report_assets.joinpath(name).read_bytes() for name in _OF_REPORT}
    found |= {name: own_assets.joinpath(name).read_bytes() for name in _OWN}
    return found | {"plotly.min.js": resources.files(plotly).joinpath("package_data", "plotly.min.js").read_bytes()}
