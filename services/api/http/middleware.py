"""What holds for every HTTP exchange, whichever route serves it?

It has a request id (the caller's `X-Request-Id`, or a fresh one) that goes back in the response, it is let in
or not, it is counted and has one line in the log, and nothing but an error in the shape of its API
comes out of a bug.
"""

import re
import secrets
from collections.abc import Mapping
from typing import Any, Final

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api.backend import BackendError
from baton.api.errors import CLIENT_GONE, ApiError, as_api_error, from_backend, internal_error, invalid
from baton.api.http.authentication import PROBES, AccessControl
from baton.api.http.disconnect import ClientGone
from baton.api.http.error_format import ErrorFormatOf, openai_only
from baton.api.http.http_exchange import HttpExchange, exchange_in
from baton.api.http.metrics import HttpMetrics
from baton.api.http.request_headers import REQUEST_ID, header
from baton.runtime.logging import Log
from baton.telemetry.tracing import OFF, Tracer
from baton.web.client_connection import client_connection_of
from baton.web.http_refusals import HttpRefusal, refusal_in

HEADER: Final = "X-Request-Id"
SENT: Final = HEADER.lower().encode()
UNAUTHORIZED: Final = 401
SLASHES: Final = re.compile("//+")
DROPPED: Final = b"x-baton-dropped-tools"
TOLD_TO_PROBES: Final = frozenset({200, 503})
"""Yes and no: the answer of a probe, whoever asks, is no request that went well or failed."""

log = Log(__name__)


class ApiMiddleware:
    """Pure ASGI, around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        direct: Mapping[tuple[str, str], APIRoute],
        door: AccessControl,
        tracer: Tracer = OFF,
        error_format_of: ErrorFormatOf = openai_only,
    ) -> None:
        """`direct`: routes, by method and path, that are called from here: their endpoints take the request
        alone, and the application's own way to them costs as much as a short answer. They alone are
        traced."""
        self._app = app
        self.metrics = metrics
        self._direct = direct
        self._door = door
        self._tracer = tracer
        self._manners_of = error_format_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # none is served, and none passes the door
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _plain_path(scope)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # what differs is the body, which the server below leaves out
        given = header(scope, SENT)
        acceptable = given is None or REQUEST_ID.fullmatch(given) is not None
        request_id = given if given is not None and acceptable else secrets.token_hex(16)
        exchange = exchange_in(scope, request_id, self._manners_of(scope), named=given is not None)
        scope.setdefault("state", {})["exchange"] = exchange

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                headers = [*message.get("headers", ()), *_marks(exchange)]
                if exchange.status == UNAUTHORIZED and _is_sending(scope):
                    headers.append((b"connection", b"close"))  # nobody without a key has a body read
                message = {**message, "headers": headers}
            await send(message)

        exchange.send = send_marked
        try:
            await self._answer(exchange, acceptable, scope, receive, send_marked)
        finally:
            if exchange.events is not None:
                exchange.events.close()
            route = _route(scope)
            if exchange.status and not (route in PROBES and exchange.outcome_status in TOLD_TO_PROBES):
                self.metrics.count_request(route, exchange.outcome_status)
            exchange.end(scope, route)
            exchange.send = exchange.events = exchange.render_failure = None  # else each is a cycle

    async def _answer(
        self,
        exchange: HttpExchange,
        acceptable: bool,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """`acceptable`: whether its id is one. Whatever goes wrong before the status was sent is answered."""
        try:
            if (refusal := refusal_in(scope)) is None:
                self._door.check(scope)
            if refusal is not None:
                exchange.failure = answer = as_api_error(refusal)
                await exchange.answer(answer)(scope, receive, send)
            elif not acceptable:
                await exchange.answer(_refused_id())(scope, receive, send)
            elif (route := self._direct.get((scope["method"], scope["path"]))) is not None:
                exchange.begin_span(self._tracer, scope)
                await _serve(route, scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except (ApiError, BackendError, HttpRefusal) as error:
            if not await self._fail(exchange, as_api_error(error), scope, receive, send):
                raise
        except ClientGone:
            exchange.status = exchange.status or CLIENT_GONE
        except Exception as error:
            log.error(  # noqa: TRY400
                "a reply broke off" if exchange.status else "a request hit a bug",
                error=error,
                **exchange.names,
                route=_route(scope),
            )
            if not await self._fail(exchange, internal_error(), scope, receive, send):
                raise  # the server closes the connection, so that the reply does not look complete

    async def _fail(
        self, exchange: HttpExchange, failure: ApiError, scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Answer with the failure's status, or with the last event of a stream that has begun.

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


def _plain_path(scope: Scope) -> Scope:
    """A path with a slash at its end, or with several in a row, is the one without.

    Clients join a base URL that ends with a slash and a path that begins with one.
    """
    path = scope["path"]
    plain = "/" + SLASHES.sub("/", path).strip("/")
    return scope if path == plain else {**scope, "path": plain}


async def _serve(route: APIRoute, scope: Scope, receive: Receive, send: Send) -> None:
    scope["route"] = route
    response: Response = await route.endpoint(Request(scope, receive))
    await response(scope, receive, send)


def exchange_of(request: Request) -> HttpExchange:
    exchange: HttpExchange = request.scope["state"]["exchange"]
    return exchange


async def api_error(request: Request, error: Exception) -> Response:
    """Handler: ApiError as a response."""
    if not isinstance(error, ApiError):
        raise error
    return exchange_of(request).answer(error)


async def backend_error(request: Request, error: Exception) -> Response:
    """Handler: a failure of the pipeline before the first byte."""
    if not isinstance(error, BackendError):
        raise error
    return exchange_of(request).answer(from_backend(error))


async def bug(_: Request, error: Exception) -> Response:
    """Handler: the framework has no answer of its own to a bug, the edge around it does."""
    raise error


async def routing_error(request: Request, error: Exception) -> Response:
    """Handler: no such path, wrong method."""
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


def _marks(exchange: HttpExchange) -> list[tuple[bytes, bytes]]:
    """The headers of its id, and of what was left out."""
    names = dict.fromkeys((SENT, exchange.manners.id_header.encode()))
    marks = [(name, exchange.request_id.encode()) for name in names]
    return [*marks, (DROPPED, exchange.dropped_tools.encode())] if exchange.dropped_tools else marks


def _is_sending(scope: Scope) -> bool:
    """Whether the request's body is not whole."""
    client = client_connection_of(scope)
    return client is not None and client.is_sending()


def _route(scope: Scope) -> str | None:
    """The path template of the route that took the request."""
    route: Any = scope.get("route")
    return None if route is None else str(route.path)


def _refused_id() -> ApiError:
    return invalid(HEADER, f"{HEADER} has to be 1 to 128 letters, digits or ._:/+=@- characters.")
