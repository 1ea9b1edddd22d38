"""Prometheus counter of failed rooms by reason, the same in every process."""

from prometheus_client import CollectorRegistry, Counter

from baton.rooms.errors import Cause
from baton.rooms.reasons import REASONS


class FailedRoomCounter:
    """Counter `baton_rooms_failed_total`, or another metric with the same `reason` label.

    Every counted reason has its series from the start, so that none appears late.
    """

    def __init__(self, text: str, registry: CollectorRegistry, name: str = "baton_rooms_failed") -> None:
        self._failed = Counter(f"{name}_total", text, ["reason"], registry=registry)
        for reason, facts in REASONS.items():
            if facts.is_counted:
                self._failed.labels(reason.value)

    def count(self, cause: Cause) -> None:
        if REASONS[cause.reason].is_counted:
            self._failed.labels(cause.reason.value).inc()
