"""Trace spans of the rooms in this process, each from the room's opening to its end.

A span's events are the timeline lines that this process writes, each at its own time. There is at most one
span for each open room. Without tracing the table of spans is empty, and each call costs one lookup in it.
"""

from collections.abc import Mapping

from baton.ids import RoomId
from baton.rooms.errors import Cause
from baton.rooms.reasons import REASONS
from baton.rooms.timeline import Moment
from baton.rooms.trace import TraceContext
from baton.telemetry.tracing import OFF, Attribute, Span, SpanKind, Tracer


class RoomSpans:
    """Trace spans of open rooms, by room id. Used from one event loop.

    The code that begins a room's span ends it when it retires the room (`one-retire`).
    """

    def __init__(self, tracer: Tracer = OFF, name: str = "room", kind: SpanKind = SpanKind.INTERNAL) -> None:
        """Make an empty table of spans. `name`: name of every span. Attributes tell the rooms apart."""
        self._tracer = tracer
        self._name = name
        self._kind = kind
        self._open: dict[RoomId, Span] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(
        self,
        room: RoomId,
        request_id: str,
        parent: TraceContext | None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> None:
        """Begin the span of a room. A room that came without a trace context, such as a canary's, gets no
        span."""
        if parent is None:
            return
        named: dict[str, Attribute] = {"baton.room": str(room), "baton.request_id": request_id}
        span = self._tracer.begin(self._name, self._kind, parent, named | dict(attributes or {}))
        if span is not None:
            self._open[room] = span

    def trace_of(self, room: RoomId) -> TraceContext | None:
        """Return the trace context to send along with calls made for the room. None if the room
        has no span."""
        span = self._open.get(room)
        return None if span is None else span.trace

    def event(self, room: RoomId, name: Moment, detail: str = "") -> None:
        span = self._open.get(room)
        if span is not None:
            span.event(name, detail)

    def fail(self, room: RoomId, cause: Cause) -> None:
        """Record in the room's span why the room ended before it was complete."""
        span = self._open.get(room)
        if span is None:
            return
        span.set({"baton.reason": cause.reason.value})
        if REASONS[cause.reason].is_failure:
            span.fail(cause.reason.value, cause.text)

    def end(self, room: RoomId) -> None:
        span = self._open.pop(room, None)
        if span is not None:
            span.end()

    def cut_off(self, cause: Cause) -> None:
        """Mark the spans of all open rooms as failed with `cause` and end them, because the process ends
        before the rooms do."""
        for room in list(self._open):
            self.fail(room, cause)
            self.end(room)
