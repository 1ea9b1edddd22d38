"""Properties of both halves of a session, over streams that break at any time."""

from collections import Counter, deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.handover.early_grants import EarlyGrants
from baton.handover.receiving_session import ReceivingSession
from baton.handover.requests import ClaimRoom, Grant, StartTimer, StopTimer
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
    CancelRoom,
    CloseAnswer,
    CloseOverdue,
    ConnectAnswer,
    ConnectionFailed,
    ConnectionMade,
    GrantAnswer,
    SenderQuiet,
    Timer,
    Unneeded,
)
from baton.ids import Generation, Incarnation, RoomId
from baton.rooms.errors import UnknownRoom

ROOMS = tuple(map(RoomId, range(1, 5)))
SENDER, RECEIVER = Incarnation(11), Incarnation(22)
TIMEOUT_S = 0.1
LOST, AGAIN, REFUSED, NOT_QUIET, NOT_CONNECTED = (
    SenderProblem(kind, kind.value)
    for kind in (
        ProblemKind.LOST,
        ProblemKind.SEND_AGAIN,
        ProblemKind.REFUSED,
        ProblemKind.NOT_QUIET,
        ProblemKind.NOT_CONNECTED,
    )
)


class Pair:
    """Two workers and the stream between them. The sender's turns are as simple as they can be."""

    def __init__(self) -> None:
        self.exposure = Incarnation(1)
        self.receiving = ReceivingSession("prefill-0", self.exposure)
        self.early_grants: EarlyGrants[Grant | ClaimRoom] = EarlyGrants(len(ROOMS))
        self.connected_to: Incarnation | None = None
        """Exposure that the sender can write to."""
        self.is_quiet = True
        """Whether the sender has seen the end of its writes over broken connections."""
        self.opened: set[RoomId] = set()
        self.retired: set[RoomId] = set()
        """Rooms that are open at the sender, and rooms that are over there."""
        self.granted, self.claimed, self.closed = set[RoomId](), set[RoomId](), set[RoomId]()
        """Rooms that the receiver has granted, claimed and closed."""
        self.taken, self.cancelled, self.quiet = Counter[RoomId](), Counter[RoomId](), Counter[RoomId]()
        """Grants that the sender has applied, and cancels and proofs at the receiver, by room."""
        self.to_sender: deque[Any] = deque()
        self.to_receiver: deque[Any] = deque()
        self.awaited: list[AwaitQuiet] = []
        self.timers: set[tuple[Any, Timer]] = set()
        self.open_stream()

    def open_stream(self) -> None:
        self.sending: SendingSession[Grant | ClaimRoom] = SendingSession(self.early_grants, self)
        self.sending.receiver = RECEIVER

    # ---- the receiver

    def is_new(self, room: RoomId) -> bool:
        return room not in self.granted | self.claimed | self.closed | self.cancelled.keys()

    def connect(self, room: RoomId) -> None:
        if self.is_new(room):
            self.receiving.connect(room)

    def grant(self, room: RoomId) -> None:
        if self.is_new(room):
            self.granted.add(room)
            self.receiving.grant(Grant(room, SENDER, self.exposure, Generation(room), ((),), 0, 0))

    def claim(self, room: RoomId) -> None:
        if self.is_new(room):
            self.claimed.add(room)
            self.receiving.grant(ClaimRoom(room, SENDER))

    def close(self, room: RoomId) -> None:
        if room not in self.closed:
            self.closed.add(room)
            self.receiving.close(room, Generation(room))

    def move(self, _: RoomId) -> None:
        self.exposure = Incarnation(self.exposure + 1)
        self.receiving.exposed_anew(self.exposure)

    def doubt(self, _: RoomId) -> None:
        self.receiving.doubt()

    # ---- the stream

    def send(self, _: RoomId) -> None:
        if self.receiving.take_connect():
            self.to_sender.append(self.exposure)
        while (message := self.receiving.take_grant()) is not None:
            self.to_sender.append(message)
        self.to_sender += self.receiving.take_closes()

    def arrive(self, _: RoomId) -> None:
        match self.to_sender.popleft() if self.to_sender else None:
            case int(exposure):
                problem = None if self.is_quiet else NOT_QUIET
                self.connected_to = self.connected_to if problem else Incarnation(exposure)
                self.to_receiver.append(ConnectAnswer(Incarnation(exposure), problem))
            case (room, generation):
                self.sending.close(room, generation)
            case Grant(room) | ClaimRoom(room) as message:
                self.sending.grant(room, message)

    def answer(self, _: RoomId) -> None:
        if self.to_receiver:
            self.receiving.receive([self.to_receiver.popleft()], TIMEOUT_S)

    def lose(self, room: RoomId) -> None:
        """End the stream. What is under way arrives or not."""
        for _ in range(room):
            self.arrive(room)
        self.break_off(LOST)

    def begin_again(self, _: RoomId) -> None:
        """End the stream before any of its messages arrived, as for an unknown receiver."""
        if not self.to_receiver and not self.sending.early and not self.awaited:
            self.break_off(AGAIN)

    def break_off(self, problem: SenderProblem) -> None:
        self.to_sender.clear()
        self.to_receiver.clear()
        self.awaited.clear()
        self.sending.end()
        self.carry_out()
        self.open_stream()
        self.receiving.stream_ended(problem)

    # ---- the sender

    def open(self, room: RoomId) -> None:
        if room not in self.opened | self.retired:
            self.opened.add(room)
            self.early_grants.apply(room)

    def room_opened(self, room: RoomId) -> None:
        self.sending.room_opened(room)

    def retire(self, room: RoomId) -> None:
        if room in self.opened:
            self.opened.remove(room)
            self.retired.add(room)

    def break_connection(self, _: RoomId) -> None:
        self.connected_to, self.is_quiet = None, False

    def become_quiet(self, _: RoomId) -> None:
        self.is_quiet = True
        for each in [each for each in self.awaited if each.room not in self.opened]:
            self.awaited.remove(each)
            self.sending.quiet(each.room, each.generation)

    def apply(self, room: RoomId, message: Grant | ClaimRoom) -> None:
        """Apply a grant in a turn."""
        error: Exception | None = None
        if room not in self.opened:
            error = UnknownRoom(f"room {room}")
        elif isinstance(message, Grant) and message.exposure != self.connected_to:
            error = ConnectionError()
        else:
            self.taken[room] += 1
        is_open, is_retired = room in self.opened, room in self.retired
        self.sending.grant_applied(room, message, error, is_open=is_open, is_retired=is_retired)

    # ---- requests of both

    def fire(self, _: RoomId) -> None:
        for session, timer in list(self.timers):
            self.timers.discard((session, timer))
            session.fire(timer)

    def carry_out(self) -> None:
        for session in (self.sending, self.receiving):
            for request in session.take_requests():
                self.do(session, request)

    def do(self, session: Any, request: Any) -> None:
        match request:
            case StartTimer(timer):
                self.timers.add((session, timer))
            case StopTimer(timer):
                self.timers.discard((session, timer))
            case CancelRoom(room):
                assert room in ROOMS
                self.cancelled[room] += 1
            case SenderQuiet(room, generation):
                assert generation == Generation(room)
                assert room not in self.opened
                self.quiet[room] += 1
            case ApplyGrant(room, message):
                self.apply(room, message)
            case ApplyClose(room, generation):
                self.retire(room)
                session.close_applied(room, generation, None)
            case AwaitQuiet():
                self.awaited.append(request)
            case AnswerGrant(room, error):
                problem = NOT_CONNECTED if isinstance(error, ConnectionError) else REFUSED
                self.to_receiver.append(GrantAnswer(room, None if error is None else problem))
            case AnswerClose(room, generation, _):
                self.to_receiver.append(CloseAnswer(room, generation))
            case Unneeded():
                assert not self.receiving.is_needed
            case ConnectionMade() | ConnectionFailed() | CloseOverdue():
                pass
            case _:
                raise AssertionError(request)


