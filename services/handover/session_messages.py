"""Answers, requests and timers of a pair's session, as values.

A pair is a decode worker and a prefill worker, and each has one half of the session. A half has no clock. It
asks its driver to start a timer, and the driver calls `fire` when the time is over.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from baton.handover.requests import StartTimer, StopTimer
from baton.handover.sender_problem import SenderProblem
from baton.ids import Generation, Incarnation, RoomId
from baton.rooms.errors import Cause

NO_ROOM: Final = RoomId(0)


class TimerKind(Enum):
    CONNECT_AGAIN = "connect again"
    CLOSE_AGAIN = "close again"
    CLOSE_OVERDUE = "close overdue"
    EARLY_GRANT = "early grant"


@dataclass(frozen=True, slots=True)
class Timer:
    """Name of a timer. A session has at most one of each name."""

    kind: TimerKind
    room: RoomId = NO_ROOM
    """Room that the timer is about. NO_ROOM for the whole session."""


TimerRequest: TypeAlias = StartTimer[Timer] | StopTimer[Timer]


@dataclass(frozen=True, slots=True)
class ConnectAnswer:
    """Answer to a connect. `problem`: None if the sender is connected to this exposure."""

    exposure: Incarnation
    problem: SenderProblem | None = None


@dataclass(frozen=True, slots=True)
class GrantAnswer:
    """Answer to a grant or a claim. `problem`: None if the sender took it."""

    room: RoomId
    problem: SenderProblem | None = None


@dataclass(frozen=True, slots=True)
class CloseAnswer:
    """Answer to a close. `problem`: None if the sender writes nothing more for this generation."""

    room: RoomId
    generation: Generation
    problem: SenderProblem | None = None


Answer: TypeAlias = ConnectAnswer | GrantAnswer | CloseAnswer


@dataclass(frozen=True, slots=True)
class ConnectionMade:
    """Request to notify every rank that the sender knows this worker's memory, if `rooms_wait` for it."""

    rooms_wait: bool


@dataclass(frozen=True, slots=True)
class ConnectionFailed:
    """Request to note that the sender cannot connect.

    `is_shut_out`: whether rooms end because the sender sees no end of its writes. Only a revocation of this
    worker's memory lets the sender connect then.
    """

    problem: SenderProblem
    is_shut_out: bool


@dataclass(frozen=True, slots=True)
class CancelRoom:
    """Request to cancel a room on every rank."""

    room: RoomId
    cause: Cause


@dataclass(frozen=True, slots=True)
class SenderQuiet:
    """Request to notify every rank that the sender writes nothing more for this generation of the room."""

    room: RoomId
    generation: Generation


@dataclass(frozen=True, slots=True)
class CloseOverdue:
    """Request to report that the sender has not answered the close of a room, and why."""

    room: RoomId
    problem: str


@dataclass(frozen=True, slots=True)
class Unneeded:
    """Request to end the session, because no room needs it and the sender knows nothing of this memory."""


SessionRequest: TypeAlias = (
    ConnectionMade | ConnectionFailed | CancelRoom | SenderQuiet | CloseOverdue | Unneeded | TimerRequest
)
