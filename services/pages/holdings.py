"""Memory of each room on one rank: its pages by KV group, and its metadata slot.

Each room has one record, a `Holding`. On a receiver it passes through `take`, `expose`, then `commit` or
`quarantine`, and at last `give_back`. On a sender, where no peer writes to it, it passes through `take` and
`give_back`.

The pages of a room in one KV group, in the order of its tokens:

```
 |<-------------- pages (choice 0) ------------------------------------------>|
 +--------------+---------------------------+--------------------------------+
 |    shared    |          exposed          |     growth         | drafts    |
 +--------------+---------------------------+--------------------------------+
 |  cached      |<----------------------- own ------------------------------->|
 |  prefix      |  rest of the prompt,      |  a page at a time,  | the last |
 |  of other    |  written by the sender    |  for drawn tokens   | own page,|
 |  rooms       |                           |  (`grow`)           | spare    |
 +--------------+---------------------------+--------------------------------+
                |
                +--> further[1], further[2], ...: own pages of each further choice,
                     behind the pages of the prompt that it reads
```

* shared: pages of the prefix cache, which the room only reads. They are never exposed or quarantined.
* exposed: pages that a peer may write to until the seal, or until another proof that no write can land
  (`exposure-on-page`).
* growth: pages that are reserved one by one while output tokens are sampled. No peer learns of them.
* drafts: KV of draft tokens, written to own pages beyond the output. KV of rejected drafts is overwritten
  before it is read.

In a KV group of states a room has one page for its whole length. With prefix caching it may have more pages
there: states that it stores at some positions (`stored`), which `keep` adds to the prefix cache. A room that
begins behind a cached prefix begins with the state that is cached there (`restored`), and never writes to it.

With prefix caching, `keep` adds a room's whole blocks to the prefix cache for later rooms. A room shares
pages only with rooms of its own cache salt (`same-root-only`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import add, le
from typing import Final, TypeAlias

from baton.ids import PageCounts, PageId, PageTables, RoomId
from baton.pages.errors import IllegalPageMove, OutOfPages, Truncated, added
from baton.pages.holding import Holding, Standing
from baton.pages.pool import PagePool, PageState
from baton.pages.prefix_tree import UNSALTED, PrefixTree
from baton.pages.slots import SlotPool

STATE_GAP_TOKENS: Final = 256
"""Fewest tokens between two states that a room stores for others. To compute fewer anew costs little."""
_Move: TypeAlias = Callable[[PagePool, Iterable[PageId]], None]


class Holdings:
    """KV pages and metadata slot of every room on one rank, by room id."""

    def __init__(
        self,
        pools: Sequence[PagePool],
        slots: SlotPool,
        prefixes: PrefixTree | None = None,
        state_gap_tokens: int = STATE_GAP_TOKENS,
    ) -> None:
        """Make holdings without rooms. `pools`: page pools by KV group. `prefixes`: prefix tree over these
        pools, or None to reuse no prefixes. `state_gap_tokens`: fewest tokens between two states that a room
        stores."""
        self._state_gap_tokens = state_gap_tokens
        self.pools = tuple(pools)
        self.sizes: PageCounts = tuple(map(len, self.pools))
        self.slots = slots
        self.prefixes = PrefixTree([0] * len(pools)) if prefixes is None else prefixes
        self.by_room: dict[RoomId, Holding] = {}

    def __len__(self) -> int:
        return len(self.by_room)

    def __contains__(self, room: RoomId) -> bool:
        return room in self.by_room

    def get(self, room: RoomId) -> Holding:
        return self.by_room[room]

    @property
    def available(self) -> PageCounts:
        """Number of pages that could be reserved now, by KV group. Free pages count, and cached pages that no
        room uses."""
        evictable = self._evictable()
        return tuple([pool.free + count for pool, count in zip(self.pools, evictable, strict=True)])

    def census(self) -> Mapping[PageState, int]:
        """Return the number of pages in each page state, summed over all KV groups."""
        total, *further = [pool.census() for pool in self.pools]
        for census in further:
            for state, count in census.items():
                total[state] += count
        return total

    def cached(self, tokens: Sequence[int], salt: int = UNSALTED) -> int:
        """Return how many of the leading `tokens` a computation need not compute, since their KV is in the
        prefix cache under `salt` now."""
        way = self.prefixes.match(tokens, salt)
        blocks = self.prefixes.with_state(way) if self.prefixes.has_states else len(way)
        return blocks * self.prefixes.block_tokens

    def take(
        self,
        room: RoomId,
        pages: PageCounts,
        tokens: Sequence[int] = (),
        salt: int = UNSALTED,
        *,
        computes: bool = False,
    ) -> Holding:
        """Reserve pages and a blank metadata slot for a room. Return its holding.

        `pages`: number of pages, by KV group. Leading pages come from the prefix cache if it has the KV of
        the room's first `tokens` under `salt`. `computes`: whether the room's computation begins behind them,
        which takes a cached state if the model has states. Raises OutOfPages without reserving anything.
        """
        if room in self.by_room:
            raise IllegalPageMove(f"room {room} already holds pages")
        prefixes = self.prefixes
        way = prefixes.match(tokens, salt)
        if way:
            way = way[: prefixes.blocks(pages)]
        begins = computes and prefixes.has_states
        if begins:
            way = way[: prefixes.with_state(way)]
        shared = prefixes.counts(len(way))
        fresh = [count - known for count, known in zip(pages, shared, strict=True)]
        lacking = [count - pool.free for count, pool in zip(fresh, self.pools, strict=True)]
        if max(lacking) > 0:
            evictable = self._evictable(way, begins=begins)
            if not all(map(le, lacking, evictable)):
                told, available, sizes = map(added, (pages, self.available, self.sizes))
                raise OutOfPages(f"{told} pages asked for, {available} available of {sizes}")
        slot = self.slots.hand_out()
        behind = way[-1] if begins and way else None
        restored: PageTables = ()
        if behind is not None:
            restored, woken = prefixes.pin_state(behind)
            if woken:
                self._all(PagePool.commit, restored)
        self._each(PagePool.commit, prefixes.pin(way))
        held = self._reserve(fresh)
        if way:
            held = tuple(map(add, prefixes.pages(way), held))
        cached = len(way) * prefixes.block_tokens
        holding = Holding(held, slot, salt, cached, shared, restored=restored, restored_behind=behind)
        self.by_room[room] = holding
        return holding

    def store_states(self, room: RoomId, tokens: Sequence[int]) -> Mapping[int, PageTables]:
        """Reserve pages for states that a room stores, while half of all are available: where `tokens` leave
        what is cached, and behind their last block. Return the pages by the number of tokens before.

        Call it when no room is about to take memory that it was promised.
        """
        holding, prefixes = self.by_room[room], self.prefixes
        state, last = prefixes.state_counts(1), holding.shared_tokens
        ends = {len(prefixes.match(tokens, holding.salt)), len(tokens) // prefixes.block_tokens}
        for at in sorted(end * prefixes.block_tokens for end in ends):
            left = zip(self.available, self.sizes, state, strict=True)
            has_plenty = all(2 * (count - each) >= whole for count, whole, each in left if each)
            if at >= last + self._state_gap_tokens and has_plenty:
                holding.stored[at] = self._reserve(state)
                last = at
        return holding.stored

    def expose(self, room: RoomId, pages: PageCounts) -> Holding:
        """Mark a room's slot and its first own pages as exposed, before a peer gets their addresses.

        `pages`: number of own pages to expose, by KV group. Raises Truncated if the room has fewer
        (`no-truncation`).
        """
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
        """Mark a room's exposed memory as committed: its seal proved that every write of the peer has
        ended."""
        holding = self._in(room, Standing.EXPOSED)
        self._all(PagePool.commit, holding.own)
        self.slots.commit(holding.slot)
        holding.standing = Standing.COMMITTED

    def own(self, room: RoomId) -> None:
        """Mark a room's own pages and slot as committed without exposing them. It is called for rooms to
        which no peer writes."""
        holding = self._in(room, Standing.HELD)
        self._all(PagePool.commit, holding.own)
        holding.standing = Standing.COMMITTED

    def grow(self, room: RoomId, pages: PageCounts, choice: int = 0) -> PageTables:
        """Reserve more pages for one choice of a committed room, and append them to its page tables. Return
        them.

        `pages`: number of pages, by KV group. Raises OutOfPages without reserving anything.
        """
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
        """Return how many pages would become available if this room ended now, by KV group. They are the
        room's own pages and the cached pages that no other room uses."""
        holding, prefixes = self.by_room[room], self.prefixes
        alone = prefixes.counts(prefixes.alone(holding.pages, self._blocks(holding)))
        held = zip(holding.pages, holding.shared, alone, strict=True)
        counts = tuple([len(table) - shared + more for table, shared, more in held])
        for tables in (*holding.further.values(), *holding.stored.values()):
            counts = tuple(map(add, counts, map(len, tables)))
        if holding.restored_behind is not None and prefixes.state_users(holding.restored_behind) == 1:
            counts = tuple(map(add, counts, prefixes.state_counts(1)))
        return counts

    def keep(self, room: RoomId, tokens: Sequence[int]) -> Holding:
        """Add the KV of a room's first `tokens` to the prefix cache, in whole blocks. Return its holding.

        Call it when all ranks have these tokens in the room's pages, and nothing reads or writes them. If
        another room has already added an equal block, the room uses that block and frees its own pages.
        """
        holding = self.by_room[room]
        if holding.standing in (Standing.EXPOSED, Standing.QUARANTINED):
            raise IllegalPageMove(f"room {room}: {holding.standing.value} pages are not to be shared")
        prefixes = self.prefixes
        states = {at // prefixes.block_tokens: pages for at, pages in holding.stored.items()}
        entered = prefixes.enter(tokens, holding.pages, self._blocks(holding), holding.salt, states)
        for state in states.values():
            is_added = state in entered.states
            for move in (PagePool.commit, PagePool.cache) if is_added else (PagePool.release,):
                self._all(move, state)
        holding.stored.clear()
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
        """Remove a room's shared pages from the prefix cache, because their contents may be wrong.

        Rooms that already use them continue. All ranks call it in the same turn, and before `quarantine`,
        after which the shared pages of the room are not known any more.
        """
        holding = self.by_room.get(room)
        if holding is None:
            return
        if holding.standing is Standing.QUARANTINED:
            raise IllegalPageMove(f"room {room}: what it shared is not known any more")
        for block in self.prefixes.way(holding.pages, self._blocks(holding))[:1]:
            self.prefixes.distrust(block)

    def quarantine(self, room: RoomId) -> bool:
        """Quarantine the exposed memory of a failed room, and free the rest of its pages at once.

        Quarantined memory is not reused until a proof that no write to it can still land. Return False,
        without effect, if nothing was exposed.
        """
        holding = self.by_room.get(room)
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
        """Free all memory of a room (`exits-release-all`). Return whether it had any. The caller has the
        proof that no write to it can still land."""
        holding = self.by_room.get(room)
        if holding is None:
            return False
        if holding.standing is Standing.EXPOSED:
            raise IllegalPageMove(f"room {room}: exposed memory must be committed or quarantined first")
        self._unpin(holding)
        self._all(PagePool.release, holding.pages)
        for tables in (*holding.further.values(), *holding.stored.values()):
            self._all(PagePool.release, tables)
        self.slots.release(holding.slot)
        del self.by_room[room]
        return True

    def _reserve(self, pages: Sequence[int]) -> PageTables:
        """Reserve free pages, and evict cached ones if there are too few. `pages`: number of pages, by KV
        group. The caller has checked that there are enough."""
        lacking = [count - pool.free for count, pool in zip(pages, self.pools, strict=True)]
        if max(lacking) > 0:
            self._all(PagePool.release, self.prefixes.evict(self.prefixes.blocks_for(lacking)))
            self._evict_states(pages)
        return tuple(map(PagePool.reserve, self.pools, pages))

    def _evictable(self, way: Sequence[PageId] = (), *, begins: bool = False) -> PageCounts:
        """Return how many cached pages could be evicted, by KV group. `way`: blocks that are to be used
        first, and if a computation `begins` behind them, the state of the last."""
        prefixes = self.prefixes
        is_taken = begins and way and not prefixes.state_users(way[-1])
        blocks = prefixes.counts(prefixes.evictable - prefixes.idle(way))
        return tuple(map(add, blocks, prefixes.state_counts(prefixes.evictable_states - bool(is_taken))))

    def _evict_states(self, pages: Sequence[int]) -> None:
        """Evict cached states until `pages` pages are free in each KV group of states."""
        wanted = zip(pages, self.pools, self.prefixes.state_counts(1), strict=True)
        lacking = max(count - pool.free if each else 0 for count, pool, each in wanted)
        if lacking > 0:
            self._all(PagePool.release, self.prefixes.evict_states(lacking))

    def _unpin(self, holding: Holding) -> None:
        """End a room's use of its shared pages, and remove them from its holding. The holding then has own
        pages only."""
        if holding.shared_tokens:
            way = self.prefixes.way(holding.pages, self._blocks(holding))
            if holding.restored_behind is not None:
                if unused := self.prefixes.unpin_state(holding.restored_behind):
                    self._all(PagePool.cache, unused)
                holding.restored, holding.restored_behind = (), None
            self._each(PagePool.cache, self.prefixes.unpin(way))
            holding.pages = holding.own
            holding.shared_tokens, holding.shared = 0, self.prefixes.counts(0)

    def _blocks(self, holding: Holding) -> int:
        """Return how many leading blocks of the prefix tree a room shares. A block is the fewest tokens that
        fill whole pages of every KV group."""
        return holding.shared_tokens // self.prefixes.block_tokens if holding.shared_tokens else 0

    def _each(self, move: _Move, blocks: Sequence[PageId]) -> None:
        """Move all pages of these blocks of the prefix tree to another page state. `move`: method of PagePool
        that makes the move."""
        if blocks:
            self._all(move, self.prefixes.pages(blocks))

    def _all(self, move: _Move, pages: PageTables) -> None:
        """Move all these pages to another page state. `move`: method of PagePool that makes the move.
        `pages`: page tables by KV group."""
        for pool, table in zip(self.pools, pages, strict=True):
            if table:
                move(pool, table)

    def _in(self, room: RoomId, standing: Standing) -> Holding:
        holding = self.by_room[room]
        if holding.standing is not standing:
            raise IllegalPageMove(f"room {room}: {holding.standing.value}, must be {standing.value}")
        return holding
