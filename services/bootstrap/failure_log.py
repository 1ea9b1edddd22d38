"""Rate-limited log lines about failed rooms.

There is one line for each reason and second, with the number of failures since the line before. Timelines and
metrics have all failures.
"""

from typing import Final

from baton.ids import RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.reasons import REASONS
from baton.runtime.clock import Clock
from baton.runtime.log_throttle import LogThrottle
from baton.runtime.logging import Log

log = Log(__name__)

EVERY_S: Final = 1.0


class FailureLog:
    """Log of failed rooms, limited by reason. Used from one event loop. Bounded: one entry for each
    reason."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seldom: dict[Reason, LogThrottle] = {}

    def log(self, room: RoomId, cause: Cause) -> None:
        """Log that a room ended early, unless a line about the same reason was just written."""
        reason = cause.reason.value
        if not REASONS[cause.reason].is_attempt:
            log.debug("room ended without a failure", room=room, reason=reason, cause=cause.text)
            return
        if not REASONS[cause.reason].is_failure:
            log.debug("room failed", room=room, reason=reason, cause=cause.text)
            return
        if cause.reason not in self._seldom:
            self._seldom[cause.reason] = LogThrottle(EVERY_S, lambda: self._clock.now_ms() / 1000)
        if rooms := self._seldom[cause.reason].count():
            more = rooms - 1 or None
            log.warning("room failed", room=room, reason=reason, cause=cause.text, more=more)
        else:
            log.debug("room failed", room=room, reason=reason, cause=cause.text)

    def log_rest(self) -> None:
        """Log the number of failures about which no line was written yet. To be called regularly."""
        for reason, seldom in self._seldom.items():
            if rooms := seldom.count(0):
                log.warning("more rooms failed", reason=reason.value, rooms=rooms)
