"""A room that another router opened, at the router that wants to adopt it.

The stream of the former router broke. Decode is asked for the room first, and decides (`adopt-first-wins`).
It sends the whole output again, so nothing of prefill's is awaited but its outcome. If decode refuses, the
room was never this router's, and another room computes the answer.
"""

from collections.abc import Mapping

from baton.handover.opened_room import OpenedRoom
from baton.handover.opener_messages import (
    Accepted,
    Adopt,
    Break,
    FirstToken,
    MarkAdopted,
    MarkNotAdopted,
    MarkRetired,
    RoomTimer,
    WorkerMessage,
)
from baton.ids import RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.rooms.request import Request


class AdoptedRoom(OpenedRoom):
    """Room at the router that adopts it. Its request has to be replayable (`Request.is_replayable`)."""

    def __init__(self, room: RoomId, request: Request, workers: Mapping[Side, str], limit_s: float) -> None:
        """Make a room that its workers were not asked for yet. Arguments: those of `OpenedRoom`."""
        super().__init__(room, request, workers, limit_s)
        self._is_ours = False
        """Whether decode has given the room to this router."""
        self._term = 0
        """Term of this router's adoption."""

    def stop_adopting(self, text: str) -> None:
        """Adopt the room no more, if decode has not given it to this router yet. `text`: reason."""
        if not self._is_ours and not self.is_over:
            self._not_adopted(text)

    def end(self, cause: Cause) -> None:
        if self._is_ours or self.is_over:
            super().end(cause)
        else:
            self._not_adopted(cause.text)

    def broken(self, side: Side, how: Break, text: str) -> None:
        if not self._is_ours and not self.is_over:
            self._open.discard(side)
            self._holding.discard(side)
            self._not_adopted(text)
        elif side is Side.PREFILL and not self._is_accepted:
            self._open.discard(side)
            self._cause_of(side, how, text)
            self._requests.append(MarkRetired(side))  # its part of the room is over
            self._settle()
        else:
            super().broken(side, how, text)

    def _open_next(self) -> None:
        if self._unopened and not self.is_over and (self._unopened[0] is Side.DECODE or self._is_ours):
            self._requests.append(Adopt(self._unopened[0], self._term))

    def _take(self, side: Side, message: WorkerMessage) -> None:
        match message:
            case Accepted(term) if not self._is_ours:
                self._term, self._is_ours = term, True
                self._requests.append(MarkAdopted())
                self._open_next()
            case FirstToken():
                self.cached_tokens = message.cached_tokens  # the token comes from decode, with its position
            case _:
                super()._take(side, message)

    def _count(self, side: Side) -> None:
        """Count nothing: the router that opened the room has counted its prompt."""

    def _not_adopted(self, text: str) -> None:
        """Forget the room, because it is not this router's."""
        self._first_cause = Cause(Reason.NOT_ADOPTED, text)
        self._requests.append(MarkNotAdopted(self._first_cause))
        self._merger.going.clear()
        self._stop_timer(RoomTimer.LIMIT)
        self._leave_all()
        self._settle()
