"""Base class of both sides of a hand-over: the rooms of a rank, their memory, and requests to the driver."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from baton.handover.requests import Orphaned, Report, Retired, SideRequest
from baton.ids import NO_OPENER, Incarnation, Opener, PageCounts, RoomId
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
    """State machine for one rank's part in all hand-overs of its worker, as sender or as receiver.

    `R`: class of the rank's record of a room. `Q`: class of the requests that only this side makes.

    Invariants:

    * `one-retire`: a room leaves only by the effect RELEASE, which removes it from the roster and from the
      holdings.
    * `exits-release-all`: all memory of a room is given back by RELEASE, and nowhere else.
    """

    def __init__(
        self,
        make: Callable[..., R],
        room_limit: int,
        holdings: Holdings,
        layout: KvLayout,
        deadlines: Deadlines,
    ) -> None:
        """Make a side without rooms.

        `make`: constructor of a room's record, which may be a subclass with the driver's own fields.
        `room_limit`: most rooms at a time.
        """
        self.roster: Roster[R] = Roster(room_limit)
        self.holdings = holdings
        self.draining = False
        self._make = make
        self.layout = layout
        self._deadlines = deadlines
        self._requests: list[Q | SideRequest] = []

    def take_requests(self) -> list[Q | SideRequest]:
        """Return the requests that this side has made to its driver since the last call, in order."""
        taken, self._requests = self._requests, []
        return taken

    # ---- commands, the same on every rank

    def cancel(self, room: RoomId, cause: Cause, now_ms: int, opener: Opener = NO_OPENER) -> None:
        """End a room, because its opener wants it to end. Has no effect for another router
        (`opener-owns`)."""
        self.roster.cancel(room, cause, now_ms, opener)

    def orphan(self, room: RoomId, opener: Opener, cause: Cause, now_ms: int) -> None:
        """Let other routers adopt a room for a while, because the stream of its router broke
        (`orphan-ends`). The room ends with `cause` at once if none could continue it."""
        here = self.roster.get(room) if room in self.roster else None
        if not self._deadlines.orphan_ms or (here is not None and not here.is_replayable):
            self.roster.cancel(room, cause, now_ms, opener)
        elif self.roster.orphan(room, opener, now_ms + self._deadlines.orphan_ms) and here is not None:
            self._report(here, Moment.ORPHANED, cause.text)
            self._ask(Orphaned(room))

    def adopt(self, room: RoomId, opener: Opener, term: int | None = None) -> R:
        """Give an orphan to another router, and return its record. Arguments and errors: those of
        `Roster.adopt`."""
        adopted = self.roster.adopt(room, opener, term)
        self._report(adopted, Moment.ADOPTED)
        return adopted

    def orphans(self) -> list[R]:
        """Return the rooms that other routers may adopt, oldest first."""
        return [room for room in self.roster if room.is_orphan and room.is_adoptable]

    def drain(self) -> None:
        """Refuse new rooms from now on. The worker may leave when its present rooms have ended."""
        self.draining = True

    # ---- what is known on this rank

    def note(self, room: RoomId, evidence: Evidence) -> bool:
        """Add one observed fact (evidence) to a room's record, for this rank's next vote. Return False if
        this rank does not have the room."""
        return self.roster.note(room, evidence)

    def fail(self, room: R, reason: Reason, text: str) -> None:
        room.note(Failed(Cause(reason, text)))

    def capacity(self) -> Capacity:
        """Return the numbers of pages and slots that new rooms could reserve now, and a digest of the prefix
        cache. All ranks compare them."""
        holdings = self.holdings
        return Capacity(holdings.available, holdings.slots.free, holdings.prefixes.digest)

    def has_room(self, room: RoomId, opener: Opener) -> bool:
        """Return whether a room of a router is here."""
        return room in self.roster and self.roster.get(room).obeys(opener)

    def entered(self, opener: Opener | None = None) -> RoomId:
        """Return the highest id among the present rooms of one router, or 0 if it has none. None: of all
        routers.

        A router issues its ids in ascending order, and compares them with none of another router. So rooms
        that it has adopted do not count.
        """
        ids = (room.id for room in self.roster if opener is None or (room.obeys(opener) and not room.term))
        return max(ids, default=RoomId(0))

    def others(self, opener: Opener | None = None) -> int:
        """Return the number of present rooms that other routers than this one opened."""
        return 0 if opener is None else sum(not room.obeys(opener) for room in self.roster)

    def may_leave(self) -> bool:
        """Return whether this side is draining and has no room left, so that the worker may end."""
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
        opener: Opener,
        **own: Any,
    ) -> R:
        """Add the record of a new room to the roster. Return the record. Raises Refusal.

        `pages`: number of pages that the room needs, by KV group. `own`: further fields of this side's
        record.
        """

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
                opener=opener,
                request=request,
                peer_name=peer_name,
                **own,
            )

        return self.roster.open(room, make, now_ms)

    @abstractmethod
    def perform(self, room: R, effect: Any, now_ms: int) -> None:
        """Carry out the effect of a move that all ranks have agreed on. `effect`: one of the effects of this
        side."""

    def _distrust(self, room: R) -> None:
        """Remove a room's shared pages from the prefix cache if its engine step failed.

        One of these pages may be the cause. The request's next room may open before this one is released, and
        must not begin with them.
        """
        if room.ended_for is Reason.ENGINE_FAILED:
            self.holdings.distrust(room.id)

    def _release(self, room: R, now_ms: int) -> None:
        """Give back a room's memory and remove it from the roster. No room leaves in another way
        (`one-retire`)."""
        self.holdings.give_back(room.id)
        self.roster.retire(room.id, now_ms)
        self._ask(Retired(room.id, room.proof, room.phase_ms))

    def _ask(self, request: Q | SideRequest) -> None:
        self._requests.append(request)

    def _report(self, room: R, moment: Moment, detail: str = "", *, of_rank: bool = False) -> None:
        self._ask(Report(room.id, moment, detail, of_rank))
