"""Conversion of what workers report for placement: their load, the log of their cached blocks, and orphans.

An orphan is a room whose router's stream broke. A router that gets the same request again finds it by its
key, a digest of all that the tokens of the room depend on. So whatever room has the key, its output is the
answer of that request.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import Final

from baton.ids import Incarnation, RoomId
from baton.pages.block_hashes import HASH_BYTES, Block
from baton.pages.kv_event_log import BATCH_MAX, KvEvent, KvEvents, KvSnapshotPart
from baton.pages.layout import GROUPS_MAX
from baton.rooms.request import Request
from baton.rooms.steps.step_cost import SCORE_PRICE_MAX
from baton.rooms.worker_load import WorkerLoad
from baton.wire.baton.v1 import rooms_pb2, workers_pb2
from baton.wire.conversions import request_to_wire
from baton.wire.malformed import Malformed

RATE_MAX: Final = 2**32 - 1
"""Largest token rate in a message, in tokens per second."""
PARTS_MAX: Final = 4_096
"""Most parts of a snapshot: 16 million hashes, of more than a billion tokens."""
KEY_BYTES: Final = 16
ORPHANS_MAX: Final = 1024
"""Most orphans in one message. Further ones are reported once others have ended or are adopted."""


def load_to_wire(load: WorkerLoad, number: int) -> rooms_pb2.WorkerLoad:
    """Convert a worker's load to its message. `number`: serial number, higher than any that this process has
    sent."""
    return rooms_pb2.WorkerLoad(
        number=number,
        free_pages=load.free,
        asked_pages=load.requested,
        waiting=load.waiting,
        running=load.running,
        running_max=load.running_max,
        entered=load.entered,
        tokens_waiting=load.tokens_waiting,
        tokens_per_s=min(load.tokens_per_s, RATE_MAX),
        score_price=load.score_price,
        other_rooms=load.other_rooms,
    )


def load_from_wire(wire: rooms_pb2.WorkerLoad) -> WorkerLoad:
    """Convert a message to a worker's load.

    Page counts for more KV groups than any layout has are cut, but to one group too many. So they match no
    worker's layout.
    """
    return WorkerLoad(
        free=tuple(wire.free_pages[: GROUPS_MAX + 1]),
        requested=tuple(wire.asked_pages[: GROUPS_MAX + 1]),
        waiting=wire.waiting,
        running=wire.running,
        running_max=wire.running_max,
        entered=RoomId(wire.entered),
        number=wire.number,
        tokens_waiting=wire.tokens_waiting,
        tokens_per_s=wire.tokens_per_s,
        score_price=min(wire.score_price, SCORE_PRICE_MAX),
        other_rooms=wire.other_rooms,
    )


def kv_log_to_wire(message: KvEvents | KvSnapshotPart) -> workers_pb2.KvLogMessage:
    digest = message.digest.to_bytes(HASH_BYTES, "big")
    if isinstance(message, KvEvents):
        return workers_pb2.KvLogMessage(
            events=workers_pb2.KvEvents(
                first=message.first,
                hashes=b"".join(each.block for each in message.events),
                is_stored=[each.is_stored for each in message.events],
                digest=digest,
            )
        )
    return workers_pb2.KvLogMessage(
        snapshot=workers_pb2.KvSnapshotPart(
            number=message.number,
            part=message.part,
            parts=message.parts,
            hashes=b"".join(message.blocks),
            digest=digest,
        )
    )


def kv_log_from_wire(wire: workers_pb2.KvLogMessage) -> KvEvents | KvSnapshotPart:
    """Return the message of a log. Raises Malformed."""
    if wire.HasField("events"):
        events = wire.events
        blocks = _blocks(events.hashes)
        if len(events.is_stored) != len(blocks):
            raise Malformed(f"events.is_stored has {len(events.is_stored)} values for {len(blocks)} hashes")
        if not events.first:
            raise Malformed("events.first has to be at least 1")
        return KvEvents(
            events.first,
            [KvEvent(*each) for each in zip(events.is_stored, blocks, strict=True)],
            _digest(events.digest),
        )
    if not wire.HasField("snapshot"):
        raise Malformed("the message is neither events nor a part of a snapshot")
    part = wire.snapshot
    if not part.part < part.parts <= PARTS_MAX:
        raise Malformed(f"snapshot.part is {part.part} of {part.parts}, at most {PARTS_MAX}")
    return KvSnapshotPart(part.number, part.part, part.parts, _blocks(part.hashes), _digest(part.digest))


def _blocks(hashes: bytes) -> Sequence[Block]:
    if len(hashes) % HASH_BYTES or len(hashes) > BATCH_MAX * HASH_BYTES:
        raise Malformed(f"hashes has {len(hashes)} bytes, of {HASH_BYTES} for each of {BATCH_MAX} at most")
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


def _digest(digest: bytes) -> int:
    if len(digest) != HASH_BYTES:
        raise Malformed(f"digest has {len(digest)} bytes, not {HASH_BYTES}")
    return int.from_bytes(digest, "big")


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
