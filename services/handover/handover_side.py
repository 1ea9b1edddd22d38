"""What is the same on both sides of a hand-over?

One table of rooms, the memory that they hold, and the requests to the world that have not been taken yet.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from baton.handover.requests import Report, Retired, SideRequest
from baton.ids import Incarnation, PageCounts, RoomId
from baton.pages.holdings import Holdings
from baton.pages.layout import KvLayout
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import Cause, Reason
from baton.rooms.evidence import Evidence, Failed
from baton.rooms.request import Request
from baton.rooms.room import Room
from baton.rooms.roster import Capacity, Roster
from baton.rooms.timeline import Moment

R = TypeVar("R", bound=Room)
Q = TypeVar("Q")


class HandOverSide(ABC, Generic[R, Q]):
    """One rank's half of every hand-over of its worker. `R`: its record of a room; `Q`: the requests that it
    alone makes.

    Invariants:
      one-retire         a room leaves by RELEASE, which empties the roster and the holdings of it
      exits-release-all  what a room held is given back there, and nowhere else
    """

    def __init__(
        self,
        make: Callable[..., R],
        places: int,
        holdings: Holdings,
        layout: KvLayout,
        deadlines: Deadlines,
    ) -> None:
        """`make`: the record's class; it may add what its shell keeps of a room."""
        self.roster: Roster[R] = Roster(places)
        self.holdings = holdings
        self.draining = False
        self._make = make
        self.layout = layout
        self._deadlines = deadlines
        self._requests: list[Q | SideRequest] = []

    def take_requests(self) -> list[Q | SideRequest]:
        """Those since the last call, in order."""
        taken, self._requests = self._requests, []
        return taken

    # ---- commands, the same on every rank

    def cancel(self, room: RoomId, cause: Cause, now_ms: int) -> None:
        self.roster.cancel(room, cause, now_ms)

    def drain(self) -> None:
        """Hold no more rooms than there are, and leave when there are none."""
        self.draining = True

    # ---- what is known on this rank

    def note(self, room: RoomId, evidence: Evidence) -> bool:
        """Add a fact to a room; False, and nothing else, when it is not here."""
        return self.roster.note(room, evidence)

    def fail(self, room: R, reason: Reason, text: str) -> None:
        room.note(Failed(Cause(reason, text)))

    def capacity(self) -> Capacity:
        """What could be reserved right now."""
        holdings = self.holdings
        return Capacity(holdings.available, holdings.slots.free, holdings.prefixes.digest)

    def may_leave(self) -> bool:
        """Draining, and no room is here."""
        return self.draining and not len(self.roster)

    # ---- what moves do

    def _enter(
        self,
        room: RoomId,
        request: Request,
        peer: Incarnation,
        pages: PageCounts,
        now_ms: int,
        *,
        ends_ms: int | None,
        peer_name: str,
        compiled: bool,
        **own: Any,
    ) -> R:
        """Enter a room that needs so many pages. `own`: what this side's record says beside. Raises
        Refusal."""

        def make(place: int) -> R:
            return self._make(
                room,
                request.request_id,
                peer,
                place,
                pages,
                self._deadlines,
                now_ms,
                ends_ms,
                compiled=compiled,
                request=request,
                peer_name=peer_name,
                **own,
            )

        return self.roster.open(room, make, now_ms)

    @abstractmethod
    def perform(self, room: R, effect: Any, now_ms: int) -> None:
        """Do what a settled move asks of this side. `effect`: one of its own."""

    def _distrust(self, room: R) -> None:
        """A page that it shared may be why its step failed: nobody else is to begin with that, least of all
        the request's next room, which comes before this one is released."""
        if room.ended_for is Reason.ENGINE_FAILED:
            self.holdings.distrust(room.id)

    def _release(self, room: R, now_ms: int) -> None:
        """The one way out of every table that knows the room (`one-retire`)."""
        self.holdings.give_back(room.id)
        self.roster.retire(room.id, now_ms)
        self._ask(Retired(room.id, room.proof, room.phase_ms))

    def _ask(self, request: Q | SideRequest) -> None:
        self._requests.append(request)

    def _report(self, room: R, moment: Moment, detail: str = "", *, of_rank: bool = False) -> None:
        self._ask(Report(room.id, moment, detail, of_rank))
