"""Requests that a side of a hand-over makes to its driver, as values.

A side returns them in the order in which they are to be carried out (`HandOverSide.take_requests`). The
driver decides nothing when it carries one out. The result enters the side as a command or as evidence.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from baton.ids import Generation, Incarnation, PageTables, RoomId
from baton.pages.record import MetadataRecord
from baton.pages.slots import Slot
from baton.rooms.errors import Cause
from baton.rooms.evidence import Proof
from baton.rooms.phases import Phase
from baton.rooms.timeline import Moment


@dataclass(slots=True)
class Report:
    """Request to write a line of the room's timeline."""

    room: RoomId
    moment: Moment
    detail: str = ""
    of_rank: bool = False
    """Whether the line reports an observation of this rank alone. Other lines report actions of the whole
    worker."""


@dataclass(slots=True)
class Outcome:
    """Request to send the room's caller its last reply: how the room ended."""

    room: RoomId
    cause: Cause | None
    """Cause of an early end. None if the room was answered or handed over."""


@dataclass(slots=True)
class Retired:
    """Request to forget a room that is over. All answers and timers that still wait for it are void."""

    room: RoomId
    proof: Proof | None
    phase_ms: Mapping[Phase, int]
    """Milliseconds that the room spent in each phase."""


SideRequest: TypeAlias = Report | Outcome | Retired
"""Request that either side of a hand-over may make."""


@dataclass(slots=True)
class Forget:
    """Request to stop all calls to a peer whose process is gone. None of its writes can land any more."""

    peer: Incarnation


@dataclass(slots=True)
class Connect:
    """Request to make this worker's memory known to the room's sender. The result comes back by
    `ReceivingSide.connected`."""

    room: RoomId
    peer: Incarnation


@dataclass(slots=True)
class Grant:
    """Request to send the room's sender the memory to write to. Every rank has exposed it."""

    room: RoomId
    peer: Incarnation
    exposure: Incarnation
    generation: Generation
    pages: PageTables
    slot: int
    prefix_tokens: int
    """Number of leading tokens whose pages the receiver has in its prefix cache."""


@dataclass(slots=True)
class ClaimRoom:
    """Request to notify the room's sender that this worker computes the prompt itself, so that no grant
    follows."""

    room: RoomId
    peer: Incarnation


@dataclass(slots=True)
class Close:
    """Request to repeat a room's close until its sender proves that it writes nothing more for this
    generation. The proof comes back by `ReceivingSide.quiet`."""

    room: RoomId
    peer: Incarnation
    generation: Generation
    doubtful: bool
    """Whether the connection from this sender may be the cause of the failure. The next room then connects
    anew."""


@dataclass(slots=True)
class SumPages:
    """Request to sum the landed pages of a room from `first_token` on. The sum comes back by
    `ReceivingSide.summed`."""

    room: RoomId
    first_token: int


@dataclass(slots=True)
class Join:
    """Request to add a room's choices to the decode batch. Its first token is known."""

    room: RoomId


ReceiverRequest: TypeAlias = Connect | Grant | ClaimRoom | SumPages | Join | Close | Forget
"""Request that only the receiving side makes, besides `SideRequest`."""


@dataclass(slots=True)
class BeginWrites:
    """Request to prepare the writes of a room from its pages and its slot. Its rows may be computed from now
    on."""

    room: RoomId
    slot: Slot


@dataclass(slots=True)
class SendPages:
    """Request to write the whole pages among those of the room's first `tokens` tokens, which are
    computed."""

    room: RoomId
    tokens: int
    complete: bool
    """Whether `tokens` are all tokens of the room, so that the last page is written even if it is not
    full."""


@dataclass(slots=True)
class SendRecord:
    """Request to write the room's metadata record to each rank of the receiver."""

    room: RoomId
    record: MetadataRecord
    """Metadata record without the sum of the pages, which differs by the rank of the receiver."""


@dataclass(slots=True)
class SendSeal:
    """Request to write the room's seal (the mark that all is written) to each rank of the receiver. Every
    rank of this worker has written the rest."""

    room: RoomId


SenderRequest: TypeAlias = BeginWrites | SendPages | SendRecord | SendSeal | Forget
"""Request that only the sending side makes, besides `SideRequest`."""
