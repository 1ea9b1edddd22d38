"""Conversion of a room into the protobuf message for callers that list or look up rooms."""

from baton.fleet.room_entry import RoomEntry
from baton.wire.baton.v1 import rooms_pb2
from baton.wire.conversions import cause_to_wire, peer_to_wire
from baton.wire.event_messages import event_to_wire


def room_to_wire(entry: RoomEntry, *, events: bool) -> rooms_pb2.Room:
    return rooms_pb2.Room(
        room=entry.id,
        request_id=entry.request_id,
        prefill=None if entry.prefill is None else peer_to_wire(entry.prefill),
        decode=peer_to_wire(entry.decode),
        phase=entry.phase.value,
        cause=None if entry.cause is None else cause_to_wire(entry.cause),
        events=[event_to_wire(each) for each in entry.events] if events else [],
        events_dropped=entry.events_dropped,
        retry_of=entry.retry_of or 0,
        choices=entry.choices,
    )
