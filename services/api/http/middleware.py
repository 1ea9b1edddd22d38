"""Outermost ASGI middleware: request ids, access control, metrics, logging, and errors in the API's format.

Each request has an id, the client's `X-Request-Id` or a random one, which the response repeats. A request is
admitted or refused, counted, and gets one line in the log. An unexpected exception becomes an error in the
format of the API.
"""

import re
import secrets
from collections.abc import Collection, Mapping
from typing import Any, Final

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api.backend import BackendError
from baton.api.errors import CLIENT_GONE, ApiError, internal_error, invalid
from baton.api.http.authentication import PROBES, AccessControl
from baton.api.http.backend_errors import as_api_error, from_backend
from baton.api.http.disconnect import ClientGone
from baton.api.http.error_format import ErrorFormatOf, openai_only
from baton.api.http.http_exchange import HttpExchange, begin_exchange, exchange_of
from baton.api.http.metrics import HttpMetrics
from baton.api.http.request_headers import REQUEST_ID, first_headers
from baton.runtime.logging import Log
from baton.telemetry.tracing import OFF, Tracer
from baton.web.client_connection import client_connection_of
from baton.web.http_refusals import HttpRefusal, refusal_in

HEADER: Final = "X-Request-Id"
SENT: Final = HEADER.lower().encode()
UNAUTHORIZED: Final = 401
SLASHES: Final = re.compile("//+")
FREE_PART: Final = re.compile(r"\{\w+:path\}")
"""Pattern of a path parameter that may contain slashes, such as `{name:path}`."""
DROPPED: Final = b"x-baton-dropped-tools"
PROBE_STATUSES: Final = frozenset({200, 503})
"""HTTP statuses of normal answers to health probes. Probes answered with one of them are not counted in
metrics."""

log = Log(__name__)


class ApiMiddleware:
    """Outermost middleware of the API: request ids, access control, metrics, logging and error answers. It is
    written for ASGI directly."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        direct: Mapping[tuple[str, str], APIRoute],
        access: AccessControl,
        tracer: Tracer = OFF,
        error_format_of: ErrorFormatOf = openai_only,
        templates: Collection[str] = (),
    ) -> None:
        """Wrap `app`. `direct`: routes, by method and path, that are called without FastAPI, whose routing
        costs as much as a short response. Their endpoints take only the request, and only they are traced.
        `templates`: path templates of all routes."""
        self.app = app
        self.metrics = metrics
        self._direct = direct
        self._access = access
        self._tracer = tracer
        self._error_format_of = error_format_of
        fixed = [FREE_PART.split(each)[0] for each in templates if FREE_PART.search(each)]
        self._free = [(each, re.compile(each.replace("/", "/+"))) for each in fixed]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # no WebSocket is served
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if (path := self._plain_path(scope["path"])) != scope["path"]:
            scope = {**scope, "path": path}
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server below leaves out the body
        headers = first_headers(scope)
        given = headers.get(HEADER.lower())
        acceptable = given is None or REQUEST_ID.fullmatch(given) is not None
        request_id = given if given is not None and acceptable else secrets.token_hex(16)
        error_format = self._error_format_of(scope["path"], headers)
        exchange = begin_exchange(headers, request_id, error_format, has_own_id=given is not None)
        scope.setdefault("state", {})["exchange"] = exchange

        async def send_with_ids(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                sent = [*message.get("headers", ()), *_id_headers(exchange)]
                if exchange.status == UNAUTHORIZED and _is_sending(scope):
                    sent.append((b"connection", b"close"))  # the body of a request without a key is not read
                message = {**message, "headers": sent}
            await send(message)

        exchange.send = send_with_ids
        try:
            await self._answer(exchange, acceptable, scope, receive, send_with_ids)
        finally:
            if exchange.events is not None:
                exchange.events.close()
            route = _route(scope)
            if exchange.status and not (route in PROBES and exchange.outcome_status in PROBE_STATUSES):
                self.metrics.count_request(route, exchange.outcome_status)
            exchange.end(scope, route)
            exchange.send = exchange.events = exchange.render_failure = None  # else each is a reference cycle

    async def _answer(
        self,
        exchange: HttpExchange,
        acceptable: bool,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """Serve one request, and answer its errors. `acceptable`: whether the request id in its header is
        valid."""
        try:
            if (refusal := refusal_in(scope)) is None:
                self._access.check(scope)
            if refusal is not None:
                exchange.failure = answer = as_api_error(refusal)
                await exchange.answer(answer)(scope, receive, send)
            elif not acceptable:
                await exchange.answer(_refused_id())(scope, receive, send)
            elif (route := self._direct.get((scope["method"], scope["path"]))) is not None:
                exchange.begin_span(self._tracer, scope)
                await _serve(route, scope, receive, send)
            else:
                await self.app(scope, receive, send)
        except (ApiError, BackendError, HttpRefusal) as error:
            if not await self._fail(exchange, as_api_error(error), scope, receive, send):
                raise
        except ClientGone:
            exchange.status = exchange.status or CLIENT_GONE
        except Exception as error:
            log.error(  # noqa: TRY400
                "a reply broke off" if exchange.status else "a request hit a bug",
                error=error,
                **exchange.log_ids,
                route=_route(scope),
            )
            if not await self._fail(exchange, internal_error(), scope, receive, send):
                raise  # the server then closes the connection, so that the reply does not look complete

    def _plain_path(self, path: str) -> str:
        """Return the path without repeated slashes and without a slash at its end.

        Clients may join a base URL that ends with a slash and a path that begins with one. A path parameter
        that may contain slashes, such as a request id, keeps them.
        """
        for fixed, pattern in self._free:
            if (found := pattern.match(path)) is not None:
                return (fixed + path[found.end() :]).rstrip("/")
        return "/" + SLASHES.sub("/", path).strip("/")

    async def _fail(
        self, exchange: HttpExchange, failure: ApiError, scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Answer with the HTTP status of the error, or with the last event of a stream that has begun.

        Returns False if it is too late for both.
        """
        exchange.failure = failure
        events, render = exchange.events, exchange.render_failure
        if events is not None and render is not None and await events.settle():
            await events.write(events.framing.events(render(failure)), last=True)
            return True
        if exchange.status:
            return False
        await exchange.answer(failure)(scope, receive, send)
        return True


