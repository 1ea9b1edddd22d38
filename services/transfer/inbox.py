"""Which notices have arrived and wait to be taken?

A notice is a wake-up that may be lost, so that everything here has a bound and nothing has a retry.
"""

from collections import deque
from collections.abc import Iterable

from services.transfer.bounds import AGENT_CHARS_MAX
from services.transfer.interface import (
    NOTICE_BYTES_MAX,
    NOTICES_PER_CALL_MAX,
    NOTICES_WAITING_MAX,
    TransferError,
)


class Inbox:
    def __init__(self) -> None:
        self._waiting: deque[tuple[str, bytes]] = deque()

    def arrived(self, agent: str, payloads: Iterable[bytes]) -> None:
        """Keep what fits; a payload past NOTICE_BYTES_MAX, or under a name past AGENT_CHARS_MAX, was not sent
        by our own kind, and is dropped."""
        if len(agent) > AGENT_CHARS_MAX:
            return
        for payload in payloads:
            if len(payload) <= NOTICE_BYTES_MAX and len(self._waiting) < NOTICES_WAITING_MAX:
                self._waiting.append((agent, payload))

    def take(self) -> list[tuple[str, bytes]]:
        """At most NOTICES_PER_CALL_MAX, oldest first."""
        return [self._waiting.popleft() for _ in range(min(len(self._waiting), NOTICES_PER_CALL_MAX))]


def check_notice(payload: bytes) -> None:
    """Raises TransferError if `payload` is too long to be sent."""
    if len(payload) > NOTICE_BYTES_MAX:
        raise TransferError(f"a notice of {len(payload)} bytes; at most {NOTICE_BYTES_MAX} are sent")
