"""Prometheus metrics of every worker.

Gauges are set once a turn from a census, and never by single events, so that they cannot drift. At idle each
is back at its start (`zero-at-idle`). Every series exists from the start of the process.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.pages.pool import PageState
from baton.rooms.errors import Cause
from baton.rooms.phases import Moves, Phase
from baton.rooms.queues import RoomQueue
from baton.telemetry.failed_room_counter import FailedRoomCounter
from baton.telemetry.histogram import LabelledHistogram, LoopHistogram

_SECONDS: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
)
_STEP_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_AGREEMENT_SECONDS: Final = (
    0.00001,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.05,
    0.25,
    1,
)

Member = TypeVar("Member", Phase, PageState, RoomQueue, str)
State = TypeVar("State", Phase, PageState)


class Counts(Generic[Member]):
    """Prometheus gauges that count things by kind, with one gauge for each kind. Only gauges whose value
    changed are set."""

    def __init__(self, gauges: Mapping[Member, Gauge]) -> None:
        self._gauges: Mapping[Member, Gauge] = gauges
        self._recorded: Mapping[Member, int] = {}

    def record(self, census: Mapping[Member, int]) -> None:
        if census == self._recorded:
            return
        for member, gauge in self._gauges.items():
            if census[member] != self._recorded.get(member):
                gauge.set(census[member])
        self._recorded = census


def _labelled(gauge: Gauge, members: Iterable[State]) -> Counts[State]:
    return Counts({each: gauge.labels(each.value) for each in members})


class _Total:
    """Prometheus counter that is set from a total which other code counts."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen = 0

    def record(self, count: int) -> None:
        if count != self._seen:
            self._counter.inc(count - self._seen)
            self._seen = count


class LeaseMetrics:
    """Prometheus metrics of a worker's leases at the bootstraps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._renewals = counter(
            "baton_lease_renewals_total", "Renewals of this worker's lease at the bootstrap."
        )
        self._failures = counter(
            "baton_lease_failures_total", "Registrations and lease renewals at the bootstrap that failed."
        )
        self._leases = gauge("baton_bootstrap_leases", "Bootstraps at which this worker has a lease.")
        self._known = gauge(
            "baton_bootstraps_known", "Bootstraps that --bootstrap names, by the last look-up."
        )

    def watch(self, census: Callable[[], tuple[int, int]]) -> None:
        """Show the leases of the worker from now on. `census`: returns the number of leases that it has, and
        of bootstraps that it knows."""
        self._leases.set_function(lambda: census()[0])
        self._known.set_function(lambda: census()[1])

    def tried(self, has_lease: bool) -> None:
        """Count one attempt to renew a lease. `has_lease`: whether the worker has it."""
        (self._renewals if has_lease else self._failures).inc()


ORPHANS: Final = (
    ("baton_rooms_orphaned_total", "Rooms that went on when their bootstrap's stream broke."),
    ("baton_rooms_adopted_total", "Rooms that another bootstrap has adopted and reads."),
)


class WorkerMetrics:
    """Prometheus metrics that prefill and decode workers have in common."""

    def __init__(
        self, moves: Moves, queues: Mapping[RoomQueue, tuple[str, str]], registry: CollectorRegistry
    ) -> None:
        """Make all metrics and register them in `registry`. `moves`: phase changes that this side's rooms can
        make. `queues`: name and help text of each queue's gauge."""
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        phases = sorted({phase for phase, _ in moves}, key=list(Phase).index)
        rooms = gauge("baton_rooms", "Rooms on this worker, by phase.", ["phase"])
        pages = gauge("baton_kv_pages", "KV pages, by state.", ["state"])
        slots = gauge("baton_metadata_slots", "Metadata slots, by state.", ["state"])
        self._queues = Counts({queue: gauge(*name_and_help) for queue, name_and_help in queues.items()})
        self._rooms = _labelled(rooms, phases)
        self._pages = _labelled(pages, PageState)
        self._slots = _labelled(slots, [state for state in PageState if state is not PageState.CACHED])
        self._reused = counter(
            "baton_prefix_reused_tokens_total",
            "Tokens whose KV was in this worker's prefix cache when their room began.",
        )
        self._queried = counter(
            "baton_prefix_queried_tokens_total",
            "Prompt tokens of rooms that began, all of which were looked up in the prefix cache.",
        )
        self._failed = FailedRoomCounter("Rooms that failed on this worker, by reason.", registry)
        spent = LabelledHistogram(
            "baton_room_phase_seconds",
            "Time that retired rooms had spent in each phase.",
            _SECONDS,
            "phase",
            (phase.value for phase in phases),
            registry,
        )
        self._phases = {phase: spent.of(phase.value) for phase in phases}
        self._unknown = _Total(
            counter(
                "baton_rooms_unknown_news_total",
                "Messages that were dropped, because this worker does not have their room, or no longer, or"
                " another bootstrap opened it.",
            )
        )
        self._orphaned, self._adopted = (_Total(counter(*name_and_help)) for name_and_help in ORPHANS)
        self._lines = _Total(
            counter(
                "baton_timeline_lines_dropped_total",
                "Lines of rooms' timelines that were lost on the way to the bootstrap.",
            )
        )
        self._step = LoopHistogram(
            "baton_step_seconds",
            "Time from the start of an engine step until the worker's loop saw its end.",
            _STEP_SECONDS,
            registry,
        )
        self._agreement = LoopHistogram(
            "baton_agreement_seconds", "Time for the ranks to agree, per turn.", _AGREEMENT_SECONDS, registry
        )
        self.leases = LeaseMetrics(registry)
        self._turns = counter("baton_turns_total", "Turns (iterations) of the worker's loop.")

    def record_rooms(self, census: Mapping[Phase, int], unknown: int) -> None:
        """Set the gauges of the number of rooms by phase. `unknown`: number of messages about rooms that this
        worker does not have, since the start."""
        self._rooms.record(census)
        self._unknown.record(unknown)

    def record_orphans(self, orphaned: int, adopted: int) -> None:
        """Set the counts of rooms whose router's stream broke, and of rooms that another router has
        adopted, both since the start."""
        self._orphaned.record(orphaned)
        self._adopted.record(adopted)

    def record_queues(self, queues: Mapping[RoomQueue, int]) -> None:
        self._queues.record(queues)

    def record_memory(self, pages: Mapping[PageState, int], slots: Mapping[PageState, int]) -> None:
        self._pages.record(pages)
        self._slots.record(slots)

    def reused(self, tokens: int, of: int) -> None:
        """Count how many prompt tokens of a room were cached when it began. `tokens`: number of cached
        tokens. `of`: number of all its prompt tokens."""
        self._reused.inc(tokens)
        self._queried.inc(of)

    def record_turn(self, agreement_s: float, lines_dropped: int) -> None:
        """Record one turn of the loop. `agreement_s`: seconds for which the ranks' vote took.
        `lines_dropped`: number of timeline lines lost since the start."""
        self._turns.inc()
        self._agreement.observe(agreement_s)
        self._lines.record(lines_dropped)

    def stepped(self, step_s: float) -> None:
        self._step.observe(step_s)

    def room_failed(self, cause: Cause) -> None:
        self._failed.count(cause)

    def room_retired(self, phase_ms: Mapping[Phase, int]) -> None:
        """Count a retired room, and record how long it was in each phase. `phase_ms`: milliseconds, by
        phase."""
        for phase, spent_ms in phase_ms.items():
            self._phases[phase].observe(spent_ms / 1000)