async def _serve(route: APIRoute, scope: Scope, receive: Receive, send: Send) -> None:
    scope["route"] = route
    response: Response = await route.endpoint(Request(scope, receive))
    await response(scope, receive, send)


async def api_error(request: Request, error: Exception) -> Response:
    """Return the response for an ApiError. FastAPI calls this exception handler."""
    if not isinstance(error, ApiError):
        raise error
    return exchange_of(request).answer(error)


async def backend_error(request: Request, error: Exception) -> Response:
    """Return the response for a BackendError that was raised before the first byte. FastAPI calls this
    exception handler."""
    if not isinstance(error, BackendError):
        raise error
    return exchange_of(request).answer(from_backend(error))


async def bug(_: Request, error: Exception) -> Response:
    """Raise an unexpected exception again, so that `ApiMiddleware` answers it. FastAPI calls this exception
    handler."""
    raise error


async def routing_error(request: Request, error: Exception) -> Response:
    """Return the response for an unknown path or a wrong method. FastAPI calls this exception handler."""
    if not isinstance(error, HTTPException):
        raise error
    shown = request.url.path[:128]
    match error.status_code:
        case 404:
            message, code = f"Nothing is served at {shown}.", "not_found"
        case 405:
            message, code = f"{request.method[:16]} is not allowed at {shown}.", "method_not_allowed"
        case _:
            message, code = str(error.detail), "invalid_request"
    refused = ApiError(error.status_code, message, code=code, headers=error.headers)
    return exchange_of(request).answer(refused)


def _id_headers(exchange: HttpExchange) -> list[tuple[bytes, bytes]]:
    """Return the response headers with the request id, and with the tools that were left out of the
    request."""
    names = dict.fromkeys((SENT, exchange.error_format.id_header.encode()))
    headers = [(name, exchange.request_id.encode()) for name in names]
    return [*headers, (DROPPED, exchange.dropped_tools.encode())] if exchange.dropped_tools else headers


def _is_sending(scope: Scope) -> bool:
    """Return whether the client is still sending the request's body."""
    client = client_connection_of(scope)
    return client is not None and client.is_sending()


def _route(scope: Scope) -> str | None:
    """Return the path template of the route that serves the request, or None."""
    route: Any = scope.get("route")
    return None if route is None else str(route.path)


def _refused_id() -> ApiError:
    return invalid(HEADER, f"{HEADER} has to be 1 to 128 letters, digits or ._:/+=@- characters.")
