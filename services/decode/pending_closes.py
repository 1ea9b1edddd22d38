"""Closes of rooms that one prefill worker has not answered yet.

The answer to a close is the only proof that the sender writes nothing more for its room (`ack-is-proof`). So
a close is sent again until the answer comes. A refused close is sent again after growing pauses.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.ids import Generation, RoomId
from baton.runtime.logging import Log
from baton.wire.baton.v1 import inference_pb2
from baton.wire.errors import refusal_from_wire

log = Log(__name__)

PAUSE_MIN_S: Final = 0.05
PAUSE_MAX_S: Final = 2.0
"""Longest pause in seconds before a refused close is sent again."""
WARNING_S: Final = 3.0
"""Seconds without an answer after which a log warning names the sender that keeps a room's memory from reuse.
It is logged once for each room."""


@dataclass(slots=True)
class _Close:
    request: inference_pb2.CloseRequest
    warning: asyncio.TimerHandle
    pause_s: float = PAUSE_MIN_S
    problem: str = "the sender has not answered"


class PendingCloses:
    """Closes to one prefill worker without an answer, at most one for each room. A close asks the worker to
    stop writing for the room. Used from one event loop."""

    def __init__(
        self,
        sender: str,
        on_due: Callable[[], None],
        on_quiet: Callable[[inference_pb2.CloseRequest], None],
    ) -> None:
        """Start without closes. `sender`: name of the prefill worker, for the log. `on_due`: called when a
        close is to be sent. `on_quiet`: called with each close that the sender accepted."""
        self._sender = sender
        self._on_due = on_due
        self._on_quiet = on_quiet
        self._closes: dict[RoomId, _Close] = {}
        self._to_send: dict[RoomId, None] = {}

    def __len__(self) -> int:
        return len(self._closes)

    @property
    def are_due(self) -> bool:
        """Whether at least one close is to be sent now."""
        return bool(self._to_send)

    def add(self, room: RoomId, generation: Generation) -> None:
        """Send the close of a room, and repeat it until the sender answers it."""
        warning = asyncio.get_running_loop().call_later(WARNING_S, self._warn, room)
        request = inference_pb2.CloseRequest(room=room, generation=generation)
        self._closes[room] = _Close(request, warning)
        self._send(room)

    def take_due(self) -> list[inference_pb2.CloseRequest]:
        """Return the closes that are to be sent now, and mark them as sent."""
        due, self._to_send = self._to_send, {}
        return [self._closes[room].request for room in due]

    def send_again(self) -> None:
        """Make all closes due, because the stream that carried them ended. The caller opens the next
        stream."""
        self._to_send.update(dict.fromkeys(self._closes))

    def answered(self, reply: inference_pb2.CloseReply) -> None:
        """Process the sender's answer to a close. Does nothing if the close was never sent, or was forgotten
        meanwhile."""
        room = RoomId(reply.room)
        close = self._closes.get(room)
        if close is None or close.request.generation != reply.generation or room in self._to_send:
            return  # no proof (`ack-is-proof`)
        if reply.HasField("refused"):
            close.problem = str(refusal_from_wire(reply.refused))
            asyncio.get_running_loop().call_later(close.pause_s, self._send, room)
            close.pause_s = min(close.pause_s * 2, PAUSE_MAX_S)
            return
        self.forget(room)
        self._on_quiet(close.request)

    def forget(self, room: RoomId) -> None:
        """Stop repeating the close of a room, if it has one without an answer."""
        close = self._closes.pop(room, None)
        self._to_send.pop(room, None)
        if close is not None:
            close.warning.cancel()

    def clear(self) -> None:
        """Forget all closes, so that none is sent again."""
        for room in list(self._closes):
            self.forget(room)

    def _send(self, room: RoomId) -> None:
        if room in self._closes:
            self._to_send[room] = None
            self._on_due()

    def _warn(self, room: RoomId) -> None:
        close = self._closes.get(room)
        if close is not None:
            log.warning("close not answered", room=room, worker=self._sender, cause=close.problem)
