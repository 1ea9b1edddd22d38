"""Rule for taking quarantined memory back from senders that do not answer.

Memory of a failed room is quarantined while its sender may still write to it. A live sender answers the close
of the room within a window of writes, which ends the quarantine cheaply. A sender that neither answers nor is
known to be dead would hold the pages without end. Elapsed time is no proof that it writes no more. It only
starts the revocation, which makes such a proof (`proof-not-time`).
"""

from collections.abc import Iterable
from typing import Final

from baton.ids import PageCounts
from baton.rooms.evidence import Proof
from baton.rooms.phases import Phase
from baton.rooms.receiver import Receiver

SHARE: Final = 0.5
HURRY: Final = 10
"""Divisor of the waiting time before revocation, if pages are scarce.

Pages are scarce if the quarantine holds more than SHARE of them. They are also scarce if the oldest running
room has lacked pages for the divided time, and no room is left to retract.
"""


def in_quarantine(room: Receiver) -> bool:
    """Return whether a failed room's memory was exposed to a sender whose writes may still land in it."""
    return room.phase is Phase.FAILED and room.generation is not None and room.proof is None


def revocation_due(
    rooms: Iterable[Receiver], now_ms: int, pages: PageCounts, *, lacks_since_ms: int | None = None
) -> bool:
    """Return whether it is time to revoke quarantined memory: after `fence_ms`, or sooner if pages are
    scarce.

    `pages`: number of pages of the worker, by KV group. `lacks_since_ms`: time since which a running room has
    lacked pages. A short lack is normal while another room is about to begin.

    Proofs are equal on all ranks, except for a seal. If this rank has read a seal and another has not, the
    room stays until then (`room-ends`).
    """
    failed = [room for room in rooms if room.phase is Phase.FAILED]
    quarantined = [room for room in failed if in_quarantine(room) or _lingers(room)]
    if not quarantined:
        return False
    oldest = min(quarantined, key=lambda room: room.entered_ms)
    counts = map(sum, zip(*(room.pages_expected for room in quarantined), strict=True))
    soon_ms = oldest.deadlines.fence_ms // HURRY
    lacking = lacks_since_ms is not None and now_ms >= lacks_since_ms + soon_ms
    pressed = lacking or any(count > SHARE * of for count, of in zip(counts, pages, strict=True))
    return now_ms >= oldest.entered_ms + (soon_ms if pressed else oldest.deadlines.fence_ms)


def _lingers(room: Receiver) -> bool:
    """Return whether this rank has read a failed room's seal, so that it only waits for the other ranks to
    read it."""
    return room.phase is Phase.FAILED and room.proof is Proof.DONE
