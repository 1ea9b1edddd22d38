"""Routes for operators: the web page, and the JSON that the page, `baton top` and `baton explain` read.

* `GET /`: a redirect to /ui for a browser, else a description of the server.
* `GET /ui`: the page with the live view, the requests, and the drawing of a request's timeline.
* `GET /live`: workers, queues, pages, rooms by phase, the newest requests and the newest failed ones.
* `GET /workers`: the workers, as in /live.
* `GET /requests`: newest first. `?search=`: a part of an id. `?failed=true`: only failed ones. `?limit=`:
  most.
* `GET /requests/{id}`: timeline of one request over all its rooms. `id`: of a request, a response or a room.

All but /workers have what the stack's other bootstraps have, too, and say which of them did not answer.
"""

from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from baton.api.http.authentication import known_callers_only, operators_only
from baton.api.model_routes import root_answer
from baton.bootstrap.peer_bootstraps import PeerBootstraps
from baton.bootstrap.room_controller import RoomController
from baton.bootstrap.timeline import live_view
from baton.bootstrap.timeline.page_json import page_json
from baton.bootstrap.timeline.stack_view import FoundTimeline, StackView
from baton.telemetry.process_metrics import release

LIST_DEFAULT: Final = 50
ID_CHARS_MAX: Final = 160

PAGE: Final = Path(__file__).parent.parent / "ui"
FILES: Final = {
    "app.js": "text/javascript",
    "live.js": "text/javascript",
    "request_view.js": "text/javascript",
    "draw.js": "text/javascript",
    "timeline.js": "text/javascript",
    "style.css": "text/css",
    "icon.svg": "image/svg+xml",
}
HEADERS: Final = {
    # Nothing is loaded from, sent to, or shown within another site.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_router() -> APIRouter:
    """Return the routes of the web page for operators. The page's data has routes of its own."""
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/ui")
        return _json({**root_answer(release()), "pages": "/ui"})

    @router.get("/ui", include_in_schema=False, dependencies=[Depends(known_callers_only)])
    async def page() -> Response:
        return _file("index.html", "text/html")

    @router.get("/ui/{name}", include_in_schema=False, dependencies=[Depends(known_callers_only)])
    async def part(name: str) -> Response:
        if name not in FILES:
            return _unknown(f"Nothing is served at /ui/{name[:ID_CHARS_MAX]}.", "path")
        return _file(name, FILES[name])

    return router


def timeline_router(rooms: RoomController, peers: PeerBootstraps) -> APIRouter:
    """Return the routes for operators with the data that the web page shows. `peers`: the other bootstraps
    of the stack."""
    router = APIRouter(dependencies=[Depends(operators_only)])
    stack = StackView(rooms, peers)

    @router.get("/live")
    async def live_picture() -> Response:
        return _json(await stack.live())

    @router.get("/workers")
    async def workers() -> Response:
        return _json(live_view.workers(rooms))

    @router.get("/requests")
    async def requests(
        search: str = Query("", max_length=ID_CHARS_MAX),
        failed: bool = False,
        limit: int = Query(LIST_DEFAULT, ge=1, le=live_view.REQUESTS_MAX),
    ) -> Response:
        return _json(await stack.requests(limit, search, failed=failed))

    @router.get("/requests/{id_:path}")
    async def request(id_: str) -> Response:
        found = await stack.find_timeline(id_)
        return _unknown_request(rooms, id_, found) if found.timeline is None else _json(found.timeline)

    return router


def _file(name: str, media_type: str) -> Response:
    return Response((PAGE / name).read_bytes(), media_type=media_type, headers=HEADERS)


def _json(body: Any) -> Response:
    return Response(page_json(body), media_type="application/json", headers={"Cache-Control": "no-store"})


def _unknown_request(rooms: RoomController, id_: str, found: FoundTimeline) -> JSONResponse:
    where = f" here, nor at {', '.join(found.bootstraps)}" if found.bootstraps else ""
    silent = "".join(f" {each} It may know the request." for each in found.unanswered)
    return _unknown(
        f"Nothing is kept of request {id_[:ID_CHARS_MAX]!r}{where}.{silent}"
        f" {rooms.registry.known_count()} rooms are kept here, since the"
        " bootstrap started: the open ones, the last that ended (--rooms-kept), the last that failed"
        " (--failed-rooms-kept). An id is a request's (X-Request-Id), an answer's (chatcmpl-…) or a"
        " room's. A request that was refused as it came in never had a room, and is not kept.",
        "id",
    )


def _unknown(message: str, param: str) -> JSONResponse:
    error = {"message": message, "type": "not_found", "param": param, "code": None}
    return JSONResponse({"error": error}, status_code=404)
