"""Timelines and trace spans of rooms, and the watchers of a room that wait for new lines.

The events of a room's span are the lines that the router writes itself.
"""

import asyncio

from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomEntry
from baton.ids import RoomId
from baton.rooms.errors import Cause
from baton.rooms.timeline import BOOTSTRAP, Event, Moment
from baton.rooms.trace import TraceContext
from baton.runtime.clock import Clock
from baton.telemetry.room_spans import RoomSpans
from baton.telemetry.tracing import Attribute


class Timelines:
    """Writer of the router's own timeline lines and trace spans. Used from one event loop."""

    def __init__(self, registry: Registry, clock: Clock, spans: RoomSpans) -> None:
        self.spans = spans
        self._registry = registry
        self._clock = clock
        self.watchers: dict[RoomId, dict[asyncio.Event, None]] = {}

    def begin(self, entry: RoomEntry, trace: TraceContext | None) -> None:
        """Begin the trace span of a room. `trace`: context of its parent span."""
        if trace is not None:
            self.spans.begin(entry.id, entry.request_id, trace, _attributes(entry))

    def end(self, room: RoomId, cause: Cause | None = None) -> None:
        """End the trace span of a room. Lines may still be added to its timeline."""
        if cause is not None:
            self.spans.fail(room, cause)
        self.spans.end(room)

    def line(self, name: Moment, detail: str = "") -> Event:
        """Return a timeline line in the router's name, with the present time."""
        return Event(self._clock.wall_ms(), BOOTSTRAP, name, detail, self._clock.host_us())

    def report(self, room: RoomId, name: Moment, detail: str = "") -> None:
        """Write a line into a room's timeline, in the router's name, and add it to the room's trace span."""
        self.spans.event(room, name, detail)
        clock = self._clock
        self.record(room, Event(clock.wall_ms(), BOOTSTRAP, name, detail, clock.host_us()))

    def record(self, room: RoomId, event: Event) -> None:
        if self._registry.record(room, event):
            self.wake(room)

    def watch(self, room: RoomId, changed: asyncio.Event) -> None:
        self.watchers.setdefault(room, {})[changed] = None

    def unwatch(self, room: RoomId, changed: asyncio.Event) -> None:
        watchers = self.watchers.get(room, {})
        watchers.pop(changed, None)
        if not watchers:
            self.watchers.pop(room, None)

    def wake(self, room: RoomId) -> None:
        """Wake the watchers of a room, because it may have new lines."""
        if room in self.watchers:
            for changed in self.watchers[room]:
                changed.set()


def _attributes(entry: RoomEntry) -> dict[str, Attribute]:
    """Return the attributes of a room's trace span."""
    workers: dict[str, Attribute] = {f"baton.{side.value}": name for side, name in entry.names.items()}
    return workers if entry.retry_of is None else workers | {"baton.retry_of": str(entry.retry_of)}
