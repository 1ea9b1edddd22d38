"""What is known of one HTTP exchange when it is over: its line in the log, and its span?

One line each. Of what was asked and answered it has numbers and words of closed sets, never text.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.responses import JSONResponse
from starlette.types import Scope, Send

from baton.api.errors import ApiError
from baton.api.http.error_format import OPENAI, ErrorFormat
from baton.api.http.event_stream import EventStream, Framing
from baton.api.http.request_headers import header
from baton.rooms.trace import TraceContext, read_trace
from baton.runtime.logging import Log
from baton.telemetry.tracing import OFF, Attribute, Span, SpanKind, Tracer
from baton.web.http_refusals import NO_METHOD

FAULT_STATUS: Final = 500
"""From here on it is ours: the cause goes into the log, and the span is one of a failure."""

DROPPED_CHARS_MAX: Final = 1024

log = Log(__name__)


@dataclass(slots=True)
class HttpExchange:
    request_id: str
    trace: TraceContext | None
    """What the caller sent; once there is a span, of that."""
    named: bool = False
    """Whether the id is its caller's."""
    manners: ErrorFormat = OPENAI
    """By which its caller is spoken to."""
    received_s: float = field(default_factory=time.perf_counter)
    """When it came in."""
    status: int = 0
    """That was sent, or that a client counts as which did not wait for it. 0: none was, which happens to
    requests that the process does not live to answer."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    choices: int | None = None
    """Answers that were drawn."""
    finish_reasons: tuple[str, ...] = ()
    failure: ApiError | None = None
    """What the caller was told went wrong, by the status or by the last event."""
    send: Send | None = None
    """Sends the response."""
    events: EventStream | None = None
    """The response, if it is one of events."""
    render_failure: Callable[[ApiError], list[dict[str, Any]]] | None = None
    """Makes the last chunks of `events`, which tell what went wrong."""
    dropped_tools: str = ""
    """Tools of the request that are not served and were left out."""
    _span: Span | None = None

    @property
    def outcome_status(self) -> int:
        """As what it is counted: a stream that broke off as the error that its last event told."""
        return self.status if self.failure is None else self.failure.status

    @property
    def names(self) -> dict[str, str]:
        names = {"request_id": self.request_id}
        return names if self.trace is None else names | {"trace_id": self.trace.trace_id}

    def answer(self, error: ApiError) -> JSONResponse:
        """What went wrong, as its caller reads it."""
        return self.manners.answer(error, self.request_id)

    def begin_events(
        self, framing: Framing, render_failure: Callable[[ApiError], list[dict[str, Any]]], silence_s: float
    ) -> None:
        """The response is a stream of events, which keeps itself alive from here on.

        `silence_s`: longest time without a byte, seconds.
        """
        if self.send is None:
            raise RuntimeError("an exchange sends nothing before it is served")
        self.events = EventStream(self.send, framing, silence_s)
        self.render_failure = render_failure

    def begin_span(self, tracer: Tracer, scope: Scope) -> None:
        """From here on the request is part of a trace, if there is a tracer."""
        if tracer is OFF:
            return
        self._span = tracer.begin(
            f"{scope['method']} {scope['path']}",
            SpanKind.SERVER,
            self.trace,
            _of(scope) | {"baton.request_id": self.request_id},
        )
        if self._span is not None:
            self.trace = self._span.trace

    def name(self, request_id: str | None) -> None:
        """Its caller's id, where a header has none."""
        if request_id is None or self.named:
            return
        self.request_id, self.named = request_id, True
        if self._span is not None:
            self._span.set({"baton.request_id": request_id})

    def drop_tools(self, titles: Sequence[str]) -> None:
        """A header of the response and a line of the log say which tools were left out."""
        if titles:
            self.dropped_tools = ", ".join(titles)[:DROPPED_CHARS_MAX]
            log.info("tools that are not served were left out", tools=self.dropped_tools, **self.names)

    def describe(self, attributes: Callable[[], Mapping[str, Attribute]]) -> None:
        """What is asked for; nobody asks where there is no span."""
        if self._span is not None:
            self._span.set(attributes())

    def end(self, scope: Scope, route: str | None) -> None:
        """`route`: the path's template, if there is one."""
        status, fault = self.status, self._fault()
        # Probes, people that look, and what is no request: their lines are for debugging.
        write = log.debug if scope["method"] in ("GET", NO_METHOD) and fault is None else log.info
        write(
            "request answered" if status else "request cut off",
            **self.names,
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
        """What went wrong, if that is not the caller's doing."""
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


def exchange_in(
    scope: Scope, request_id: str, manners: ErrorFormat = OPENAI, *, named: bool = False
) -> HttpExchange:
    """Of a request that has just come in. `named`: the id is its caller's."""
    trace = read_trace(header(scope, b"traceparent"), header(scope, b"tracestate"))
    return HttpExchange(request_id, trace, named, manners)


def _of(scope: Scope) -> dict[str, Attribute]:
    """The request, in the words of OpenTelemetry's conventions for HTTP."""
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
    if (agent := header(scope, b"user-agent")) is not None:
        attributes["user_agent.original"] = agent[:256]
    return attributes
