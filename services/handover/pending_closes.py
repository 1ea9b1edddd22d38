"""Closes of rooms that one prefill worker has not answered yet.

The answer to a close is the only proof that the sender writes nothing more for its room (`ack-is-proof`). So
a close is sent again until the answer comes. A refused close is sent again after growing pauses.
"""

from dataclasses import dataclass
from typing import Final

from baton.handover.requests import StartTimer, StopTimer
from baton.handover.session_messages import SessionRequest, Timer, TimerKind
from baton.ids import Generation, RoomId

PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 2.0
"""Longest pause in seconds before a refused close is sent again."""
OVERDUE_S: Final = 3.0
"""Seconds without an answer after which a close is reported as overdue, once for each room."""


@dataclass(slots=True)
class _PendingClose:
    generation: Generation
    pause_s: float = PAUSE_MIN_S
    problem: str = "the sender has not answered"


class PendingCloses:
    """Closes to one prefill worker without an answer, at most one for each room. A close asks the worker to
    stop writing for the room."""

    def __init__(self, requests: list[SessionRequest]) -> None:
        """Start without closes. `requests`: list to which requests for timers are added."""
        self._requests = requests
        self._closes: dict[RoomId, _PendingClose] = {}
        self._to_send: dict[RoomId, None] = {}

    def __len__(self) -> int:
        return len(self._closes)

    @property
    def are_due(self) -> bool:
        """Whether at least one close is to be sent now."""
        return bool(self._to_send)

    def add(self, room: RoomId, generation: Generation) -> None:
        """Send the close of a room, and repeat it until the sender answers it."""
        self._requests.append(StartTimer(Timer(TimerKind.CLOSE_OVERDUE, room), OVERDUE_S))
        self._closes[room] = _PendingClose(generation)
        self._to_send[room] = None

    def take_due(self) -> list[tuple[RoomId, Generation]]:
        """Return the closes that are to be sent now, and mark them as sent."""
        due, self._to_send = self._to_send, {}
        return [(room, self._closes[room].generation) for room in due]

    def send_again(self, room: RoomId | None = None) -> None:
        """Make the close of a room due again, if it is still without an answer. None: make all closes due,
        because the stream that carried them ended."""
        self._to_send.update({each: None for each in self._closes if room in (None, each)})

    def answered(self, room: RoomId, generation: Generation, refusal: str | None) -> bool:
        """Return whether the sender's answer proves that it writes nothing more for the room, and forget the
        close then.

        `refusal`: text of a refusal, after which the close is sent again. False for an answer to a close that
        was never sent, or was forgotten meanwhile.
        """
        close = self._closes.get(room)
        if close is None or close.generation != generation or room in self._to_send:
            return False  # no proof (`ack-is-proof`)
        if refusal is not None:
            close.problem = refusal
            self._requests.append(StartTimer(Timer(TimerKind.CLOSE_AGAIN, room), close.pause_s))
            close.pause_s = min(close.pause_s * 2, PAUSE_MAX_S)
            return False
        self.forget(room)
        return True

    def problem(self, room: RoomId) -> str | None:
        """Return why the close of a room has no answer. None if no close of it is pending."""
        close = self._closes.get(room)
        return None if close is None else close.problem

    def forget(self, room: RoomId) -> None:
        """Stop repeating the close of a room, if it has one without an answer."""
        self._to_send.pop(room, None)
        if self._closes.pop(room, None) is not None:
            self._requests.append(StopTimer(Timer(TimerKind.CLOSE_OVERDUE, room)))
            self._requests.append(StopTimer(Timer(TimerKind.CLOSE_AGAIN, room)))
