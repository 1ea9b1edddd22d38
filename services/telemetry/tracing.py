"""Interface for traces: the spans of one request form one tree over all its processes.

Tracing is off unless an endpoint is set. Then nothing of OpenTelemetry is imported, no span is made, and a
caller's trace context is passed on unchanged. `otlp_tracer` has the implementation that exports spans.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, Protocol, TypeAlias

from baton.rooms.trace import TraceContext

Attribute: TypeAlias = str | bool | int | float | Sequence[str]


class SpanKind(Enum):
    """Kind of a span: SERVER for work that answers a caller, INTERNAL for other work."""

    SERVER = "server"
    INTERNAL = "internal"


class Span(Protocol):
    """One timed operation in a trace. The code that began it ends it. After that it does not change."""

    trace: TraceContext
    """Trace context to pass on, so that spans in this or another process become children of this span."""

    def event(self, name: str, detail: str = "") -> None:
        """Add an event with the current time to the trace span."""

    def set(self, attributes: Mapping[str, Attribute]) -> None: ...

    def fail(self, reason: str, text: str) -> None:
        """Mark the trace span as failed. `reason`: one word of a fixed set."""

    def end(self) -> None: ...


class Tracer:
    """Tracer that is switched off and makes no spans. Base class of the tracer that exports them."""

    def begin(
        self, name: str, kind: SpanKind, parent: TraceContext | None, attributes: Mapping[str, Attribute]
    ) -> Span | None:
        """Begin a trace span, without waiting. Without a parent it is the root of a new trace.

        Return None if tracing is off.
        """
        del name, kind, parent, attributes
        return None

    async def stop(self, timeout_s: float) -> None:
        """Send the spans that have ended, within `timeout_s` seconds. The others are lost. Idempotent."""
        del timeout_s


OFF: Final = Tracer()
