"""What does each room hold of this rank's memory, and how does it come back?

One record per room, one way out. A receiver's holding goes through `take`, `expose`, `commit` or
`quarantine`, and `give_back`; a sender's, which no peer writes to, through `take` and `give_back`.

Where prefixes are kept, a room begins with the pages that hold its first tokens already, which it shares, and
`keep` makes its own known for those that come. Shared pages are not exposed and not quarantined: their user
unpins them, and they stay until their space is needed. A room shares with rooms of its own salt alone
(`same-root-only`), which its record says.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import add, le
from typing import TypeAlias

from baton.ids import PageCounts, PageId, PageTables, RoomId
from baton.pages.errors import IllegalPageMove, OutOfPages, Truncated, added
from baton.pages.pool import PagePool, PageState
from baton.pages.prefix_tree import UNSALTED, PrefixTree
from baton.pages.slots import Slot, SlotPool

_Move: TypeAlias = Callable[[PagePool, Iterable[PageId]], None]


class Standing(Enum):
    HELD = "held"
    EXPOSED = "exposed"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"


@dataclass(slots=True)
class Holding:
    """By group, where it is of pages."""

    pages: PageTables
    """In token order: page i of a group holds tokens [i * page_tokens, (i + 1) * page_tokens)."""
    slot: Slot
    salt: int = UNSALTED
    """Under which its tokens are looked for and made known."""
    shared_tokens: int = 0
    """Leading tokens whose pages others may read, too: they were held when it took them, or were kept."""
    shared: PageCounts = ()
    """How many pages those are."""
    exposed: PageTables = ()
    """The pages behind those that a peer may write to. The rest is for tokens still to be drawn."""
    standing: Standing = Standing.HELD
    further: dict[int, PageTables] = field(default_factory=dict)
    """Of each choice beside the first, once it has some: the pages behind those that it reads of `pages`."""

    @property
    def own(self) -> PageTables:
        """The pages that it does not share."""
        return tuple([table[shared:] for table, shared in zip(self.pages, self.shared, strict=True)])


class Holdings:
    """Rooms to pages and slots, on one rank. Keyed by room id; `give_back` empties it."""

    def __init__(
        self, pools: Sequence[PagePool], slots: SlotPool, prefixes: PrefixTree | None = None
    ) -> None:
        """`pools`: of each group's pages. `prefixes`: of the pages of these pools; None to reuse nothing."""
        self.pools = tuple(pools)
        self.sizes: PageCounts = tuple(map(len, self.pools))
        self.slots = slots
        self.prefixes = PrefixTree([0] * len(pools)) if prefixes is None else prefixes
        self._held: dict[RoomId, Holding] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, room: RoomId) -> bool:
        return room in self._held

    def get(self, room: RoomId) -> Holding:
        return self._held[room]

    @property
    def available(self) -> PageCounts:
        """Pages that could be taken now: free ones, and cached ones that nobody uses."""
        evictable = self.prefixes.counts(self.prefixes.evictable)
        return tuple([pool.free + count for pool, count in zip(self.pools, evictable, strict=True)])

    def census(self) -> Mapping[PageState, int]:
        """Pages by their state, over all groups."""
        total, *further = [pool.census() for pool in self.pools]
        for census in further:
            for state, count in census.items():
                total[state] += count
        return total

    def cached(self, tokens: Sequence[int], salt: int = UNSALTED) -> int:
        """How many of the leading `tokens` are held already, as of now."""
        return len(self.prefixes.match(tokens, salt)) * self.prefixes.block_tokens

    def take(
        self, room: RoomId, pages: PageCounts, tokens: Sequence[int] = (), salt: int = UNSALTED
    ) -> Holding:
        """Reserve a blank slot and so many pages, of which the leading ones may be shared: those that hold
        `tokens`, the first of the room's, under its `salt` already. Raises OutOfPages and takes nothing."""
        if room in self._held:
            raise IllegalPageMove(f"room {room} already holds pages")
        prefixes = self.prefixes
        way = prefixes.match(tokens, salt)
        if way:
            way = way[: prefixes.blocks(pages)]
        shared = prefixes.counts(len(way))
        fresh = [count - known for count, known in zip(pages, shared, strict=True)]
        lacking = [count - pool.free for count, pool in zip(fresh, self.pools, strict=True)]
        if max(lacking) > 0:
            evictable = prefixes.counts(prefixes.evictable - prefixes.idle(way))
            if not all(map(le, lacking, evictable)):
                told, available, sizes = map(added, (pages, self.available, self.sizes))
                raise OutOfPages(f"{told} pages asked for, {available} available of {sizes}")
        slot = self.slots.hand_out()
        self._each(PagePool.commit, prefixes.pin(way))
        held = self._reserve(fresh)
        if way:
            held = tuple(map(add, prefixes.pages(way), held))
        holding = self._held[room] = Holding(held, slot, salt, len(way) * prefixes.block_tokens, shared)
        return holding

    def expose(self, room: RoomId, pages: PageCounts) -> Holding:
        """The first `pages` pages of the room's own and the slot are about to be named to a peer.

        Raises Truncated where the room holds fewer (`no-truncation`)."""
        holding = self._in(room, Standing.HELD)
        own = holding.own
        if not all(map(le, pages, map(len, own))):
            held = added(map(len, own))
            raise Truncated(f"room {room}: {added(pages)} pages to expose, {held} held")
        holding.exposed = tuple([table[:count] for table, count in zip(own, pages, strict=True)])
        self._all(PagePool.expose, holding.exposed)
        self.slots.expose(holding.slot)
        holding.standing = Standing.EXPOSED
        return holding

    def commit(self, room: RoomId) -> None:
        """The seal proved that every write has ended: the memory is the room's for good."""
        holding = self._in(room, Standing.EXPOSED)
        self._all(PagePool.commit, holding.own)
        self.slots.commit(holding.slot)
        holding.standing = Standing.COMMITTED

    def own(self, room: RoomId) -> None:
        """No peer is ever told of the memory: it is the room's for good."""
        holding = self._in(room, Standing.HELD)
        self._all(PagePool.commit, holding.own)
        holding.standing = Standing.COMMITTED

    def grow(self, room: RoomId, pages: PageCounts, choice: int = 0) -> PageTables:
        """So many more pages of its own for one choice of a room whose memory is its own for good, behind
        those that it has. Raises OutOfPages and takes nothing."""
        holding = self._in(room, Standing.COMMITTED)
        if not all(map(le, pages, self.available)):
            told, available, sizes = map(added, (pages, self.available, self.sizes))
            raise OutOfPages(f"{told} pages asked for, {available} available of {sizes}")
        fresh = self._reserve(pages)
        self._all(PagePool.commit, fresh)
        if choice == 0:
            holding.pages = tuple(map(add, holding.pages, fresh))
        else:
            before = holding.further.get(choice)
            holding.further[choice] = fresh if before is None else tuple(map(add, before, fresh))
        return fresh

    def returning(self, room: RoomId) -> PageCounts:
        """Pages that could be taken once the room gave everything back: its own, and those that it alone
        reads."""
        holding, prefixes = self._held[room], self.prefixes
        alone = prefixes.counts(prefixes.alone(holding.pages, self._blocks(holding)))
        held = zip(holding.pages, holding.shared, alone, strict=True)
        counts = tuple([len(table) - shared + more for table, shared, more in held])
        for tables in holding.further.values():
            counts = tuple(map(add, counts, map(len, tables)))
        return counts

    def keep(self, room: RoomId, tokens: Sequence[int]) -> Holding:
        """The room's pages hold `tokens`, its first, on every rank, and nothing is written to them or read
        from them just now: the whole blocks may be shared from here on. Where another room's hold the same,
        it goes on with those, so that no more pages are in use than before."""
        holding = self._held[room]
        if holding.standing in (Standing.EXPOSED, Standing.QUARANTINED):
            raise IllegalPageMove(f"room {room}: {holding.standing.value} pages are not to be shared")
        prefixes = self.prefixes
        entered = prefixes.enter(tokens, holding.pages, self._blocks(holding), holding.salt)
        self._each(PagePool.commit, entered.woken)
        if holding.standing is Standing.HELD:
            self._each(PagePool.commit, entered.fresh)
        if entered.spared:
            self._all(PagePool.release, entered.spared)
        holding.shared_tokens = len(entered.way) * prefixes.block_tokens
        holding.shared = prefixes.counts(len(entered.way))
        if entered.spared:
            holding.pages = tuple(map(add, prefixes.pages(entered.way), holding.own))
        return holding

    def distrust(self, room: RoomId) -> None:
        """What the room shares may not hold what it should: nobody begins with it from now on; who has, goes
        on. The same on all ranks, and before `quarantine`, by which it shares nothing any more."""
        holding = self._held.get(room)
        if holding is None:
            return
        if holding.standing is Standing.QUARANTINED:
            raise IllegalPageMove(f"room {room}: what it shared is not known any more")
        for block in self.prefixes.way(holding.pages, self._blocks(holding))[:1]:
            self.prefixes.distrust(block)

    def quarantine(self, room: RoomId) -> bool:
        """The room failed. What was exposed waits for a proof, the rest is free at once.

        False when nothing was exposed, so that no proof is needed.
        """
        holding = self._held.get(room)
        if holding is None or holding.standing is Standing.HELD:
            return False
        self._in(room, Standing.EXPOSED)
        unexposed = tuple(
            own[len(exposed) :] for own, exposed in zip(holding.own, holding.exposed, strict=True)
        )
        self._unpin(holding)
        self._all(PagePool.release, unexposed)
        self._all(PagePool.quarantine, holding.exposed)
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
        self._all(PagePool.release, holding.pages)
        for tables in holding.further.values():
            self._all(PagePool.release, tables)
        self.slots.release(holding.slot)
        del self._held[room]
        return True

    def _reserve(self, pages: Sequence[int]) -> PageTables:
        """So many free pages, of which there are enough once cached ones are given up."""
        lacking = [count - pool.free for count, pool in zip(pages, self.pools, strict=True)]
        if max(lacking) > 0:
            self._all(PagePool.release, self.prefixes.evict(self.prefixes.blocks_for(lacking)))
        return tuple(map(PagePool.reserve, self.pools, pages))

    def _unpin(self, holding: Holding) -> None:
        """What is left of the holding is the room's own."""
        if holding.shared_tokens:
            way = self.prefixes.way(holding.pages, self._blocks(holding))
            self._each(PagePool.cache, self.prefixes.unpin(way))
            holding.pages = holding.own
            holding.shared_tokens, holding.shared = 0, self.prefixes.counts(0)

    def _blocks(self, holding: Holding) -> int:
        """Leading ones that are shared."""
        return holding.shared_tokens // self.prefixes.block_tokens if holding.shared_tokens else 0

    def _each(self, move: _Move, blocks: Sequence[PageId]) -> None:
        """Of the tree."""
        if blocks:
            self._all(move, self.prefixes.pages(blocks))

    def _all(self, move: _Move, pages: PageTables) -> None:
        """By group."""
        for pool, table in zip(self.pools, pages, strict=True):
            if table:
                move(pool, table)

    def _in(self, room: RoomId, standing: Standing) -> Holding:
        holding = self._held[room]
        if holding.standing is not standing:
            raise IllegalPageMove(f"room {room}: {holding.standing.value}, must be {standing.value}")
        return holding
