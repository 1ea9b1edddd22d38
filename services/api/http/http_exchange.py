"""One HTTP request and its response: ids, caller, event stream, log line and trace span.

The log line and the span hold numbers and words of fixed sets. They never hold the text of a prompt or of an
answer.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Scope, Send

from baton.api.errors import ApiError
from baton.api.http.error_format import OPENAI, ErrorFormat
from baton.api.http.event_stream import EventStream, Framing
from baton.rooms.trace import TraceContext, read_trace
from baton.runtime.logging import Log
from baton.telemetry.tracing import OFF, Attribute, Span, SpanKind, Tracer
from baton.web.http_refusals import NO_METHOD

FAULT_STATUS: Final = 500
"""Lowest HTTP status that is the server's fault. Its cause is logged, and the span is marked as failed."""

DROPPED_CHARS_MAX: Final = 1024

RenderFailure = Callable[[ApiError], Sequence[Mapping[str, Any]]]
"""Function that makes the last chunks of a stream which ends with an error."""

log = Log(__name__)


@dataclass(slots=True)
class HttpExchange:
    """State of one HTTP request and its response. Routes get it from `exchange_of`."""

    request_id: str
    headers: Mapping[str, str]
    """Request headers, by name in lower case. If a header is repeated, the first value counts."""
    trace: TraceContext | None
    """Trace context (W3C) that the client sent. After `begin_span` it is the context of the
    request's own span."""
    has_own_id: bool = False
    """Whether the client chose the request id."""
    error_format: ErrorFormat = OPENAI
    body_digest: bytes = b""
    """Digest of the body of a request that asks for a stream. Empty for other requests."""
    received_s: float = field(default_factory=time.perf_counter)
    """Time at which the request arrived, in seconds of `time.perf_counter`."""
    status: int = 0
    """HTTP status that was sent, or 499 if the client disconnected before. 0: no response was sent, because
    the process ended."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    choices: int | None = None
    """Number of choices that were generated for the request, for its log line. None before that."""
    finish_reasons: tuple[str, ...] = ()
    failure: ApiError | None = None
    """Error that the client got for this request, as an HTTP status or as the last event of a stream."""
    send: Send | None = None
    """ASGI function that sends messages of the response. None while no response can be sent."""
    events: EventStream | None = None
    """Event stream of the response. None if the response is not a stream."""
    render_failure: RenderFailure | None = None
    """Function that makes the last chunks of the event stream `events` after an error."""
    dropped_tools: str = ""
    """Tools of the request that Baton does not support and left out, as a comma-separated text."""
    _span: Span | None = None

    @property
    def outcome_status(self) -> int:
        """HTTP status by which metrics count the request. A stream that broke off counts with the status of
        its error."""
        return self.status if self.failure is None else self.failure.status

    @property
    def log_ids(self) -> dict[str, str]:
        ids = {"request_id": self.request_id}
        return ids if self.trace is None else ids | {"trace_id": self.trace.trace_id}

    def answer(self, error: ApiError) -> JSONResponse:
        """Return the response for an error, in the format of the API that the client called."""
        return self.error_format.answer(error, self.request_id)

    def begin_events(self, framing: Framing, render_failure: RenderFailure, silence_s: float) -> None:
        """Make the response an event stream, which sends keep-alives from now on.

        `render_failure`: makes the last chunks after an error. `silence_s`: longest time without a byte, in
        seconds.
        """
        if self.send is None:
            raise RuntimeError("an exchange sends nothing before it is served")
        self.events = EventStream(self.send, framing, silence_s)
        self.render_failure = render_failure

    def begin_span(self, tracer: Tracer, scope: Scope) -> None:
        """Start a trace span for the request, if tracing is on."""
        if tracer is OFF:
            return
        self._span = tracer.begin(
            f"{scope['method']} {scope['path']}",
            SpanKind.SERVER,
            self.trace,
            _request_attributes(scope, self.headers) | {"baton.request_id": self.request_id},
        )
        if self._span is not None:
            self.trace = self._span.trace

    def name(self, request_id: str | None) -> None:
        """Set the request id from the request body, unless a request header gave one."""
        if request_id is not None and not self.has_own_id:
            self.resume(request_id, has_own_id=True)

    def resume(self, request_id: str, *, has_own_id: bool) -> None:
        """Set the request id, whatever the headers say. `has_own_id`: whether the client chose it."""
        self.request_id, self.has_own_id = request_id, has_own_id
        if self._span is not None:
            self._span.set({"baton.request_id": request_id})

    def drop_tools(self, titles: Sequence[str]) -> None:
        """Report tools that were left out of the request, in a response header and in the log."""
        if titles:
            self.dropped_tools = ", ".join(titles)[:DROPPED_CHARS_MAX]
            log.info("tools that are not served were left out", tools=self.dropped_tools, **self.log_ids)

    def describe(self, attributes: Callable[[], Mapping[str, Attribute]]) -> None:
        """Add attributes to the request's trace span, if it has one.

        `attributes`: function that returns them. It is only called if there is a span.
        """
        if self._span is not None:
            self._span.set(attributes())

    def end(self, scope: Scope, route: str | None) -> None:
        """Write the request's log line and end its trace span. `route`: path template of the route, or
        None."""
        status, fault = self.status, self._fault()
        # Probes, pages that people look at, and requests that are not HTTP are logged for debugging only.
        write = log.debug if scope["method"] in ("GET", NO_METHOD) and fault is None else log.info
        write(
            "request answered" if status else "request cut off",
            **self.log_ids,
            method=scope["method"] or None,
            route=route,
            status=status or None,
            duration_ms=round((time.perf_counter() - self.received_s) * 1000, 3),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            choices=self.choices if self.choices != 1 else None,
            error=None if self.failure is None else self.failure.code,
            cause=None if fault is None else str(fault),
        )
        if self._span is None:
            return
        self._span.set(self._outcome(route))
        if fault is not None:
            self._span.fail(fault.code or str(fault.status), str(fault))
        elif status == 0:
            self._span.fail("cut_off", "the process ended before the request was answered")
        self._span.end()

    def _fault(self) -> ApiError | None:
        """Return the error of the request if it has a 5xx status or broke off a stream. Otherwise return
        None."""
        broke_off = self.failure is not None and self.failure.status != self.status
        return self.failure if broke_off or self.status >= FAULT_STATUS else None

    def _outcome(self, route: str | None) -> dict[str, Attribute]:
        known: dict[str, Attribute | None] = {
            "http.route": route,
            "http.response.status_code": self.status or None,
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.output_tokens": self.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
            "gen_ai.response.finish_reasons": self.finish_reasons or None,
            "error.type": None if self.failure is None else self.failure.code,
        }
        return {name: value for name, value in known.items() if value is not None}


def begin_exchange(
    headers: Mapping[str, str],
    request_id: str,
    error_format: ErrorFormat = OPENAI,
    *,
    has_own_id: bool = False,
) -> HttpExchange:
    """Return the exchange of a request that has just arrived. `has_own_id`: whether the client chose the
    request id."""
    trace = read_trace(headers.get("traceparent"), headers.get("tracestate"))
    return HttpExchange(request_id, headers, trace, has_own_id, error_format)


def exchange_of(request: Request) -> HttpExchange:
    exchange: HttpExchange = request.scope["state"]["exchange"]
    return exchange


def _request_attributes(scope: Scope, headers: Mapping[str, str]) -> dict[str, Attribute]:
    """Return the span attributes of a request, by OpenTelemetry's conventions for HTTP."""
    attributes: dict[str, Attribute] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"],
        "url.scheme": scope["scheme"],
        "network.protocol.version": scope["http_version"],
    }
    if scope.get("server"):
        host, port = scope["server"]
        attributes |= {"server.address": host} | ({} if port is None else {"server.port": port})
    if scope.get("client"):
        attributes["client.address"] = scope["client"][0]
    if (agent := headers.get("user-agent")) is not None:
        attributes["user_agent.original"] = agent[:256]
    return attributes
