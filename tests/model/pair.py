"""Session of the two workers: the product's two halves, and the stream between them.

`DecodeLink` and `PrefillStream` drive the halves as `baton.decode.sender_link` and
`baton.prefill.handover_stream` do. They decide nothing. Messages of a stream are under way one by one, and
each is answered as it is applied. What is under way as the stream breaks may be applied all the same, and its
answer is lost. Pauses pass at once; the time of an early grant passes when its room does not come.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton.handover.early_grants import EarlyGrants
from baton.handover.receiving_session import CONNECT_PAUSE_S, ReceivingSession
from baton.handover.requests import ClaimRoom, Grant, StartTimer
from baton.handover.sender_problem import ProblemKind, SenderProblem
from baton.handover.sending_session import (
    AnswerClose,
    AnswerGrant,
    ApplyClose,
    ApplyGrant,
    AwaitQuiet,
    SendingSession,
)
from baton.handover.session_messages import (
    Answer,
    CancelRoom,
    CloseAnswer,
    ConnectAnswer,
    ConnectionFailed,
    ConnectionMade,
    GrantAnswer,
    SenderQuiet,
    Timer,
    TimerKind,
    Unneeded,
)
from baton.ids import Generation, Incarnation, PageTables, RoomId
from baton.rooms.errors import Refusal, UnknownRoom

Out = tuple[Any, ...]
"""A request of a half: a verb and what it is about."""
EARLY_MAX: Final = 9
"""Early grants of a receiver: more than a scope has rooms."""
CONNECTS: Final = 2
"""A connect that a sender refuses for a while is made so often."""
_KINDS: Final = {
    "NotConnected": ProblemKind.NOT_CONNECTED,
    "NotQuiet": ProblemKind.NOT_QUIET,
    "its stream broke": ProblemKind.LOST,
}


def _problem(refusal: str) -> SenderProblem | None:
    """Return a refusal by its name as the session has it. None for an empty name."""
    return SenderProblem(_KINDS.get(refusal, ProblemKind.REFUSED), "") if refusal else None


@dataclass(frozen=True, slots=True)
class LinkStanding:
    exposure: Incarnation
    is_connected: bool
    is_shut_out: bool
    """The sender sees no end of its writes to this memory, and rooms have ended for that."""
    is_asking: bool
    closes: int
    """Closes without an answer."""
    waits: bool
    """Whether some message has no answer yet."""


class DecodeLink:
    """Link of decode's leader to the live prefill worker."""

    def __init__(self, exposure: Incarnation, *, ways: bool) -> None:
        """`ways`: whether to connect takes a message. False: it is connected from the start."""
        self._exposure = exposure
        self._ways = ways
        self._is_shut_out = False
        self._begin()

    def _begin(self) -> None:
        self._session = ReceivingSession("", self._exposure)
        if not self._ways:
            self._session.connect(RoomId(0))
            self._session.take_connect()
            self._session.receive([ConnectAnswer(self._exposure)], 0.0)
            self._session.take_requests()

    # ---- commands

    def connect(self, room: RoomId) -> tuple[Out, ...]:
        self._session.connect(room)
        return self._requests()

    def grant(
        self,
        room: RoomId,
        peer: Incarnation,
        exposure: Incarnation,
        generation: Generation,
        pages: PageTables,
        slot: int,
    ) -> tuple[Out, ...]:
        self._session.grant(Grant(room, peer, exposure, generation, pages, slot, 0))
        return self._requests()

    def claim(self, room: RoomId, peer: Incarnation) -> tuple[Out, ...]:
        self._session.grant(ClaimRoom(room, peer))
        return self._requests()

    def close(self, room: RoomId, generation: Generation, doubtful: bool) -> tuple[Out, ...]:
        self._session.close(room, generation)
        if doubtful and self._ways:
            self._session.doubt()
        return self._requests()

    def over(self, room: RoomId) -> tuple[Out, ...]:
        self._session.over(room)
        return self._requests()

    def exposed_anew(self, exposure: Incarnation) -> tuple[Out, ...]:
        self._exposure = exposure
        self._is_shut_out = False
        self._session.exposed_anew(exposure)
        return self._requests()

    # ---- what comes of messages

    def connect_answered(self, exposure: Incarnation, refusal: str) -> tuple[Out, ...]:
        return self._receive(ConnectAnswer(exposure, _problem(refusal)))

    def grant_answered(self, room: RoomId, refusal: str) -> tuple[Out, ...]:
        return self._receive(GrantAnswer(room, _problem(refusal)))

    def close_answered(self, room: RoomId, generation: Generation, refusal: str) -> tuple[Out, ...]:
        return self._receive(CloseAnswer(room, generation, _problem(refusal)))

    def _receive(self, answer: Answer) -> tuple[Out, ...]:
        self._session.receive([answer], (CONNECTS - 1) * CONNECT_PAUSE_S)
        return self._requests()

    def broke(self) -> tuple[Out, ...]:
        self._session.stream_ended(SenderProblem(ProblemKind.LOST, ""))
        return self._requests()

    # ---- what it asks for

    def _requests(self) -> tuple[Out, ...]:
        out: list[Out] = []
        while (requests := self._session.take_requests()) or self._session.is_due:
            for request in requests:
                out += self._do(request)
            out += self._messages()
        return tuple(out)

    def _do(self, request: Any) -> list[Out]:
        match request:
            case StartTimer(timer) if timer.kind is not TimerKind.CLOSE_OVERDUE:
                self._session.fire(timer)
            case ConnectionMade(rooms_wait) if rooms_wait:
                return [("connected",)]
            case ConnectionFailed(_, is_shut_out):
                self._is_shut_out = self._is_shut_out or is_shut_out
            case CancelRoom(room, cause):
                return [("cancel", room, cause.reason)]
            case SenderQuiet(room, generation):
                return [("quiet", room, generation)]
            case Unneeded():
                self._begin()
            case _:
                pass
        return []

    def _messages(self) -> Iterator[Out]:
        if self._session.take_connect():
            yield "connect", self._exposure
        while (message := self._session.take_grant()) is not None:
            if isinstance(message, ClaimRoom):
                yield "claim", message.room
            else:
                yield (
                    *("grant", message.room, message.exposure),
                    *(message.generation, message.pages, message.slot),
                )
        for room, generation in self._session.take_closes():
            yield "close", room, generation

    def standing(self) -> LinkStanding:
        session, closes = self._session, len(self._session.closes)
        waits = session.is_asking or closes > 0
        return LinkStanding(
            *(self._exposure, session.is_connected, self._is_shut_out, session.is_asking, closes, waits)
        )


