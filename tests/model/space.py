"""Checks of growth: pages are taken as tokens are drawn, and the right rooms are retracted.

Counted from the pages that rooms truly hold, by one rank, before and after its hand-over makes space for a
step. A page has one token here.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from baton.handover.page_growth import Space
from baton.handover.receiving_room import ReceivingRoom
from baton.handover.receiving_side import ReceivingSide
from baton.ids import PageId
from baton.pages.holdings import Holdings
from baton.rooms.errors import Reason
from baton.rooms.phases import Phase
from baton.rooms.reasons import REASONS
from tests.model.laws import Broken, Law

HOLDS: Final = (Phase.TRANSFERRING, Phase.COMPUTING, Phase.SUCCESS)

Row = tuple[Any, int, int]
"""(room, choice, how many positions the choice has when this row is computed)."""


def pages_of(holdings: Holdings, room: ReceivingRoom) -> list[PageId]:
    """Return all pages that the room holds, of all its choices."""
    if room.id not in holdings:
        return []
    holding = holdings.get(room.id)
    return [page for tables in (holding.pages, *holding.further.values()) for page in tables[0]]


def free(holdings: Holdings, rooms: Iterable[ReceivingRoom]) -> int:
    """Return the number of pages that no room holds."""
    return sum(holdings.sizes) - sum(len(pages_of(holdings, room)) for room in rooms)


def growing(rooms: Iterable[ReceivingRoom]) -> int:
    """Return the number of choices that may still need a page."""
    return sum(
        choice in room.ends.going_on and len(room.tables(choice)[0]) < room.division.tokens_max
        for room in rooms
        if room.phase in HOLDS and room.pages and room.cause is None and not room.finished
        for choice in range(room.request.choices)
    )


def check_wait(room: Any) -> None:
    """Check that a waiting room did not end because it waited."""
    late = room.cause is not None and room.cause.reason is Reason.DEADLINE
    waited = Phase.WAITING_FOR_INPUT in room.phase_ms and Phase.COMPUTING not in room.phase_ms
    if late and room.generation is None and waited:
        raise Broken(Law.WAITING_HAS_NO_DEADLINE, f"room {room.id} waited, and ends for that")


def reach(receiving: ReceivingSide[Any], room: Any, choice: int, stop: int, drafts: int) -> int:
    """Return how many drafts a row of `stop` tokens gets. Raises Broken if they take pages from others."""
    rooms, holdings = list(receiving.roster), receiving.holdings
    left = room.request.max_tokens - len(room.outputs[choice]) - 1
    wanted = min(drafts, left)
    if wanted <= 0:
        return 0
    had, retracting = free(holdings, rooms), [each.retracting for each in rooms]
    reached, given = receiving.reach(room, choice, stop + wanted)
    now = free(holdings, rooms)
    if given != had - now:
        raise Broken(
            Law.DRAFTS_MAKE_WAY, f"room {room.id} takes {had - now} pages for drafts, and says {given}"
        )
    if given and now < growing(rooms):
        raise Broken(Law.DRAFTS_MAKE_WAY, f"room {room.id} drafts over what those that run may need next")
    if retracting != [each.retracting for each in rooms]:
        raise Broken(Law.DRAFTS_MAKE_WAY, f"a room is retracted for drafts of room {room.id}")
    return reached - stop


def _age(room: ReceivingRoom) -> tuple[int, int]:
    """Return the sort key of a room's age, the least for the oldest."""
    return room.request.arrived_ms, room.id


class BeforeStep:
    """The state of one rank before space is made for its next step, to check which rooms are retracted."""

    def __init__(self, receiving: ReceivingSide[Any], rows: Sequence[Row]) -> None:
        self._rows = rows
        self._holdings = receiving.holdings
        self._rooms = list(receiving.roster)
        self._running = sorted((room for room in self._rooms if room.runs), key=_age)
        self._failed = {room.id for room in self._rooms if room.cause is not None}
        self._free = free(self._holdings, self._rooms)
        self._held = {room.id: len(pages_of(self._holdings, room)) for room in self._rooms}
        self._tables = {(room.id, choice): len(room.tables(choice)[0]) for room, choice, _ in rows}
        self._coming = sum(
            self._held[room.id] for room in self._rooms if room.phase is Phase.SUCCESS and not room.runs
        )

    def check(self, space: Space[Any]) -> None:
        """Check the decision. Raises Broken."""
        retracted = [room for room in self._running if room.retracting is not None]
        for room, choice, stop in self._rows:
            had, has = self._tables[room.id, choice], len(room.tables(choice)[0])
            if has > max(had, stop):
                text = f"choice {choice} of room {room.id} takes {has} pages for {stop} tokens"
                raise Broken(Law.MEMORY_AS_USED, text)
        self._check_order(retracted)
        self._check_count(retracted)
        self._check_step(space, retracted)
        for room in retracted:
            self._check_reason(room)

    def _check_order(self, retracted: Sequence[ReceivingRoom]) -> None:
        kept = [room for room in self._running if room not in retracted]
        if retracted and (not kept or _age(kept[-1]) > _age(retracted[0])):
            text = f"room {retracted[0].id} is retracted, and is older than all or one of those that go on"
            raise Broken(Law.OLDEST_GOES_ON, text)

    def _check_count(self, retracted: Sequence[ReceivingRoom]) -> None:
        """Check that no more rooms are retracted than needed, with pages about to be given back counted, and
        no fewer while others than the oldest run."""
        if retracted and self._suffices(retracted[1:]):
            text = f"room {retracted[0].id} is retracted, and there are pages enough without"
            raise Broken(Law.OLDEST_GOES_ON, text)
        if len(self._running) - len(retracted) > 1 and not self._suffices(retracted):
            raise Broken(Law.OLDEST_GOES_ON, "pages lack, and nobody makes space")

    def _suffices(self, retracted: Sequence[ReceivingRoom]) -> bool:
        lacking = sum(self._lacks(row) for row in self._rows if row[0] not in retracted)
        coming = self._coming + sum(self._held[room.id] for room in retracted)
        return lacking <= self._free or lacking - self._free <= coming

    def _lacks(self, row: Row) -> int:
        room, choice, stop = row
        return max(stop - self._tables[room.id, choice], 0)

    def _check_step(self, space: Space[Any], retracted: Sequence[ReceivingRoom]) -> None:
        computed = {self._rows[at][:2] for at in space.computed}
        left = self._free
        for row in sorted(self._rows, key=lambda row: _age(row[0])):
            room, choice, _ = row
            left -= 0 if room in retracted else self._lacks(row)
            if room not in retracted and left >= 0 and (room, choice) not in computed:
                text = f"choice {choice} of room {room.id} sits out, and there are pages for it"
                raise Broken(Law.OLDEST_GOES_ON, text)
        others = any(self._held[room.id] for room in self._rooms if room not in self._running)
        if self._rows and not (computed or retracted or others):
            raise Broken(Law.OLDEST_GOES_ON, "rooms run, and none of them goes on")

    def _check_reason(self, room: ReceivingRoom) -> None:
        cause = room.ending(0)
        reason = None if cause is None else cause.reason
        if room.id in self._failed:
            return
        if reason is not Reason.RETRACTED or REASONS[reason].is_failure:
            text = f"room {room.id} is retracted, and is told that it failed: {reason}"
            raise Broken(Law.RETRACTED_IS_NO_FAILURE, text)
