"""Routes for operators: the web page, and the JSON that the page, `baton top` and `baton explain` read.

* `GET /`: a redirect to /ui for a browser, else a description of the server.
* `GET /ui`: the page with the live view, the requests, and the drawing of a request's timeline.
* `GET /live`: workers, queues, pages, rooms by phase, the newest requests and the newest failed ones.
* `GET /workers`: the workers, as in /live.
* `GET /requests`: newest first. `?search=`: a part of an id. `?failed=true`: only failed ones. `?limit=`:
  most.
* `GET /requests/{id}`: timeline of one request over all its rooms. `id`: of a request, a response or a room.
"""

import json
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from baton.api.http.authentication import known_callers_only, operators_only
from baton.api.model_routes import root_answer
from baton.bootstrap.room_controller import RoomController
from baton.bootstrap.timeline import live_view
from baton.bootstrap.timeline.request_timeline import build_timeline, of_queued, of_refused
from baton.bootstrap.timeline.retry_chains import PREFIX, RetryChains
from baton.bootstrap.timeline.timeline_schema import RequestTimeline
from baton.fleet.room_index import is_of
from baton.rooms.timeline import Moment
from baton.telemetry.process_metrics import release

LIST_DEFAULT: Final = 50
LIST_MAX: Final = 500
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


def timeline_router(rooms: RoomController) -> APIRouter:
    """Return the routes for operators with the data that the web page shows."""
    router = APIRouter(dependencies=[Depends(operators_only)])

    @router.get("/live")
    async def live_picture() -> Response:
        return _json(live_view.live(rooms))

    @router.get("/workers")
    async def workers() -> Response:
        return _json(live_view.workers(rooms))

    @router.get("/requests")
    async def requests(
        search: str = Query("", max_length=ID_CHARS_MAX),
        failed: bool = False,
        limit: int = Query(LIST_DEFAULT, ge=1, le=LIST_MAX),
    ) -> Response:
        return _json(
            {"requests": live_view.requests(rooms, RetryChains(rooms.registry), limit, search, failed=failed)}
        )

    @router.get("/requests/{id_:path}")
    async def request(id_: str) -> Response:
        timeline = _timeline_of(rooms, id_)
        if timeline is None:
            known = rooms.registry.known_count()
            return _unknown(
                f"Nothing is kept of request {id_[:ID_CHARS_MAX]!r}. {known} rooms are kept, since the"
                " bootstrap started: the open ones, the last that ended (--rooms-kept), the last that failed"
                " (--failed-rooms-kept). An id is a request's (X-Request-Id), an answer's (chatcmpl-…) or a"
                " room's. A request that was refused as it came in never had a room, and is not kept.",
                "id",
            )
        return _json(timeline)

    return router


def _timeline_of(rooms: RoomController, id_: str) -> RequestTimeline | None:
    chain, others = RetryChains(rooms.registry).find(id_)
    if chain:
        retrying = chain[-1].id in rooms.admission.retrying
        return build_timeline(chain, others, rooms.timelines.line(Moment.ASKED), retrying=retrying)
    for name in (id_, PREFIX.sub("", id_, count=1)):
        queued = next((each for each in rooms.admission.waiting() if is_of(each[0], name)), None)
        if queued is not None:
            return of_queued(*queued, rooms.timelines.line(Moment.ASKED))
        refused = rooms.history.refusal(name)
        if refused is not None:
            return of_refused(refused)
    return None


def _file(name: str, media_type: str) -> Response:
    return Response((PAGE / name).read_bytes(), media_type=media_type, headers=HEADERS)


def _json(body: Any) -> Response:
    text = json.dumps(body, default=_plain, ensure_ascii=False, separators=(",", ":"))
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _unknown(message: str, param: str) -> JSONResponse:
    error = {"message": message, "type": "not_found", "param": param, "code": None}
    return JSONResponse({"error": error}, status_code=404)