@dataclass(frozen=True, slots=True)
class StreamStanding:
    early: Sequence[RoomId]
    """Rooms that have not come, and whose grants wait for them."""
    awaited: Sequence[tuple[RoomId, Generation]]
    """Closes that are answered when their rooms are quiet."""

    @property
    def idle(self) -> bool:
        return not self.early and not self.awaited


class PrefillStream:
    """Stream of the live decode worker at prefill's leader. A grant is its command to the ranks."""

    def __init__(self, receiver: Incarnation) -> None:
        self._early: EarlyGrants[Out] = EarlyGrants(EARLY_MAX)
        self._session: SendingSession[Out] = SendingSession(self._early, self)
        self._session.receiver = receiver
        self._awaited: list[tuple[RoomId, Generation]] = []

    def grant(self, room: RoomId, grant: Out) -> tuple[Out, ...]:
        self._session.grant(room, grant)
        return self._requests()

    def grant_applied(
        self, room: RoomId, grant: Out, refusal: str, is_open: bool, is_retired: bool
    ) -> tuple[Out, ...]:
        error = _error(refusal)
        self._session.grant_applied(room, grant, error, is_open=is_open, is_retired=is_retired)
        return self._requests()

    def close(self, room: RoomId, generation: Generation) -> tuple[Out, ...]:
        self._session.close(room, generation)
        return self._requests()

    def close_applied(self, room: RoomId, generation: Generation, refusal: str) -> tuple[Out, ...]:
        self._session.close_applied(room, generation, _error(refusal))
        return self._requests()

    def quiet(self, room: RoomId, generation: Generation) -> tuple[Out, ...]:
        self._awaited.remove((room, generation))
        self._session.quiet(room, generation)
        return self._requests()

    def opened(self, room: RoomId) -> tuple[Out, ...]:
        self._early.apply(room)
        return self._requests()

    def room_opened(self, room: RoomId) -> None:
        self._session.room_opened(room)

    def expired(self, room: RoomId) -> tuple[Out, ...]:
        self._session.fire(Timer(TimerKind.EARLY_GRANT, room))
        return self._requests()

    def ended(self, receiver: Incarnation) -> tuple[Out, ...]:
        """End the stream, and begin the next one of this receiver. Returns the grants that waited."""
        early = tuple(each.grant for each in self._session.early.values())
        self._session.end()
        self.__init__(receiver)  # type: ignore[misc]
        return early

    def _requests(self) -> tuple[Out, ...]:
        return tuple(out for request in self._session.take_requests() for out in self._do(request))

    def _do(self, request: Any) -> list[Out]:
        match request:
            case ApplyGrant(room, grant):
                return [("apply grant", room, grant)]
            case ApplyClose(room, generation):
                return [("apply close", room, generation)]
            case AnswerGrant(room, error):
                return [("grant_answered", room, _refusal(error))]
            case AnswerClose(room, generation, error):
                return [("close_answered", room, generation, _refusal(error))]
            case AwaitQuiet(room, generation):
                self._awaited = sorted([*self._awaited, (room, generation)])
            case _:
                pass
        return []

    def standing(self) -> StreamStanding:
        return StreamStanding(tuple(self._session.early), tuple(self._awaited))


def _error(refusal: str) -> Exception | None:
    if not refusal:
        return None
    return UnknownRoom() if refusal == UnknownRoom.__name__ else Refusal(refusal)


def _refusal(error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) or type(error).__name__
