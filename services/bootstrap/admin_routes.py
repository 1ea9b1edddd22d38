"""HTTP routes of the router besides the API: health probes, metrics, rooms and weights.

* `GET /health`: 200 while the process serves.
* `GET /ping`: 200 once a request could be served, else 503.
* `GET /ready`: 200 once a canary (test request) has passed through a worker of each side, or through a decode
  worker that serves alone. Else 503 and why.

The platform calls these three without a key. Only operators see which workers are concerned. The other routes
are for operators alone, and may be on a port of their own.

* `GET /metrics`: Prometheus text. `?name[]=`: series of exactly this name, may be repeated.
* `GET /rooms`: newest rooms first. `?request_id=`: rooms of exactly this request. `?limit=`: most rooms.
* `GET /rooms/{id}`: one room's timeline.
* `PUT /workers/{name}?prefill_weight=`: set the weight (0 to 100) of a process that serves both sides, from
  the next room on.
"""

from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CollectorRegistry

from baton.api.http.authentication import operators_only
from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomEntry
from baton.ids import RoomId
from baton.rooms.errors import UnknownRoom, UnknownWorker
from baton.rooms.phases import Side
from baton.rooms.worker_facts import WEIGHT_TOTAL
from baton.web.metrics_exposition import choose_exposition
from baton.wire.malformed import Malformed
from baton.wire.registration import process_from_wire

LIST_DEFAULT: Final = 100
LIST_MAX: Final = 1000
NAMES_MAX: Final = 64
"""Most names of series that one request for metrics may list."""
ID_CHARS_MAX: Final = 20
"""Most decimal digits of a 64-bit room id."""


def probe_router(registry: Registry, canary_problem: Callable[[], str | None]) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/ping")
    async def ping() -> Response:
        """Answer whether a request could be served, in SageMaker's format."""
        return Response(status_code=503 if unavailable(registry) else 200)

    @router.get("/ready")
    async def ready(request: Request) -> JSONResponse:
        problems = unavailable(registry)
        if not getattr(request.state, "operator", True):
            state = {"status": "unavailable" if problems else "ok", "problems": problems}
            return JSONResponse(state, status_code=503 if problems else 200)
        workers = [
            {
                "name": w.facts.name,
                "incarnation": str(w.facts.incarnation),
                "side": w.facts.side.value,
                "state": w.state.value,
                "rooms": len(w.rooms),
                "weight": w.weight,
                "process": None if w.facts.other_side is None else w.facts.other_side.process,
            }
            for w in registry.workers()
        ]
        body = {
            "status": "unavailable" if problems else "ok",
            "problems": problems,
            "slower": _slower(registry),
            "canary": canary_problem(),
            "workers": workers,
        }
        return JSONResponse(body, status_code=503 if problems else 200)

    return router


def admin_router(
    registry: Registry, metrics: CollectorRegistry, weigh: Callable[[str, int], None]
) -> APIRouter:
    """Return the router with the routes for operators. No route reads a body, so no body needs a bound.

    `weigh`: sets the prefill weight of a process (`RoomController.weigh`).
    """
    router = APIRouter(dependencies=[Depends(operators_only)])

    @router.put("/workers/{process}")
    async def worker(process: str, prefill_weight: int = Query(ge=0, le=WEIGHT_TOTAL)) -> JSONResponse:
        try:
            weigh(process_from_wire(process), prefill_weight)
        except (Malformed, UnknownWorker) as error:
            return _not_found(str(error), "process")
        body = {"process": process, "prefill_weight": prefill_weight}
        return JSONResponse({**body, "decode_weight": WEIGHT_TOTAL - prefill_weight})

    @router.get("/metrics")
    async def metrics_page(
        request: Request, name: Annotated[tuple[str, ...], Query(alias="name[]", max_length=NAMES_MAX)] = ()
    ) -> Response:
        encode, content_type = choose_exposition(request.headers.get("accept", ""))
        chosen = metrics.restricted_registry(name) if name else metrics
        return Response(encode(chosen), media_type=content_type)

    @router.get("/rooms")
    async def rooms(
        request_id: str | None = None, limit: int = Query(LIST_DEFAULT, ge=1, le=LIST_MAX)
    ) -> dict[str, Any]:
        entries = registry.rooms() if request_id is None else registry.find(request_id)
        return {"rooms": [_room(entry, events=False) for entry in islice(entries, limit)]}

    @router.get("/rooms/{room}")
    async def room(room: str) -> JSONResponse:
        try:
            entry = registry.get(_id(room))
        except UnknownRoom:
            return _not_found(f"room {room[:ID_CHARS_MAX]!r} is not known", "id")
        return JSONResponse(_room(entry, events=True))

    return router


def _not_found(message: str, param: str) -> JSONResponse:
    error = {"message": message, "type": "not_found", "param": param, "code": None}
    return JSONResponse({"error": error}, status_code=404)


def _id(text: str) -> RoomId:
    """Parse the text of a room id. Raises UnknownRoom for a text that cannot be one."""
    if len(text) > ID_CHARS_MAX or not (text.isascii() and text.isdigit()):
        raise UnknownRoom("not a room id")
    return RoomId(int(text))


def unavailable(registry: Registry) -> list[str]:
    """Return texts that say why no request can be served: a side has no ready worker, or ready workers do not
    connect. Empty if requests can be served."""
    return [f"no {side.value} worker is ready" for side in registry.missing()] + [
        f"{prefill.facts.name} and {decode.facts.name} do not connect, and no other pair is ready"
        for prefill, decode in registry.unreachable()
    ]


def _slower(registry: Registry) -> list[str]:
    """Return texts that say why requests are served more slowly than they could be. Empty if they are not."""
    if registry.ready_count(Side.PREFILL) or not registry.serves_alone:
        return []
    return ["no prefill worker is ready: decode workers compute the prompts themselves"]


def _room(entry: RoomEntry, *, events: bool) -> dict[str, Any]:
    """Render a room as JSON. Ids are rendered as text, since they exceed JavaScript's numbers."""
    body: dict[str, Any] = {
        "id": str(entry.id),
        "request_id": entry.request_id,
        "trace_id": entry.trace_id or None,
        "phase": entry.phase.value,
        "prefill": entry.names.get(Side.PREFILL),
        "decode": entry.decode.name,
        "local": entry.is_local,
        "same_process": entry.is_same_process,
        "canary": entry.canary,
        "choices": entry.choices,
        "retry_of": None if entry.retry_of is None else str(entry.retry_of),
        "cause": None
        if entry.cause is None
        else {"reason": entry.cause.reason.value, "text": entry.cause.text},
    }
    if events:
        body["events"] = [
            {
                "wall_ms": each.wall_ms,
                "host_us": each.host_us,
                "source": each.source,
                "name": each.name,
                "detail": each.detail,
            }
            for each in sorted(entry.events, key=lambda event: event.wall_ms)
        ]
        body["events_dropped"] = entry.events_dropped
    return body
