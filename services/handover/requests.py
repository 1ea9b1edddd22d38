"""What does the hand-over core ask of the world?

Requests are values. A side hands them out in the order in which they are to be carried out, and whoever
drives it takes them after each call (`HandOverSide.take_requests`). Carrying one out decides nothing: what
comes of it enters the core as a command or as evidence.
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
    """The line says what this rank saw, where others say what the worker did."""


@dataclass(slots=True)
class Outcome:
    """Tell the room's caller how the room ended: the last that the caller hears."""

    room: RoomId
    cause: Cause | None
    """None when the room was answered, or handed over."""


@dataclass(slots=True)
class Retired:
    """Nothing of the room is left here: whatever is still asked or awaited for it is over."""

    room: RoomId
    proof: Proof | None
    phase_ms: Mapping[Phase, int]
    """Milliseconds spent in each phase."""


SideRequest: TypeAlias = Report | Outcome | Retired
"""What both sides ask."""


@dataclass(slots=True)
class Forget:
    """The peer's process is gone: nothing is said to it any more, and nothing of it can land."""

    peer: Incarnation


@dataclass(slots=True)
class Connect:
    """Make this worker's memory known to the room's sender. Comes back as `Connected`."""

    room: RoomId
    peer: Incarnation


@dataclass(slots=True)
class Grant:
    """Tell the room's sender where it may write: every rank has exposed it."""

    room: RoomId
    peer: Incarnation
    exposure: Incarnation
    generation: Generation
    pages: PageTables
    slot: int
    prefix_tokens: int
    """Leading tokens whose pages the receiver holds already."""


@dataclass(slots=True)
class ClaimRoom:
    """Tell the room's sender that this worker computes the prompt itself: nothing is granted."""

    room: RoomId
    peer: Incarnation


@dataclass(slots=True)
class Close:
    """Ask the sender until it has proven that it writes nothing more for this tenancy. Comes back as
    `ReceivingSide.quiet`."""

    room: RoomId
    peer: Incarnation
    generation: Generation
    doubtful: bool
    """The way from this sender may be what went wrong: the next room connects anew."""


@dataclass(slots=True)
class SumPages:
    """Sum what landed in the room's pages from this token on. Comes back as `ReceivingSide.summed`."""

    room: RoomId
    first_token: int


@dataclass(slots=True)
class Join:
    """The room's choices join the batch, behind its first token."""

    room: RoomId


ReceiverRequest: TypeAlias = Connect | Grant | ClaimRoom | SumPages | Join | Close | Forget
"""What a receiver's side asks beside a `SideRequest`."""


@dataclass(slots=True)
class BeginWrites:
    """Prepare the room's writes, from its pages and its metadata slot. Its steps may begin."""

    room: RoomId
    slot: Slot


@dataclass(slots=True)
class SendPages:
    """The first so many tokens are in the room's pages: whole pages of them may leave."""

    room: RoomId
    tokens: int
    complete: bool
    """There are no more, so that the last page may leave as it is."""


@dataclass(slots=True)
class SendRecord:
    """Write the record to each rank of the receiver."""

    room: RoomId
    record: MetadataRecord
    """Without the sum of the pages, which differs by the receiver's rank."""


@dataclass(slots=True)
class SendSeal:
    """Write the seal to each rank of the receiver: every rank of this worker has written the rest."""

    room: RoomId


SenderRequest: TypeAlias = BeginWrites | SendPages | SendRecord | SendSeal | Forget
"""What a sender's side asks beside a `SideRequest`."""
