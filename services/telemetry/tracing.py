"""How do the spans of one request become one tree, over the processes that it passes through?

Off unless an endpoint is set: nothing of OpenTelemetry is imported then, no span is made, and what a caller
sent is passed on as it came. `services/telemetry/otlp_tracer.py` is the other form.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, Protocol, TypeAlias

from baton.rooms.trace import TraceContext

Attribute: TypeAlias = str | bool | int | float | Sequence[str]


class SpanKind(Enum):
    """Who waits for whom: a server's span is what somebody else asked for."""

    SERVER = "server"
    INTERNAL = "internal"


class Span(Protocol):
    """Something that takes time. Whoever began it ends it; after that nothing of it changes."""

    trace: TraceContext
    """For its children, in this process or another."""

    def event(self, name: str, detail: str = "") -> None:
        """Something that happened just now."""

    def set(self, attributes: Mapping[str, Attribute]) -> None: ...

    def fail(self, reason: str, text: str) -> None:
        """It did not do what was asked of it. `reason` is of a closed set of words."""

    def end(self) -> None: ...


class Tracer:
    """Off: there is never a span."""

    def begin(
        self, name: str, kind: SpanKind, parent: TraceContext | None, attributes: Mapping[str, Attribute]
    ) -> Span | None:
        """A span that begins now. Without a parent it is the root of a trace of its own. Never waits."""
        del name, kind, parent, attributes
        return None

    async def stop(self, timeout_s: float) -> None:
        """Send what has ended, within this time; what cannot be sent is lost. Idempotent."""
        del timeout_s


OFF: Final = Tracer()
