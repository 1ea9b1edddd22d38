"""Orphans: rooms whose router's stream broke, as a decode worker reports them to all routers.

A router that gets the same request again finds the room by its key. The key is a digest of all that the
tokens of the room depend on. So whatever room has the key, its output is the answer of that request.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import Final

from baton.ids import Incarnation, RoomId
from baton.rooms.request import Request
from baton.wire.baton.v1 import workers_pb2
from baton.wire.conversions import request_to_wire
from baton.wire.malformed import Malformed

KEY_BYTES: Final = 16
ORPHANS_MAX: Final = 1024
"""Most orphans in one message. Further ones are reported once others have ended or are adopted."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """Room that a router may adopt."""

    room: RoomId
    key: bytes
    """Digest of all that the room's tokens depend on, KEY_BYTES bytes."""
    prefill: Incarnation
    """Incarnation of the room's prefill worker, or NO_PEER."""


def adoption_key(request: Request) -> bytes:
    """Return the digest of all that the tokens of a request's rooms depend on, KEY_BYTES bytes.

    The output of earlier rooms is left out, because it is a function of the rest. So are facts about one run
    of the request, such as its time of arrival.
    """
    lasting = replace(
        request, output=(), trace=None, priority=0, arrived_ms=0, carried_tokens_max=0, tenant=b""
    )
    wire = request_to_wire(lasting)
    return blake2b(wire.SerializeToString(deterministic=True), digest_size=KEY_BYTES).digest()


def orphans_to_wire(orphans: Iterable[Orphan]) -> list[workers_pb2.Orphan]:
    """Convert orphans to their messages, at most ORPHANS_MAX of them."""
    return [
        workers_pb2.Orphan(room=each.room, key=each.key, prefill=each.prefill)
        for each in islice(orphans, ORPHANS_MAX)
    ]


def orphans_from_wire(wire: Sequence[workers_pb2.Orphan]) -> list[Orphan]:
    """Convert messages to orphans. Raises Malformed."""
    if len(wire) > ORPHANS_MAX:
        raise Malformed(f"orphans has more than {ORPHANS_MAX} entries")
    if any(len(each.key) != KEY_BYTES for each in wire):
        raise Malformed(f"the key of an orphan must have {KEY_BYTES} bytes")
    return [Orphan(RoomId(each.room), each.key, Incarnation(each.prefill)) for each in wire]
