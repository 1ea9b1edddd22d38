"""What can one rank see about one room? Facts, only ever added, never taken back."""

from dataclasses import dataclass
from enum import Enum

from baton.ids import Generation, PageCounts, PageTables
from baton.rooms.errors import Cause


class Proof(Enum):
    """Why no write to a room's memory can still land (`proof-not-time`). A timer is not among them."""

    UNEXPOSED = "unexposed"
    """No peer was ever told where this memory is."""
    DONE = "done"
    """Every sender rank's transfers of the room were DONE: the seal says so."""
    QUIET = "quiet"
    """Every sender rank acknowledged the close: its handles have ended and it posts no more."""
    DEAD = "dead"
    """The sender's process is known to be gone."""
    REVOKED = "revoked"
    """The memory was taken away from the writer: its mapping was torn down and made anew elsewhere."""


@dataclass(frozen=True, slots=True)
class Connected:
    """Receiver: the sender's worker knows our memory and our layouts map onto each other."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Sender: the receiver reserved memory for us and told us where."""

    generation: Generation
    pages: PageTables
    slot: int
    prefix_tokens: int = 0
    """Leading prompt tokens the receiver already holds; their pages are not sent."""


@dataclass(frozen=True, slots=True)
class Landed:
    """Receiver: so many of the room's pages of each group are visible here, in total."""

    generation: Generation
    pages: PageCounts


@dataclass(frozen=True, slots=True)
class Written:
    """Sender: all that this rank has to send was computed, and its writes are DONE."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """Receiver: our record is in the slot. Sender: the seal's write is DONE."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Computed:
    """Receiver of a local room: its prompt is computed here, and its first token drawn."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """This rank can hold the room's draws to its request's grammar."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Something ended the room. The first cause is kept."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Finished:
    """The work is done: the sequence has ended (receiver) or everything was reported (sender)."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """No write of this room can still land or be in flight, and this is why."""

    proof: Proof


Evidence = Connected | Granted | Landed | Written | Sealed | Computed | Compiled | Failed | Finished | Fenced
