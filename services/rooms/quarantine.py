"""Rule for taking quarantined memory back from its writers.

A live sender answers its close within a window of writes, which ends the quarantine cheaply. One that neither
answers nor is known to be dead would hold the pages for ever. Time is not the proof: it starts the step that
makes one (`proof-not-time`).
"""

from collections.abc import Iterable
from typing import Final

from baton.ids import PageCounts
from baton.rooms.evidence import Proof
from baton.rooms.phases import Phase
from baton.rooms.receiver import Receiver

SHARE: Final = 0.5
HURRY: Final = 10
"""Divisor of the waiting time under pressure: the quarantine holds more than SHARE of all pages, or the
oldest running room has lacked pages for that time with no room left to retract."""


def in_quarantine(room: Receiver) -> bool:
    """Return whether a failed room's memory was exposed, and nothing proves yet that no write can land."""
    return room.phase is Phase.FAILED and room.generation is not None and room.proof is None


def revocation_due(
    rooms: Iterable[Receiver], now_ms: int, pages: PageCounts, *, lacks_since_ms: int | None = None
) -> bool:
    """Return whether a proof is overdue: after `fence_ms`, or sooner under pressure.

    `pages`: size of each group's pool. `lacks_since_ms`: time since which a running room has lacked pages. A
    short lack is normal while another room is about to begin.

    Proofs are equal on all ranks, except for a seal: if this rank has read one and another has not, the room
    stays (`room-ends`).
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
    """Return whether a failed room stays only because another rank has not read its seal."""
    return room.phase is Phase.FAILED and room.proof is Proof.DONE
