"""Evidence: facts that one rank can observe about one room. Facts are added and never taken back."""

from dataclasses import dataclass
from enum import Enum

from baton.ids import Generation, PageCounts, PageTables
from baton.rooms.errors import Cause


class Proof(Enum):
    """Proof that no write to a room's memory can still land (`proof-not-time`). The end of a timer is no
    proof."""

    UNEXPOSED = "unexposed"
    """Proof: no other worker ever got the addresses of the room's memory."""
    DONE = "done"
    """Proof: the room's seal was read. It is written only when all transfers of the room are DONE on every
    rank of prefill."""
    QUIET = "quiet"
    """Proof: every rank of the sender has confirmed that its writes for the room have ended, and that it
    starts no more."""
    DEAD = "dead"
    """Proof: the sender's process is known to have ended."""
    REVOKED = "revoked"
    """Proof: the memory was taken back from the sender. Its mapping was removed, and made anew at other
    addresses."""


@dataclass(frozen=True, slots=True)
class Connected:
    """Evidence on decode: the prefill worker knows decode's memory, and both layouts map onto each other."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Evidence on prefill: decode reserved memory for this room and sent its addresses."""

    generation: Generation
    pages: PageTables
    slot: int
    prefix_tokens: int = 0
    """Number of leading prompt tokens that decode already has in its cache. Their pages are not sent."""


@dataclass(frozen=True, slots=True)
class Landed:
    """Evidence on decode: `pages` pages of the room, by KV group, have arrived in this rank's memory."""

    generation: Generation
    pages: PageCounts


@dataclass(frozen=True, slots=True)
class Written:
    """Evidence on prefill: this rank has computed all that it sends for the room, and its writes are DONE."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """Evidence that the room is sealed. On decode: the record is in the metadata slot. On prefill: the write
    of the seal is DONE."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Computed:
    """Evidence on decode: the prompt of a room without prefill (a local room) is computed, and its first
    token is sampled."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Evidence that this rank has compiled the request's grammar, and can constrain sampling by it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Evidence that something ended the room. Only the first such cause is remembered."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Finished:
    """Evidence that the room's work is done. On decode: the sequence has ended. On prefill: the outcome was
    reported."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """Evidence that no write to this room's memory can still land or be under way. `proof`: how this is
    known."""

    proof: Proof


Evidence = Connected | Granted | Landed | Written | Sealed | Computed | Compiled | Failed | Finished | Fenced
