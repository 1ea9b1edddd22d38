"""Conversion of timeline lines of rooms to messages and back."""

from functools import partial
from typing import Final

from google.protobuf.message import DecodeError

from baton.rooms.timeline import Event, Line, Moment
from baton.wire.baton.v1 import rooms_pb2
from baton.wire.text_validation import shown_from_wire

LINE_BYTES_MAX: Final = 1024
"""Longest timeline line that is stored as it came, undecoded, in bytes."""


def event_to_wire(event: Event) -> rooms_pb2.RoomEvent:
    return rooms_pb2.RoomEvent(
        wall_ms=event.wall_ms,
        source=event.source,
        name=event.name,
        detail=event.detail,
        host_us=event.host_us,
    )


def line_from_wire(wire: bytes, source: str) -> Line:
    """Return a timeline line that is decoded when it is read.

    `source`: the known sender, which replaces the one in the message. A message of more than LINE_BYTES_MAX
    bytes is decoded at once, which cuts its texts.
    """
    read = partial(event_from_wire, wire, source)
    return read if len(wire) <= LINE_BYTES_MAX else read()


def event_from_wire(wire: bytes, source: str) -> Event:
    """Decode a timeline line. An undecodable one becomes an UNREADABLE event and raises nothing.

    It is decoded only when the timeline is read, and the reader is not at fault.
    """
    try:
        event = rooms_pb2.RoomEvent.FromString(wire)
    except DecodeError:
        return Event(0, source, Moment.UNREADABLE)
    name, detail = shown_from_wire(event.name, 64), shown_from_wire(event.detail, 512)
    return Event(event.wall_ms, source, name, detail, event.host_us)