STEPS = (
    *(Pair.connect, Pair.grant, Pair.claim, Pair.close, Pair.move, Pair.doubt),
    *(Pair.send, Pair.arrive, Pair.answer, Pair.lose, Pair.begin_again),
    *(Pair.open, Pair.retire, Pair.break_connection, Pair.become_quiet, Pair.fire),
)
CALM = (Pair.send, Pair.arrive, Pair.answer, Pair.become_quiet, Pair.fire)


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(ROOMS)), max_size=60))
def test_whatever_is_lost_each_grant_has_one_end_and_each_close_one_proof(
    steps: list[tuple[Any, RoomId]],
) -> None:
    pair = Pair()
    for step, room in steps:
        step(pair, room)
        for _ in range(3):
            pair.carry_out()
    for room in ROOMS:
        pair.retire(room)
    for _ in range(40):
        for step in CALM:
            step(pair, ROOMS[0])
            pair.carry_out()
    assert not pair.receiving.is_asking, "`zero-at-idle`: everything has an answer"
    assert pair.quiet == Counter(pair.closed), "`ack-is-proof`: once, for each closed room"
    assert not pair.early_grants, "`zero-at-idle`: the rooms of all grants have come and gone"
    for room in pair.granted - pair.closed:
        assert pair.taken[room] or pair.cancelled[room], "`room-ends`: it has its destination, or an end"
    assert all(count == 1 for count in pair.cancelled.values()), "`first-cause-wins`"
    assert not pair.cancelled.keys() & pair.claimed, "`mine-or-granted`: it goes on without its sender"
    for room in ROOMS:
        pair.receiving.over(room)
    requests = pair.receiving.take_requests()
    assert pair.receiving.is_needed == pair.receiving.is_known
    assert pair.receiving.is_known or requests[-1] == Unneeded()
