"""Facts that one rank can observe about one room. They are only added, never taken back."""

from dataclasses import dataclass
from enum import Enum

from baton.ids import Generation, PageCounts, PageTables
from baton.rooms.errors import Cause


class Proof(Enum):
    """Proof that no write to a room's memory can still land (`proof-not-time`). A timer is none."""

    UNEXPOSED = "unexposed"
    """No peer ever got the addresses of the memory."""
    DONE = "done"
    """The seal is there, which is written only when all transfers of the room are DONE on every sender
    rank."""
    QUIET = "quiet"
    """Every sender rank acknowledged the close: its transfers have ended, and it posts no more."""
    DEAD = "dead"
    """The sender's process is known to be gone."""
    REVOKED = "revoked"
    """The memory was taken from the writer: its mapping was torn down and made anew elsewhere."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The sender's worker knows the receiver's memory, and both layouts map onto each other."""


@dataclass(frozen=True, slots=True)
class Granted:
    """The receiver reserved memory for this room and sent its addresses to the sender."""

    generation: Generation
    pages: PageTables
    slot: int
    prefix_tokens: int = 0
    """Leading prompt tokens that the receiver already holds. Their pages are not sent."""


@dataclass(frozen=True, slots=True)
class Landed:
    """`pages` pages of the room, by KV group, are visible in the memory of this rank of the receiver."""

    generation: Generation
    pages: PageCounts


@dataclass(frozen=True, slots=True)
class Written:
    """This rank of the sender has computed all that it sends, and its writes are DONE."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """On the receiver: its record is in the slot. On the sender: the write of the seal is DONE."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Computed:
    """The prompt of a local room is computed on the receiver, and its first token is drawn."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """This rank has compiled the request's grammar, and can constrain draws by it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Something ended the room. The first cause stays."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Finished:
    """The work is done: the sequence has ended (receiver), or all was reported (sender)."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """No write of this room can still land or be in flight. `proof` says how that is known."""

    proof: Proof


Evidence = Connected | Granted | Landed | Written | Sealed | Computed | Compiled | Failed | Finished | Fenced
