"""Decode worker's half of its session with one prefill worker.

The session carries the connects, grants and closes of many rooms. It has no stream and no clock: messages
are taken from it, answers and ends of streams go into it, and requests to its driver come out of
`take_requests`. No deadline runs while the sender has not answered: as long as the stream lives, the sender
is busy and not lost (`live-is-not-lost`). Only the end of the stream shows the waiting rooms that the sender
is lost.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from baton.handover.pending_closes import PendingCloses
from baton.handover.requests import ClaimRoom, Grant, StartTimer
from baton.handover.sender_problem import ProblemKind, SenderProblem
from baton.handover.session_messages import (
    Answer,
    CancelRoom,
    CloseAnswer,
    CloseOverdue,
    ConnectAnswer,
    ConnectionFailed,
    ConnectionMade,
    GrantAnswer,
    SenderQuiet,
    SessionRequest,
    Timer,
    TimerKind,
    Unneeded,
)
from baton.ids import Generation, Incarnation, RoomId
from baton.rooms.errors import Cause, Reason

CONNECT_PAUSE_S: Final = 0.05
"""Seconds before the next connect to a prefill worker that refused one temporarily."""
OPEN_PAUSE_MIN_S: Final = 0.05
OPEN_PAUSE_MAX_S: Final = 2.0
"""Longest pause in seconds before a broken stream is opened anew. It grows while no message arrives."""
UNNAMED_PAUSE_MIN_S: Final = 0.001
UNNAMED_PAUSE_MAX_S: Final = 0.1
"""Longest pause in seconds before a new stream, while the prefill worker does not know this worker yet."""


@dataclass(slots=True)
class _PendingGrant:
    """Unanswered grant, or unanswered notice that this worker computes the prompt itself (`ClaimRoom`)."""

    message: Grant | ClaimRoom
    is_waiting: bool = False
    """Whether the grant is sent only when the prefill worker has connected anew."""
    was_refused: bool = False
    """Whether the grant was refused once for lack of a connection."""


class ReceivingSession:
    """Session with one incarnation of a prefill worker. Its size is bounded by the rooms that this worker can
    have."""

    def __init__(self, sender: str, exposure: Incarnation) -> None:
        """Make a session in which nothing was sent.

        `sender`: name of the prefill worker, for texts. `exposure`: id under which rank 0 of this worker
        exposes its memory. 0 if it does not expose any yet.
        """
        self.is_connected = False
        """Whether the sender is connected to the present exposure of this worker's memory, and the connection
        is not in doubt."""
        self.is_known = False
        """Whether the sender knows an exposure of this memory, so that it has to learn the next one, too."""
        self.is_connecting = False
        self._sender = sender
        self._exposure = exposure
        self._sent_exposure: Incarnation | None = None
        """Exposure that the last connect message named."""
        self._waiting: dict[RoomId, None] = {}
        """Rooms for which the prefill worker has to be connected first."""
        self._refused_s = 0.0
        """Seconds for which the sender has refused to connect, as a sum of pauses. Time without an answer
        does not count."""
        self._grants: dict[RoomId, _PendingGrant] = {}
        self._requests: list[SessionRequest] = []
        self.closes = PendingCloses(self._requests)
        self._connect_is_due = False
        self._grants_to_send: dict[RoomId, None] = {}
        self._is_answered = False
        """Whether any message has come on the present stream."""
        self._pause_s = self._unnamed_pause_s = 0.0

    @property
    def is_asking(self) -> bool:
        """Whether a connect or a grant to the prefill worker has no answer yet."""
        return self.is_connecting or bool(self._grants)

    @property
    def is_due(self) -> bool:
        """Whether a message to the prefill worker is to be sent."""
        return self._connect_is_due or bool(self._grants_to_send) or self.closes.are_due

    @property
    def is_needed(self) -> bool:
        return self.is_known or self.is_asking or len(self.closes) > 0

    def take_requests(self) -> list[SessionRequest]:
        """Return the requests since the last call, in the order in which they are to be carried out."""
        requests = self._requests[:]
        self._requests.clear()
        return requests

    # ---- commands

    def connect(self, room: RoomId) -> bool:
        """Make this worker's memory known to the sender, for a room. Return True if it already is. Otherwise
        `ConnectionMade` follows, or `CancelRoom` for every room that waited."""
        if self.is_connected:
            return True
        self._waiting[room] = None
        self._want_connection()
        return False

    def grant(self, message: Grant | ClaimRoom) -> None:
        """Send a room's grant, or the notice that this worker computes the room's prompt. `CancelRoom`
        follows if the sender does not take the grant."""
        if isinstance(message, ClaimRoom):
            self._waiting.pop(message.room, None)
        self._grants[message.room] = _PendingGrant(message)
        self._grants_to_send[message.room] = None

    def close(self, room: RoomId, generation: Generation) -> None:
        """Repeat the close of a room until `SenderQuiet` follows."""
        self._forget_grant(room)
        self._waiting.pop(room, None)
        self.closes.add(room, generation)

    def over(self, room: RoomId) -> None:
        """Stop all messages about a room."""
        self._waiting.pop(room, None)
        self._forget_grant(room)
        self.closes.forget(room)
        self._let_go()

    def doubt(self) -> None:
        """Make the next room connect anew, because the connection may be broken."""
        self.is_connected = False

    def exposed_anew(self, exposure: Incarnation) -> None:
        """Send the new exposure to a sender that knew an older one, with or without a room for it
        (`room-ends`)."""
        self._exposure = exposure
        self.is_connected = False
        if self.is_known:
            self._want_connection()

    def fire(self, timer: Timer) -> None:
        """Continue after the time of a timer is over."""
        match timer.kind:
            case TimerKind.CONNECT_AGAIN:
                self._connect_is_due = self._connect_is_due or self.is_connecting
            case TimerKind.CLOSE_AGAIN:
                self.closes.send_again(timer.room)
            case TimerKind.CLOSE_OVERDUE:
                problem = self.closes.problem(timer.room)
                if problem is not None:
                    self._requests.append(CloseOverdue(timer.room, problem))

    # ---- messages to the sender

    def take_connect(self) -> bool:
        """Return whether a connect with the present exposure is to be sent now, and mark it as sent."""
        if not self._connect_is_due:
            return False
        self._connect_is_due = False
        if self._sent_exposure != self._exposure:
            self._sent_exposure, self._refused_s = self._exposure, 0.0
        return True

    def take_grant(self) -> Grant | ClaimRoom | None:
        """Return the next grant that is to be sent now, and mark it as sent."""
        if not self._grants_to_send:
            return None
        room = next(iter(self._grants_to_send))
        del self._grants_to_send[room]
        return self._grants[room].message

    def take_closes(self) -> list[tuple[RoomId, Generation]]:
        """Return the closes that are to be sent now, and mark them as sent. Grants go first."""
        return [] if self._grants_to_send else self.closes.take_due()

    # ---- answers of the sender

    def receive(self, answers: Iterable[Answer], timeout_s: float) -> None:
        """Process the answers of one message. `timeout_s`: longest time in seconds for which the sender may
        refuse a connection temporarily."""
        self._is_answered = True
        for answer in answers:
            match answer:
                case ConnectAnswer():
                    self._connect_answered(answer, timeout_s)
                case GrantAnswer():
                    self._grant_answered(answer)
                case CloseAnswer(room, generation, problem):
                    if self.closes.answered(room, generation, None if problem is None else problem.text):
                        self._requests.append(SenderQuiet(room, generation))
        self._let_go()

    def stream_ended(self, problem: SenderProblem) -> float:
        """Process the end of a stream. Its unanswered messages are sent again on the next stream, or fail.
        Return the pause in seconds before the next stream."""
        if self._is_answered:
            self._pause_s = self._unnamed_pause_s = 0.0
        self._is_answered = False
        if problem.kind is ProblemKind.SEND_AGAIN:
            pause_s = min(max(self._unnamed_pause_s * 2, UNNAMED_PAUSE_MIN_S), UNNAMED_PAUSE_MAX_S)
            self._unnamed_pause_s = pause_s
            self._grants_to_send.update(
                {room: None for room, grant in self._grants.items() if not grant.is_waiting}
            )
        else:
            pause_s = min(max(self._pause_s * 2, OPEN_PAUSE_MIN_S), OPEN_PAUSE_MAX_S)
            self._pause_s = pause_s
            self._broke(problem)
        if not (self.is_known or self._waiting or self._grants):
            self.is_connecting = False  # the rooms that needed it have ended (`zero-at-idle`)
        self._connect_is_due = self.is_connecting
        self.closes.send_again()
        self._let_go()
        return pause_s

    def _broke(self, problem: SenderProblem) -> None:
        for room, grant in [each for each in self._grants.items() if not each[1].is_waiting]:
            if isinstance(grant.message, ClaimRoom):
                self._grants_to_send[room] = None  # its answer is not needed, but the sender waits for it
            else:
                self._grant_failed(room, problem)
        if problem.kind is ProblemKind.OTHER_PROCESS:
            self.is_known = False  # the process that knew it is gone
        if self.is_connecting:
            self._connection_failed(problem)
            self.is_connecting = self.is_known  # it knows an older exposure, and has to learn of this one

    # ---- connecting

    def _want_connection(self) -> None:
        if not self.is_connecting:
            self.is_connecting = self._connect_is_due = True
            self._refused_s = 0.0

    def _connect_answered(self, answer: ConnectAnswer, timeout_s: float) -> None:
        if not self.is_connecting or answer.exposure != self._sent_exposure:
            return
        if self._sent_exposure != self._exposure:  # the memory was moved meanwhile
            self._connect_is_due = True
        elif answer.problem is None:
            self._connection_made()
        elif answer.problem.may_pass and self._refused_s < timeout_s:
            self._refused_s += CONNECT_PAUSE_S
            self._requests.append(StartTimer(Timer(TimerKind.CONNECT_AGAIN), CONNECT_PAUSE_S))
        else:
            self._connection_failed(answer.problem)

    def _connection_made(self) -> None:
        self.is_connecting, self.is_connected, self.is_known = False, True, True
        self._requests.append(ConnectionMade(bool(self._waiting)))
        self._waiting.clear()
        for room, grant in self._grants.items():
            if grant.is_waiting:
                grant.is_waiting, grant.was_refused = False, True
                self._grants_to_send[room] = None

    def _connection_failed(self, problem: SenderProblem) -> None:
        self.is_connecting = self.is_connected = self._connect_is_due = False
        refused = [room for room, grant in self._grants.items() if grant.is_waiting]
        is_shut_out = problem.kind is ProblemKind.NOT_QUIET and bool(self._waiting or refused)
        self._requests.append(ConnectionFailed(problem, is_shut_out))
        text = f"decode cannot connect to prefill worker {self._sender}: {problem.text}"
        waiting, self._waiting = self._waiting, {}
        for room in waiting:
            self._cancel(room, Reason.CONNECT_FAILED, text)
        for room in refused:
            self._forget_grant(room)
            self._cancel(room, problem.reason, text)

    # ---- grants

    def _grant_answered(self, answer: GrantAnswer) -> None:
        room, problem = answer.room, answer.problem
        grant = self._grants.get(room)
        if grant is None or grant.is_waiting or room in self._grants_to_send:
            return  # not wanted any more, or never sent
        if problem is None or isinstance(grant.message, ClaimRoom):
            del self._grants[room]
        elif problem.kind is ProblemKind.NOT_CONNECTED and not grant.was_refused:
            # The connection broke, or leads to memory that was moved: connect anew (`reconnect`).
            grant.is_waiting, self.is_connected = True, False
            self._want_connection()
        else:
            self._grant_failed(room, problem)

    def _grant_failed(self, room: RoomId, problem: SenderProblem) -> None:
        """Cancel the room of a failed grant.

        If the sender refused it, it does not have the room any more, or cannot take it. If it did not answer,
        it may have the grant, so the room's memory is quarantined until its close is answered. The cause says
        whether the sender is gone.
        """
        self._forget_grant(room)
        text = f"prefill worker {self._sender} did not take the destination: {problem.text}"
        self._cancel(room, problem.reason, text)

    def _forget_grant(self, room: RoomId) -> None:
        self._grants.pop(room, None)
        self._grants_to_send.pop(room, None)

    def _cancel(self, room: RoomId, reason: Reason, text: str) -> None:
        self._requests.append(CancelRoom(room, Cause(reason, text)))

    def _let_go(self) -> None:
        if not self.is_needed:
            self._requests.append(Unneeded())
