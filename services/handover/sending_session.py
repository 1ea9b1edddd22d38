"""Prefill worker's half of its session with one decode worker, on the leader.

It decides which grants wait for their rooms, and when a grant or a close is answered. A connect is answered
by the turn that applied it, which needs no decision here. Messages and results of turns go in, and requests
to the driver come out of `take_requests`. No message has a deadline: as long as the stream lives, the
receiver knows that this worker does.
"""

from dataclasses import dataclass
from typing import Final, Generic, TypeAlias, TypeVar

from baton.handover.early_grants import EarlyGrant, EarlyGrantOwner, EarlyGrants
from baton.handover.requests import StartTimer, StopTimer
from baton.handover.session_messages import Timer, TimerKind, TimerRequest
from baton.ids import Generation, Incarnation, RoomId
from baton.rooms.errors import UnknownRoom

EARLY_GRANT_S: Final = 60.0
"""Seconds for which a grant waits for its room to open. It is the time in which the router delivers a room to
both workers (`baton.fleet.room_table.DELIVERY_MS`)."""

G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class ApplyGrant(Generic[G]):
    """Request to apply a grant on every rank. The result comes back by `grant_applied`."""

    room: RoomId
    grant: G


@dataclass(frozen=True, slots=True)
class ApplyClose:
    """Request to apply a close on every rank. The result comes back by `close_applied`."""

    room: RoomId
    generation: Generation


@dataclass(frozen=True, slots=True)
class AwaitQuiet:
    """Request to call `quiet` when a closed room has no write under way and can start none."""

    room: RoomId
    generation: Generation


@dataclass(frozen=True, slots=True)
class AnswerGrant:
    """Request to answer a grant. `error`: None if it was applied."""

    room: RoomId
    error: Exception | None


@dataclass(frozen=True, slots=True)
class AnswerClose:
    """Request to answer a close. `error`: None if nothing more is written for this generation."""

    room: RoomId
    generation: Generation
    error: Exception | None


SendingRequest: TypeAlias = ApplyGrant[G] | ApplyClose | AwaitQuiet | AnswerGrant | AnswerClose | TimerRequest


class SendingSession(Generic[G]):
    """Session with one decode worker, for the length of one stream. `G`: a grant as the driver has it."""

    def __init__(self, early_grants: EarlyGrants[G], owner: EarlyGrantOwner) -> None:
        """Start without messages.

        `early_grants`: those of all decode workers. `owner`: driver of this session, which calls
        `room_opened`.
        """
        self.receiver: Incarnation | None = None
        """Incarnation of the decode worker. None until it has proven its identity."""
        self.early: dict[RoomId, EarlyGrant[G]] = {}
        """Grants of this session whose rooms have not been opened on this worker yet."""
        self._early_grants = early_grants
        self._owner = owner
        self._closing: dict[RoomId, set[Generation]] = {}
        """Generations of rooms that the decode worker has closed and whose close has no answer yet. A second
        close of such a generation is ignored. A grant of such a room does not wait for the room to open."""
        self._requests: list[SendingRequest[G]] = []

    def take_requests(self) -> list[SendingRequest[G]]:
        """Return the requests since the last call, in the order in which they are to be carried out."""
        requests, self._requests = self._requests, []
        return requests

    # ---- messages of the decode worker

    def grant(self, room: RoomId, grant: G) -> None:
        self._requests.append(ApplyGrant(room, grant))

    def close(self, room: RoomId, generation: Generation) -> None:
        if generation in self._closing.get(room, ()):
            return  # it has one answer
        self._drop_early(room)
        self._closing.setdefault(room, set()).add(generation)
        self._requests.append(ApplyClose(room, generation))

    # ---- results of turns

    def grant_applied(
        self, room: RoomId, grant: G, error: Exception | None, *, is_open: bool, is_retired: bool
    ) -> None:
        """Process the result of a grant. `is_open`: whether the room is open here now. `is_retired`: whether
        it was open, and is over."""
        if isinstance(error, UnknownRoom) and room not in self._closing:
            if is_open:  # the room opened in the same turn, after the grant
                self._requests.append(ApplyGrant(room, grant))
                return
            if not is_retired and self._add_early(room, grant, error):
                return
        self._requests.append(AnswerGrant(room, error))

    def close_applied(self, room: RoomId, generation: Generation, error: Exception | None) -> None:
        """Process the result of a close, which is answered when the room is quiet, or now if it failed."""
        if error is None:
            self._requests.append(AwaitQuiet(room, generation))
        else:
            self._answer_close(room, generation, error)

    def quiet(self, room: RoomId, generation: Generation) -> None:
        """Answer the close of a room that has no write under way and can start none (`ack-is-proof`)."""
        self._answer_close(room, generation, None)

    def room_opened(self, room: RoomId) -> None:
        """Apply the grant that waited for this room, which `EarlyGrants.apply` has removed."""
        early = self.early.pop(room)
        self._requests += [StopTimer(Timer(TimerKind.EARLY_GRANT, room)), ApplyGrant(room, early.grant)]

    def fire(self, timer: Timer) -> None:
        """Refuse an early grant whose room did not open in time."""
        early = self.early.pop(timer.room, None)
        if early is not None and self._early_grants.drop(early):
            self._requests.append(AnswerGrant(early.room, early.refusal))

    def end(self) -> None:
        """Forget the grants that wait for their rooms, because the stream ends."""
        for room in list(self.early):
            self._drop_early(room)

    def _answer_close(self, room: RoomId, generation: Generation, error: Exception | None) -> None:
        self._closing[room].discard(generation)
        if not self._closing[room]:
            del self._closing[room]
        self._requests.append(AnswerClose(room, generation, error))

    def _add_early(self, room: RoomId, grant: G, refusal: UnknownRoom) -> bool:
        if self.receiver is None:
            return False
        early = EarlyGrant(room, self.receiver, grant, refusal, self._owner)
        if not self._early_grants.add(early):
            return False
        self.early[room] = early
        self._requests.append(StartTimer(Timer(TimerKind.EARLY_GRANT, room), EARLY_GRANT_S))
        return True

    def _drop_early(self, room: RoomId) -> None:
        early = self.early.pop(room, None)
        if early is not None:
            self._early_grants.drop(early)
            self._requests.append(StopTimer(Timer(TimerKind.EARLY_GRANT, room)))
