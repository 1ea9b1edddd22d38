"""Requests that a side of a hand-over makes to its driver, as values.

A side returns them in the order in which they are to be carried out (`HandOverSide.take_requests`). The
driver decides nothing when it carries one out. The result enters the side as a command or as evidence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from baton.ids import Generation, Incarnation, PageTables, RoomId
from baton.pages.record import MetadataRecord
from baton.pages.slots import Slot
from baton.rooms.errors import Cause
from baton.rooms.evidence import Proof
from baton.rooms.phases import Phase
from baton.rooms.timeline import Moment

K = TypeVar("K")


@dataclass(slots=True)
class StartTimer(Generic[K]):
    """Request to report the end of a timer after `after_s` seconds. A running timer of this key starts
    anew."""

    timer: K
    after_s: float


@dataclass(slots=True)
class StopTimer(Generic[K]):
    """Request to stop a timer, if it runs."""

    timer: K


@dataclass(slots=True)
class Report:
    """Request to write a line of the room's timeline."""

    room: RoomId
    moment: Moment
    detail: str = ""
    of_rank: bool = False
    """Whether the line reports what this rank alone observed. If not, it reports an action of the whole
    worker."""


@dataclass(slots=True)
class Outcome:
    """Request to send the room's caller its last reply: how the room ended."""

    room: RoomId
    cause: Cause | None
    """Reason for which the room ended early. None if the room was answered or handed over."""


@dataclass(slots=True)
class Retired:
    """Request to forget a room that is over. All answers and timers that still wait for it are void."""

    room: RoomId
    proof: Proof | None
    phase_ms: Mapping[Phase, int]
    """Milliseconds that the room spent in each phase."""


@dataclass(slots=True)
class Orphaned:
    """Request to report to all routers that they may adopt this room."""

    room: RoomId


SideRequest: TypeAlias = Report | Outcome | Retired | Orphaned
"""Request that either side of a hand-over may make."""


@dataclass(slots=True)
class Forget:
    """Request to stop all calls to a worker whose process has ended. None of its writes can still land."""

    peer: Incarnation


@dataclass(slots=True)
class Connect:
    """Request to make this worker's memory known to the room's sender. The result comes back by
    `ReceivingSide.connected`."""

    room: RoomId
    peer: Incarnation


@dataclass(slots=True)
class Grant:
    """Request to send a grant to the room's sender: the pages and the slot to write to. Every rank has
    exposed this memory."""

    room: RoomId
    peer: Incarnation
    exposure: Incarnation
    generation: Generation
    pages: PageTables
    slot: int
    prefix_tokens: int
    """Number of the prompt's leading tokens that the sender need not send, because the receiver has their
    pages in its prefix cache."""


@dataclass(slots=True)
class ClaimRoom:
    """Request to notify the room's sender that this worker computes the prompt itself, so that no grant
    follows."""

    room: RoomId
    peer: Incarnation


@dataclass(slots=True)
class Close:
    """Request to send a close of the room to its sender, again and again until the sender proves that it
    writes nothing more for this generation. The proof comes back by `ReceivingSide.quiet`."""

    room: RoomId
    peer: Incarnation
    generation: Generation
    doubtful: bool
    """Whether a broken connection from this sender may be why the room failed. If so, the next room connects
    anew."""


@dataclass(slots=True)
class SumPages:
    """Request to compute the checksum of a room's landed pages, from token `first_token` on. The sum comes
    back by `ReceivingSide.summed`."""

    room: RoomId
    first_token: int


@dataclass(slots=True)
class Join:
    """Request to add a room's choices to the decode batch. The room's first output token is known."""

    room: RoomId


ReceiverRequest: TypeAlias = Connect | Grant | ClaimRoom | SumPages | Join | Close | Forget
"""Request that only the receiving side makes, besides `SideRequest`."""


@dataclass(slots=True)
class BeginWrites:
    """Request to prepare the writes of a room's pages and record to its receiver. From now on the room's
    prompt may be computed."""

    room: RoomId
    slot: Slot


@dataclass(slots=True)
class SendPages:
    """Request to write the room's first pages to its receiver: all whole pages of its first `tokens` tokens,
    which are computed."""

    room: RoomId
    tokens: int
    complete: bool
    """Whether `tokens` is the number of all tokens of the room. If so, the last page is written even if it is
    not full."""


@dataclass(slots=True)
class SendRecord:
    """Request to write the room's metadata record to each rank of the receiver."""

    room: RoomId
    record: MetadataRecord
    """Metadata record to write. The driver adds the checksum of the pages, which differs by the rank of the
    receiver."""


@dataclass(slots=True)
class SendSeal:
    """Request to write the room's seal (the mark that all data is written) to each rank of the receiver.
    Every rank of this worker has written its pages, and the record is written."""

    room: RoomId


SenderRequest: TypeAlias = BeginWrites | SendPages | SendRecord | SendSeal | Forget
"""Request that only the sending side makes, besides `SideRequest`."""
