"""Chains of rooms that belong to one request, found by an id.

A room that continues another has that room's id. So a request is a chain of rooms. It has branches if its
choices went on in rooms of their own. A client may use a request id again, and the prompts of one HTTP
request are requests of their own (`ID-0`, `ID-1` and so on). So an id may belong to several chains. It stands
for the newest, and the others are listed with it.
"""

import re
from collections.abc import Iterable
from itertools import islice
from typing import Final

from baton.fleet.registry import Registry
from baton.fleet.room_entry import RoomEntry, RoomPhase
from baton.ids import RoomId
from baton.rooms.errors import Reason, UnknownRoom
from baton.rooms.reasons import REASONS, Fault
from baton.rooms.timeline import BOOTSTRAP, Moment

PREFIX: Final = re.compile(r"(chatcmpl|cmpl)-(?=.)")
"""Prefix that the API adds to a request's id to make the id of the response."""
ROOM: Final = re.compile(r"[0-9]{1,20}", re.ASCII)
ROOMS_PER_REQUEST_MAX: Final = 64
OTHERS_MAX: Final = 32
SEARCHED_MAX: Final = 10_000
"""Number of rooms, the newest, in which a part of an id is searched. A whole id is found in any room
(`find`)."""

BETWEEN: Final = (Moment.ANSWERED, Moment.NOT_RETRIED, Moment.GIVEN_UP)
"""Events that end a request after its last room has ended."""

Chain = list[RoomEntry]
"""List of all rooms of one request, the oldest first. The last entry is the room that shows the request's
state."""


class RetryChains:
    """Look-ups of requests by id, over the rooms that the router knows now."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._index = registry.index

    def find(self, wanted: str) -> tuple[Chain, list[Chain]]:
        """Return the newest chain that belongs to an id, and the other chains with this id, newest first.

        The id may be that of a request, a response or a room. Both results are empty if it is unknown.
        """
        for name in dict.fromkeys((wanted, PREFIX.sub("", wanted, count=1))):
            newest = next(self._index.named(name), None) or next(self._index.of_request(name), None)
            if newest is not None:
                return self._meant(newest, self._index.of_request(name))
        entry = self._room(wanted)
        if entry is None:
            return [], []
        return self._meant(entry, self._index.named(entry.request_id))

    def newest(self, limit: int, *, search: str = "", failed: bool = False) -> list[Chain]:
        """Return the chains of clients' requests, the newest first, `limit` at most. `search`: part of an id,
        looked for in the newest SEARCHED_MAX rooms. `failed`: whether to return only those whose last room
        failed."""
        entries = self._index.failures() if failed else self._index.clients()
        if search:
            plain = PREFIX.sub("", search, count=1)
            looked_at = islice(entries, SEARCHED_MAX)
            entries = (each for each in looked_at if plain in each.request_id or search == str(each.id))
        return self._chains(entries, limit)

    def _meant(self, entry: RoomEntry, of_its_id: Iterable[RoomEntry]) -> tuple[Chain, list[Chain]]:
        [meant] = self._chains([entry], 1)
        others = self._chains(of_its_id, OTHERS_MAX + 1)
        return meant, [each for each in others if each[-1] is not meant[-1]][:OTHERS_MAX]

    def _room(self, wanted: str) -> RoomEntry | None:
        if ROOM.fullmatch(wanted) is None:
            return None
        try:
            return self._registry.get(RoomId(int(wanted)))
        except UnknownRoom:
            return None

    def _chains(self, entries: Iterable[RoomEntry], limit: int) -> list[Chain]:
        """Return the chains that contain at least one of the rooms `entries`, newest first, `limit` at
        most."""
        chains: dict[RoomId, Chain] = {}
        for entry in entries:
            first = self._first(entry)
            if first.id not in chains:
                chains[first.id] = self._from(first)
            if len(chains) == limit:
                break
        return sorted(chains.values(), key=lambda chain: max(each.id for each in chain), reverse=True)

    def _first(self, entry: RoomEntry) -> RoomEntry:
        """Return the first room of the request to which a room belongs. If earlier rooms are forgotten,
        return the first one that is known."""
        while entry.retry_of is not None:
            try:
                entry = self._registry.get(entry.retry_of)
            except UnknownRoom:
                break
        return entry

    def _from(self, first: RoomEntry) -> Chain:
        """Return the room `first` and all rooms that continue it, directly or indirectly. If there are too
        many, only the newest are returned."""
        rooms, ends = [first], []
        for entry in rooms:
            after = self._index.after(entry.id)
            rooms += after
            ends += [] if after else [entry]
        best = max(ends, key=_relevance)
        rest = sorted((each for each in rooms if each is not best), key=lambda each: each.id)
        return [*rest, best][-ROOMS_PER_REQUEST_MAX:]


def was_interrupted(entry: RoomEntry) -> bool:
    """Return whether a room ended without a failure, so that its request goes on: it was retracted, or a full
    worker refused it."""
    return entry.cause is not None and not REASONS[entry.cause.reason].is_attempt


def was_refused(entry: RoomEntry) -> bool:
    """Return whether a full worker refused a room."""
    return entry.cause is not None and entry.cause.reason is Reason.WORKER_FULL


def is_paused(entry: RoomEntry) -> bool:
    """Return whether a request's last room was retracted or refused, and another room is to follow."""
    return was_interrupted(entry) and not _has_event(entry, *BETWEEN)


def _has_event(entry: RoomEntry, *words: Moment) -> bool:
    """Return whether the router wrote one of these events in a room's timeline."""
    return any(event.source == BOOTSTRAP and event.name in words for event in entry.events)


def _relevance(entry: RoomEntry) -> tuple[bool, bool, int, int]:
    """Return the sort key by which the last rooms of a request's branches are compared: the highest shows the
    request's state. A room that goes on is best, then one that failed by itself, then the one that ended
    last."""
    goes_on = entry.phase in (RoomPhase.OPEN, RoomPhase.STREAMING) or is_paused(entry)
    by_itself = entry.cause is not None and REASONS[entry.cause.reason].fault is not Fault.CALLER
    failed = by_itself and (entry.has_failed or _has_event(entry, Moment.NOT_RETRIED))
    return goes_on, failed, entry.closing_ms, entry.id
