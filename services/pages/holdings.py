"""What does each room hold of this rank's memory, and how does it come back?

One record per room, one way out. A receiver's holding goes through `take`, `expose`, `commit` or
`quarantine`, and `give_back`; a sender's, which no peer writes to, through `take` and `give_back`.
"""

from dataclasses import dataclass
from enum import Enum

from services.pages.errors import IllegalPageMove, Truncated
from services.pages.pool import PagePool
from services.pages.slots import Slot, SlotPool


class Standing(Enum):
    HELD = "held"
    EXPOSED = "exposed"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class Holding:
    pages: tuple[int, ...]
    """In token order: page i holds tokens [i * page_tokens, (i + 1) * page_tokens)."""
    slot: Slot
    exposed: tuple[int, ...] = ()
    """The leading pages that a peer may write to. The rest is for tokens still to be drawn."""
    standing: Standing = Standing.HELD


class Holdings:
    """Rooms to pages and slots, on one rank. Keyed by room id; `give_back` empties it."""

    def __init__(self, pages: PagePool, slots: SlotPool) -> None:
        self.pages = pages
        self.slots = slots
        self._held: dict[int, Holding] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, room: int) -> bool:
        return room in self._held

    def get(self, room: int) -> Holding:
        return self._held[room]

    def can_take(self, pages: int) -> bool:
        return self.pages.can_reserve(pages) and self.slots.free > 0

    def take(self, room: int, pages: int) -> Holding:
        """Reserve pages and a blank slot. Raises OutOfPages and takes nothing."""
        if room in self._held:
            raise IllegalPageMove(f"room {room} already holds pages")
        slot = self.slots.hand_out()
        try:
            taken = self.pages.reserve(pages)
        except Exception:
            self.slots.release(slot)
            raise
        self._held[room] = Holding(taken, slot)
        return self._held[room]

    def expose(self, room: int, pages: int) -> Holding:
        """The first `pages` pages and the slot are about to be named to a peer.

        Raises Truncated where the room holds fewer (`no-truncation`)."""
        holding = self._in(room, Standing.HELD)
        if pages > len(holding.pages):
            raise Truncated(f"room {room}: {pages} pages to expose, {len(holding.pages)} held")
        holding.exposed = holding.pages[:pages]
        self.pages.expose(holding.exposed)
        self.slots.expose(holding.slot)
        holding.standing = Standing.EXPOSED
        return holding

    def commit(self, room: int) -> None:
        """The seal proved that every write has ended: the memory is the room's for good."""
        holding = self._in(room, Standing.EXPOSED)
        self.pages.commit(holding.pages)
        self.slots.commit(holding.slot)
        holding.standing = Standing.COMMITTED

    def quarantine(self, room: int) -> bool:
        """The room failed. What was exposed waits for a proof, the rest is free at once.

        False when nothing was exposed, so that no proof is needed.
        """
        holding = self._held.get(room)
        if holding is None or holding.standing is Standing.HELD:
            return False
        self._in(room, Standing.EXPOSED)
        unexposed = holding.pages[len(holding.exposed) :]
        self.pages.release(unexposed)
        self.pages.quarantine(holding.exposed)
        self.slots.quarantine(holding.slot)
        holding.pages = holding.exposed
        holding.standing = Standing.QUARANTINED
        return True

    def give_back(self, room: int) -> bool:
        """Return everything (`exits-release-all`). The caller holds the proof that no write can land.
        Idempotent."""
        holding = self._held.get(room)
        if holding is None:
            return False
        if holding.standing is Standing.EXPOSED:
            raise IllegalPageMove(f"room {room}: exposed memory must be committed or quarantined first")
        self.pages.release(holding.pages)
        self.slots.release(holding.slot)
        del self._held[room]
        return True

    def _in(self, room: int, standing: Standing) -> Holding:
        holding = self._held[room]
        if holding.standing is not standing:
            raise IllegalPageMove(f"room {room}: {holding.standing.value}, must be {standing.value}")
        return holding
