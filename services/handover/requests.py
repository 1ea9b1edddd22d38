"""Requests of the hand-over core to its driver.

Requests are values. A side returns them in the order in which they are to be carried out
(`HandOverSide.take_requests`). To carry one out decides nothing: its result enters the core as a command or
as evidence.
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
    """Write a line of the room's timeline."""

    room: RoomId
    moment: Moment
    detail: str = ""
    of_rank: bool = False
    """Whether the line reports what this rank saw. Other lines report what the whole worker did."""


@dataclass(slots=True)
class Outcome:
    """Send the room's caller its last reply: how the room ended."""

    room: RoomId
    cause: Cause | None
    """Cause of the end. None if the room was answered or handed over."""


@dataclass(slots=True)
class Retired:
    """Forget the room. All answers and timers that still wait for it are void."""

    room: RoomId
    proof: Proof | None
    phase_ms: Mapping[Phase, int]
    """Milliseconds spent in each phase."""


SideRequest: TypeAlias = Report | Outcome | Retired
"""Requests that both sides make."""


@dataclass(slots=True)
class Forget:
    """Stop all calls to a peer whose process is gone. None of its writes can land any more."""

    peer: Incarnation


@dataclass(slots=True)
class Connect:
    """Make this worker's memory known to the room's sender. Comes back as `Connected`."""

    room: RoomId
    peer: Incarnation


@dataclass(slots=True)
class Grant:
    """Send the room's sender the memory to write to. Every rank has exposed it."""

    room: RoomId
    peer: Incarnation
    exposure: Incarnation
    generation: Generation
    pages: PageTables
    slot: int
    prefix_tokens: int
    """Number of leading tokens whose pages the receiver has cached."""


@dataclass(slots=True)
class ClaimRoom:
    """Tell the room's sender that this worker computes the prompt itself, so that no grant follows."""

    room: RoomId
    peer: Incarnation


@dataclass(slots=True)
class Close:
    """Repeat the close until the sender proves that it writes nothing more for this tenancy. Comes back as
    `ReceivingSide.quiet`."""

    room: RoomId
    peer: Incarnation
    generation: Generation
    doubtful: bool
    """Whether the connection from this sender may be the cause. The next room then connects anew."""


@dataclass(slots=True)
class SumPages:
    """Sum the landed pages of the room, beginning at this token. Comes back as `ReceivingSide.summed`."""

    room: RoomId
    first_token: int


@dataclass(slots=True)
class Join:
    """Add the room's choices to the batch, after its first token."""

    room: RoomId


ReceiverRequest: TypeAlias = Connect | Grant | ClaimRoom | SumPages | Join | Close | Forget
"""Requests of the receiving side, besides those of both sides (`SideRequest`)."""


@dataclass(slots=True)
class BeginWrites:
    """Prepare the room's writes from its pages and its slot. Its rows may be computed from now on."""

    room: RoomId
    slot: Slot


@dataclass(slots=True)
class SendPages:
    """Write the whole pages among those of the first `tokens` tokens, which are computed."""

    room: RoomId
    tokens: int
    complete: bool
    """Whether these are all tokens, so that the last page leaves even if it is not full."""


@dataclass(slots=True)
class SendRecord:
    """Write the record to each rank of the receiver."""

    room: RoomId
    record: MetadataRecord
    """The record without the sum of the pages, which differs by the rank of the receiver."""


@dataclass(slots=True)
class SendSeal:
    """Write the seal to each rank of the receiver. Every rank of this worker has written the rest."""

    room: RoomId


SenderRequest: TypeAlias = BeginWrites | SendPages | SendRecord | SendSeal | Forget
"""Requests of the sending side, besides those of both sides (`SideRequest`)."""
