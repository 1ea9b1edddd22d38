"""When has memory been in quarantine long enough to be taken back from its writers?

Only asking ends a quarantine cheaply: a sender that lives answers its close within a window of writes. One
that neither answers nor is known to be dead would keep the pages for ever. Time is not the proof; it starts
the step that makes one (`proof-not-time`).
"""

from collections.abc import Iterable
from typing import Final

from baton.ids import PageCounts
from baton.rooms.evidence import Proof
from baton.rooms.phases import Phase
from baton.rooms.receiver import Receiver

SHARE: Final = 0.5
HURRY: Final = 10
"""How many times sooner it is done when the quarantine has passed SHARE of all pages, or the oldest room that
runs has lacked pages for as long, and nobody was left to make space for it."""


def in_quarantine(room: Receiver) -> bool:
    """Its memory was exposed, it failed, and nothing proves here yet that no write can land."""
    return room.phase is Phase.FAILED and room.generation is not None and room.proof is None


def revocation_due(
    rooms: Iterable[Receiver], now_ms: int, pages: PageCounts, *, lacks_since_ms: int | None = None
) -> bool:
    """Whether a proof is overdue: after `fence_ms`, or sooner under pressure. `pages`: of each group's
    pool. `lacks_since_ms`: since when somebody who runs has waited for pages, if anybody does: for a moment
    it may be for those of rooms that are about to begin.

    Proofs are the same on every rank, but for a seal: where this rank has read one, another may have read
    none, so that its room stays (`room-ends`)."""
    failed = [room for room in rooms if room.phase is Phase.FAILED]
    quarantined = [room for room in failed if in_quarantine(room) or _lingers(room)]
    if not quarantined:
        return False
    oldest = min(quarantined, key=lambda room: room.entered_ms)
    held = map(sum, zip(*(room.pages_expected for room in quarantined), strict=True))
    soon_ms = oldest.deadlines.fence_ms // HURRY
    lacking = lacks_since_ms is not None and now_ms >= lacks_since_ms + soon_ms
    pressed = lacking or any(count > SHARE * of for count, of in zip(held, pages, strict=True))
    return now_ms >= oldest.entered_ms + (soon_ms if pressed else oldest.deadlines.fence_ms)


def _lingers(room: Receiver) -> bool:
    """It failed, and is held by what another rank lacks."""
    return room.phase is Phase.FAILED and room.proof is Proof.DONE
