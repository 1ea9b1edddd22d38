"""What does each room hold of this rank's memory, and how does it come back?

One record per room, one way out. A receiver's holding goes through `take`, `expose`, `commit` or
`quarantine`, and `give_back`; a sender's, which no peer writes to, through `take` and `give_back`.

Where prefixes are kept, a room begins with the pages that hold its first tokens already, which it shares, and
`keep` makes its own known for those that come. Shared pages are not exposed and not quarantined: their user
unpins them, and they stay until their space is needed. A room shares with rooms of its own salt alone
(`same-root-only`), which its record says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from services.ids import PageId, RoomId
from services.pages.errors import IllegalPageMove, OutOfPages, Truncated
from services.pages.pool import PagePool
from services.pages.prefixes import UNSALTED, PrefixTree
from services.pages.slots import Slot, SlotPool


class Standing(Enum):
    HELD = "held"
    EXPOSED = "exposed"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class Holding:
    pages: tuple[PageId, ...]
    """In token order: page i holds tokens [i * page_tokens, (i + 1) * page_tokens)."""
    slot: Slot
    salt: int = UNSALTED
    """Under which its tokens are looked for and made known."""
    shared: int = 0
    """Leading pages that others may read, too: they held their tokens when they were taken, or were kept."""
    exposed: tuple[PageId, ...] = ()
    """The pages behind those that a peer may write to. The rest is for tokens still to be drawn."""
    standing: Standing = Standing.HELD


class Holdings:
    """Rooms to pages and slots, on one rank. Keyed by room id; `give_back` empties it."""

    def __init__(self, pages: PagePool, slots: SlotPool, prefixes: PrefixTree | None = None) -> None:
        """`prefixes`: of the pages of this pool; None to reuse nothing."""
        self.pages = pages
        self.slots = slots
        self.prefixes = PrefixTree(0) if prefixes is None else prefixes
        self._held: dict[RoomId, Holding] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, room: RoomId) -> bool:
        return room in self._held

    def get(self, room: RoomId) -> Holding:
        return self._held[room]

    @property
    def available(self) -> int:
        """Pages that could be taken now: free ones, and cached ones that nobody uses."""
        return self.pages.free + self.prefixes.evictable

    def take(self, room: RoomId, pages: int, tokens: Sequence[int] = (), salt: int = UNSALTED) -> Holding:
        """Reserve a blank slot and so many pages, of which the leading ones may be shared: those that hold
        `tokens`, the first of the room's, under its `salt` already. Raises OutOfPages and takes nothing."""
        if room in self._held:
            raise IllegalPageMove(f"room {room} already holds pages")
        shared = self.prefixes.match(tokens, salt)[:pages]
        fresh = pages - len(shared)
        if fresh > self.available - self.prefixes.idle(shared):
            raise OutOfPages(f"{pages} pages asked for, {self.available} available of {len(self.pages)}")
        slot = self.slots.hand_out()
        self.pages.commit(self.prefixes.pin(shared))
        self.pages.release(self.prefixes.evict(max(fresh - self.pages.free, 0)))
        taken = self.pages.reserve(fresh)
        self._held[room] = Holding(shared + taken, slot, salt, len(shared))
        return self._held[room]

    def expose(self, room: RoomId, pages: int) -> Holding:
        """The first `pages` pages of the room's own and the slot are about to be named to a peer.

        Raises Truncated where the room holds fewer (`no-truncation`)."""
        holding = self._in(room, Standing.HELD)
        own = holding.pages[holding.shared :]
        if pages > len(own):
            raise Truncated(f"room {room}: {pages} pages to expose, {len(own)} held")
        holding.exposed = own[:pages]
        self.pages.expose(holding.exposed)
        self.slots.expose(holding.slot)
        holding.standing = Standing.EXPOSED
        return holding

    def commit(self, room: RoomId) -> None:
        """The seal proved that every write has ended: the memory is the room's for good."""
        holding = self._in(room, Standing.EXPOSED)
        self.pages.commit(holding.pages[holding.shared :])
        self.slots.commit(holding.slot)
        holding.standing = Standing.COMMITTED

    def keep(self, room: RoomId, tokens: Sequence[int]) -> Holding:
        """The room's pages hold `tokens`, its first, on every rank, and nothing is written to them or read
        from them just now: the whole ones may be shared from here on. Where another room's hold the same, it
        goes on with those, so that no more pages are in use than before."""
        holding = self._held[room]
        if holding.standing in (Standing.EXPOSED, Standing.QUARANTINED):
            raise IllegalPageMove(f"room {room}: {holding.standing.value} pages are not to be shared")
        entered = self.prefixes.enter(tokens, holding.pages, holding.shared, holding.salt)
        self.pages.commit(entered.woken)
        if holding.standing is Standing.HELD:
            self.pages.commit(entered.fresh)
        replaced = holding.pages[holding.shared : len(entered.way)]
        self.pages.release(page for page in replaced if page not in self.prefixes)
        holding.pages = entered.way + holding.pages[len(entered.way) :]
        holding.shared = len(entered.way)
        return holding

    def distrust(self, room: RoomId) -> None:
        """What the room shares may not hold what it should: nobody begins with it from now on; who has, goes
        on. The same on all ranks, and before `quarantine`, by which it shares nothing any more."""
        holding = self._held.get(room)
        if holding is None:
            return
        if holding.standing is Standing.QUARANTINED:
            raise IllegalPageMove(f"room {room}: what it shared is not known any more")
        if holding.shared:
            self.prefixes.distrust(holding.pages[0])

    def quarantine(self, room: RoomId) -> bool:
        """The room failed. What was exposed waits for a proof, the rest is free at once.

        False when nothing was exposed, so that no proof is needed.
        """
        holding = self._held.get(room)
        if holding is None or holding.standing is Standing.HELD:
            return False
        self._in(room, Standing.EXPOSED)
        unexposed = holding.pages[holding.shared + len(holding.exposed) :]
        self._unpin(holding)
        self.pages.release(unexposed)
        self.pages.quarantine(holding.exposed)
        self.slots.quarantine(holding.slot)
        holding.pages = holding.exposed
        holding.standing = Standing.QUARANTINED
        return True

    def give_back(self, room: RoomId) -> bool:
        """Return everything (`exits-release-all`). The caller holds the proof that no write can land.
        Idempotent."""
        holding = self._held.get(room)
        if holding is None:
            return False
        if holding.standing is Standing.EXPOSED:
            raise IllegalPageMove(f"room {room}: exposed memory must be committed or quarantined first")
        self._unpin(holding)
        self.pages.release(holding.pages)
        self.slots.release(holding.slot)
        del self._held[room]
        return True

    def _unpin(self, holding: Holding) -> None:
        """What is left of the holding is the room's own."""
        self.pages.cache(self.prefixes.unpin(holding.pages[: holding.shared]))
        holding.pages = holding.pages[holding.shared :]
        holding.shared = 0

    def _in(self, room: RoomId, standing: Standing) -> Holding:
        holding = self._held[room]
        if holding.standing is not standing:
            raise IllegalPageMove(f"room {room}: {holding.standing.value}, must be {standing.value}")
        return holding
