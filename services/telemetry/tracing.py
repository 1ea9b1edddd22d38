"""Interface of traces, in which the spans of a request form one tree over all its processes.

Tracing is off unless an endpoint is set. Then nothing of OpenTelemetry is imported, no span is made, and a
caller's trace context is passed on as it came. `otlp_tracer` is the other implementation.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, Protocol, TypeAlias

from baton.rooms.trace import TraceContext

Attribute: TypeAlias = str | bool | int | float | Sequence[str]


class SpanKind(Enum):
    """Kind of a span: a server's answers a caller, an internal one does not."""

    SERVER = "server"
    INTERNAL = "internal"


class Span(Protocol):
    """A period of time. The code that began it ends it. After that it does not change."""

    trace: TraceContext
    """Trace context of its children, in this process or another."""

    def event(self, name: str, detail: str = "") -> None:
        """Add an event of this moment."""

    def set(self, attributes: Mapping[str, Attribute]) -> None: ...

    def fail(self, reason: str, text: str) -> None:
        """Mark the span as failed. `reason`: a word of a closed set."""

    def end(self) -> None: ...


class Tracer:
    """Tracer that is off and makes no spans."""

    def begin(
        self, name: str, kind: SpanKind, parent: TraceContext | None, attributes: Mapping[str, Attribute]
    ) -> Span | None:
        """Begin a span, without waiting. Without a parent it is the root of a new trace."""
        del name, kind, parent, attributes
        return None

    async def stop(self, timeout_s: float) -> None:
        """Send the spans that have ended, within `timeout_s` seconds. The others are lost. Idempotent."""
        del timeout_s


OFF: Final = Tracer()
