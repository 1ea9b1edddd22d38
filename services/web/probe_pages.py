"""HTTP pages of a worker for its platform (such as Kubernetes): liveness, readiness and metrics.

    GET /metrics   Prometheus text of the worker's registry
    GET /started   200 once it has loaded and run its loop once, else 503: wait, as long as a start may take
    GET /health    200 while it makes progress, else 503 with the problem: restart it
    GET /ready     200 while it takes requests, else 503 with what it waits for: wait

`/started` and `/health` depend on the worker alone. `/ready` may depend on other processes.
"""

import socket
from collections.abc import Callable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.web.closed_connections import ClosedConnections
from baton.web.http_server import HttpServer, serve_http
from baton.web.metrics_exposition import choose_exposition

GRACEFUL_TIMEOUT_S: Final = 2

Problems = Callable[[], Sequence[str]]
"""Function that returns the present problems of a worker as texts, or an empty list. It runs in the event
loop and must not block."""


async def serve_metrics(
    sock: socket.socket,
    registry: CollectorRegistry,
    unstarted: Problems,
    unhealthy: Problems,
    unready: Problems,
    notes: Problems = tuple,
) -> HttpServer:
    """Serve a worker's four pages on a socket from `bind_port`, in the running event loop.

    `unstarted`, `unhealthy`, `unready`: return the problems that `/started`, `/health` and `/ready` report.
    `notes`: returns texts that `/ready` adds if there is no problem.

    Call this before the slow part of a start, so that `/ready` shows what the worker waits for.
    """
    app = metrics_app(registry, unstarted, unhealthy, unready, notes)
    return await serve_http(app, sock, GRACEFUL_TIMEOUT_S, connections=ClosedConnections(registry))


def metrics_app(
    registry: CollectorRegistry,
    unstarted: Problems,
    unhealthy: Problems,
    unready: Problems,
    notes: Problems = tuple,
) -> Starlette:
    """Return a worker's four pages (metrics, started, health, ready) as an ASGI application."""

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_exposition(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)

    async def started(_: Request) -> Response:
        return _answer(unstarted())

    async def health(_: Request) -> Response:
        return _answer(unhealthy())

    async def ready(_: Request) -> Response:
        return _answer(unready(), notes())

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/started", started),
            Route("/health", health),
            Route("/ready", ready),
        ],
    )


def _answer(problems: Sequence[str], notes: Sequence[str] = ()) -> JSONResponse:
    if problems:
        return JSONResponse({"status": "unavailable", "problems": list(problems)}, status_code=503)
    return JSONResponse({"status": "ok"} | ({"notes": list(notes)} if notes else {}))
