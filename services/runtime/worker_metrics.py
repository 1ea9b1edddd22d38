"""What does every worker count, whatever its role?

Gauges are set once a turn from a census, never per event, so that they cannot drift; at idle each is
back where it started (`zero-at-idle`).
"""

from collections.abc import Mapping
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.pages.pool import PageState
from services.rooms.errors import Cause
from services.rooms.phases import Phase
from services.rooms.room import Room
from services.runtime.failed_rooms import FailedRooms

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_AGREEMENT_SECONDS = (0.00001, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1)

Member = TypeVar("Member", Phase, PageState)


class _Census(Generic[Member]):
    """A gauge by the members of a closed set. What a turn does not change costs nothing here."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._gauges: dict[Member, Gauge] = {}
        self._told: Mapping[Member, int] = {}

    def record(self, census: Mapping[Member, int]) -> None:
        if census == self._told:
            return
        for member, count in census.items():
            if member not in self._gauges:
                self._gauges[member] = self._gauge.labels(member.value)
            if count != self._told.get(member):
                self._gauges[member].set(count)
        self._told = census


class WorkerMetrics:
    """Injected registry: tests are isolated."""

    def __init__(self, registry: CollectorRegistry) -> None:
        rooms = Gauge("baton_rooms", "Rooms held, by phase.", ["phase"], registry=registry)
        pages = Gauge("baton_kv_pages", "KV pages, by state.", ["state"], registry=registry)
        slots = Gauge("baton_metadata_slots", "Metadata slots, by state.", ["state"], registry=registry)
        self._rooms: _Census[Phase] = _Census(rooms)
        self._pages: _Census[PageState] = _Census(pages)
        self._slots: _Census[PageState] = _Census(slots)
        self._reused = Counter(
            "baton_prefix_reused_tokens_total",
            "Tokens whose KV was in the pages already when their room began.",
            registry=registry,
        )
        self._queried = Counter(
            "baton_prefix_queried_tokens_total", "Tokens of rooms that began.", registry=registry
        )
        self._failed = FailedRooms("Rooms that failed here, by reason.", registry)
        self._phases = Histogram(
            "baton_room_phase_seconds",
            "Time that rooms spent in a phase.",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._dropped = Counter(
            "baton_rooms_unknown_news_total", "News about rooms not held here, dropped.", registry=registry
        )
        self._dropped_seen = 0
        self._agreement = Histogram(
            "baton_agreement_seconds",
            "Time of a turn's agreement.",
            buckets=_AGREEMENT_SECONDS,
            registry=registry,
        )
        self._renewals = Counter(
            "baton_lease_renewals_total", "Leases renewed at the bootstrap.", registry=registry
        )
        self._turns = Counter("baton_turns_total", "Turns of the worker's loop.", registry=registry)

    def record_rooms(self, census: Mapping[Phase, int], dropped: int) -> None:
        """`dropped`: news about unknown rooms, since start."""
        self._rooms.record({phase: count for phase, count in census.items() if phase is not Phase.RETIRED})
        self._dropped.inc(dropped - self._dropped_seen)
        self._dropped_seen = dropped

    def record_memory(self, pages: Mapping[PageState, int], slots: Mapping[PageState, int]) -> None:
        self._pages.record(pages)
        self._slots.record(slots)

    def reused(self, tokens: int, of: int) -> None:
        """A room began: so many of its tokens need not be computed, or received."""
        self._reused.inc(tokens)
        self._queried.inc(of)

    def record_turn(self, agreement_s: float) -> None:
        self._turns.inc()
        self._agreement.observe(agreement_s)

    def room_failed(self, cause: Cause) -> None:
        self._failed.count(cause)

    def room_retired(self, room: Room) -> None:
        for phase, spent_ms in room.phase_ms.items():
            self._phases.labels(phase.value).observe(spent_ms / 1000)

    def lease_renewed(self) -> None:
        self._renewals.inc()
