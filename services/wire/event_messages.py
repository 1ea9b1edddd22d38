"""Message of one line of a room's timeline."""

from functools import partial
from typing import Final

from google.protobuf.message import DecodeError

from baton.rooms.timeline import Event, Line, Moment
from baton.wire.baton.v1 import rooms_pb2
from baton.wire.text_validation import shown_from_wire

LINE_BYTES_MAX: Final = 1024
"""Longest line that is stored undecoded, in bytes."""


def event_to_wire(event: Event) -> rooms_pb2.RoomEvent:
    return rooms_pb2.RoomEvent(
        wall_ms=event.wall_ms,
        source=event.source,
        name=event.name,
        detail=event.detail,
        host_us=event.host_us,
    )


def line_from_wire(wire: bytes, source: str) -> Line:
    """Read a line. `source`: the known sender, which replaces the one in the line. A line that is too long is
    decoded at once, which cuts it."""
    read = partial(event_from_wire, wire, source)
    return read if len(wire) <= LINE_BYTES_MAX else read()


def event_from_wire(wire: bytes, source: str) -> Event:
    """Decode a line. One that makes no sense becomes an UNREADABLE event, since another caller reads it
    later."""
    try:
        event = rooms_pb2.RoomEvent.FromString(wire)
    except DecodeError:
        return Event(0, source, Moment.UNREADABLE)
    name, detail = shown_from_wire(event.name, 64), shown_from_wire(event.detail, 512)
    return Event(event.wall_ms, source, name, detail, event.host_us)
