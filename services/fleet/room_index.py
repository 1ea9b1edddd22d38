"""Index of the rooms that the router knows, newest first: all rooms, those of one request, and those that
failed.

It is updated whenever a room is opened, fails or is forgotten. So the cost of listing the newest rooms does
not grow with the number of stored rooms.
"""

import re
from collections.abc import Iterator, Sequence
from heapq import merge
from typing import Final

from baton.fleet.room_entry import RoomEntry
from baton.ids import RoomId

PROMPT: Final = re.compile(r"-[0-9]+$", re.ASCII)
"""Suffix of request ids such as `ID-0`: an HTTP request with several prompts makes one request of each."""


def is_of(room_request: str, request_id: str) -> bool:
    """Return whether a room's request has this request id, or is one prompt of the HTTP request with this
    id."""
    return room_request == request_id or PROMPT.sub("", room_request) == request_id


Table = dict[RoomId, RoomEntry]
"""Rooms by room id. The oldest room is first, because ids are issued in ascending order."""


class RoomIndex:
    """Rooms by request and by outcome. Pure. It has no bound of its own: the caller reports each room that it
    forgets."""

    def __init__(self) -> None:
        self._clients: Table = {}
        """All known rooms by id, without canaries."""
        self._failed: Table = {}
        """Clients' rooms that failed and that no other room continues, in the order in which they failed."""
        self.by_request: dict[str, Table] = {}
        self._prompts: dict[str, Table] = {}
        """Rooms of HTTP requests with several prompts, each of which became a request of its own. The key is
        the id of the HTTP request."""
        self.continuations: dict[RoomId, list[RoomEntry]] = {}

    def opened(self, entry: RoomEntry) -> None:
        if not entry.canary:
            self._clients[entry.id] = entry
        for table, name in self._tables(entry):
            table.setdefault(name, {})[entry.id] = entry
        if entry.retry_of is not None:
            self.continuations.setdefault(entry.retry_of, []).append(entry)
            self._failed.pop(entry.retry_of, None)

    def failed(self, entry: RoomEntry) -> None:
        if not entry.canary:
            self._failed[entry.id] = entry

    def forgotten(self, entry: RoomEntry) -> None:
        self._clients.pop(entry.id, None)
        self._failed.pop(entry.id, None)
        for table, name in self._tables(entry):
            del table[name][entry.id]
            if not table[name]:
                del table[name]
        if entry.retry_of is not None:
            self.continuations[entry.retry_of].remove(entry)
            if not self.continuations[entry.retry_of]:
                del self.continuations[entry.retry_of]

    def clients(self) -> Iterator[RoomEntry]:
        return reversed(self._clients.values())

    def failures(self) -> Iterator[RoomEntry]:
        """Yield the rooms that failed, the one that failed last first."""
        return reversed(self._failed.values())

    def named(self, request_id: str) -> Iterator[RoomEntry]:
        """Yield the rooms whose request has exactly this request id, newest first."""
        return reversed(self.by_request.get(request_id, {}).values())

    def of_request(self, request_id: str) -> Iterator[RoomEntry]:
        """Yield the rooms of this request id and of its prompts (`ID-0`, `ID-1`, …), newest first."""
        prompts = reversed(self._prompts.get(request_id, {}).values())
        return merge(self.named(request_id), prompts, key=lambda entry: entry.id, reverse=True)

    def after(self, room: RoomId) -> Sequence[RoomEntry]:
        """Return the rooms that continue this one, oldest first. There may be several if its choices had
        different outputs."""
        return self.continuations.get(room, ())

    def _tables(self, entry: RoomEntry) -> Iterator[tuple[dict[str, Table], str]]:
        yield self.by_request, entry.request_id
        request_id = PROMPT.sub("", entry.request_id)
        if request_id != entry.request_id:
            yield self._prompts, request_id
