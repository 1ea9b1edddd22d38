"""How are failed rooms counted, the same way in every process?"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter

from services.rooms.errors import Cause, Reason

NOT_FAILURES: Final = frozenset({Reason.ANSWERED})


class FailedRooms:
    """`baton_rooms_failed_total`, or a counter beside it. Every reason has its series from the start, so that
    none appears late."""

    def __init__(self, text: str, registry: CollectorRegistry, name: str = "baton_rooms_failed") -> None:
        self._failed = Counter(f"{name}_total", text, ["reason"], registry=registry)
        for reason in Reason:
            if reason not in NOT_FAILURES:
                self._failed.labels(reason.value)

    def count(self, cause: Cause) -> None:
        if cause.reason not in NOT_FAILURES:
            self._failed.labels(cause.reason.value).inc()
