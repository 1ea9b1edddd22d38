"""What does the bootstrap count? Gauges are read from the registry when they are scraped: none can drift."""

from collections import Counter as Tally
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.rooms.errors import Cause, Reason
from services.rooms.phases import Side
from services.rooms.registry import Registry, RoomPhase, WorkerState
from services.rooms.retry import RETRIED
from services.runtime.failed_rooms import FailedRooms


class BootstrapMetrics:
    """Injected registry: tests are isolated."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._failed = FailedRooms("Rooms that failed, by first cause.", registry)
        self._renewals = Counter(
            "baton_lease_renewals_total", "Leases renewed by workers.", registry=registry
        )

        self._retries = Counter(
            "baton_request_retries_total",
            "Requests that went on in a new room, by what the last one failed of.",
            ["reason"],
            registry=registry,
        )
        for reason in sorted(RETRIED, key=lambda each: each.value):
            self._retries.labels(reason.value)

    def room_failed(self, cause: Cause) -> None:
        self._failed.count(cause)

    def retried(self, reason: Reason) -> None:
        self._retries.labels(reason.value).inc()

    def lease_renewed(self) -> None:
        self._renewals.inc()


class RegistryCollector(Collector):
    """The registry's state at the moment of a scrape."""

    def __init__(self, registry: Registry, queued: Callable[[], int]) -> None:
        self._registry = registry
        self._queued = queued

    def collect(self) -> Iterator[GaugeMetricFamily]:
        rooms = GaugeMetricFamily("baton_rooms", "Rooms that are not retired, by phase.", labels=["phase"])
        phases = Tally(entry.phase for entry in self._registry.rooms())
        for phase in RoomPhase:
            if phase is not RoomPhase.RETIRED:
                rooms.add_metric([phase.value], phases[phase])
        yield rooms
        workers = GaugeMetricFamily("baton_workers", "Workers with a lease.", labels=["side", "state"])
        states = Tally((worker.facts.side, worker.state) for worker in self._registry.workers())
        for side in Side:
            for state in WorkerState:
                workers.add_metric([side.value, state.value], states[side, state])
        yield workers
        yield GaugeMetricFamily(
            "baton_admission_queue_requests", "Requests waiting for a pair of workers.", value=self._queued()
        )
