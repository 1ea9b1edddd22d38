"""An OTLP server in the test's process that keeps every span it receives."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

ARRIVE_S: Final = 60.0
KINDS: Final = {Span.SPAN_KIND_SERVER: "server", Span.SPAN_KIND_INTERNAL: "internal"}


@dataclass(frozen=True)
class SpanEvent:
    at_ns: int
    name: str
    detail: str


@dataclass(frozen=True)
class Seen:
    """One span as the collector received it."""

    service: str
    """`service.name` of the process."""
    instance: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    """Id of the parent span, empty for a root."""
    state: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: tuple[SpanEvent, ...]
    error: str | None
    """Message of the span's status if that is ERROR, else None."""

    def at_ns(self, event: str) -> int:
        """Return the time of the first event with this name, ns."""
        return next(each.at_ns for each in self.events if each.name == event)

    def names(self) -> list[str]:
        return [event.name for event in self.events]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP service that answers at once."""

    def __init__(self) -> None:
        self._spans: list[Seen] = []
        self._lock = threading.Lock()
        self.server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        with self._lock:
            self._spans += _spans(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def all(self) -> list[Seen]:
        with self._lock:
            return list(self._spans)

    def of(self, trace: str) -> list[Seen]:
        """Return the spans of one trace, by their start."""
        return sorted((span for span in self.all() if span.trace == trace), key=lambda span: span.start_ns)

    def wait(self, trace: str, holds: Callable[[list[Seen]], bool]) -> list[Seen]:
        """Return the spans of a trace, once they are all there."""
        deadline = time.monotonic() + ARRIVE_S
        while not holds(spans := self.of(trace)):
            assert time.monotonic() < deadline, [(span.service, span.name) for span in spans]
            time.sleep(0.05)
        return spans


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    collector.server.start()
    try:
        yield collector
    finally:
        collector.server.stop(0).wait()


def _spans(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[Seen]:
    for resource in request.resource_spans:
        process = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(
                    service=process["service.name"],
                    instance=process["service.instance.id"],
                    name=span.name,
                    kind=KINDS[span.kind],
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    state=span.trace_state,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    events=tuple(
                        SpanEvent(
                            each.time_unix_nano, each.name, _attributes(each.attributes).get("detail", "")
                        )
                        for each in span.events
                    ),
                    error=span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in _typed(pairs)}


def _typed(pairs: Any) -> Iterator[KeyValue]:
    yield from pairs


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
