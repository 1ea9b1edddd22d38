"""Prometheus metrics of the router. Gauges are read from the registry at each scrape, so they cannot
drift."""

from collections import Counter as Count
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Final

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from baton.fleet.registry import GOODBYE, Registry
from baton.fleet.retry import RETRIED
from baton.fleet.room_entry import RoomEntry, RoomPhase
from baton.fleet.worker_record import Worker, WorkerState
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.rooms.reasons import REASONS
from baton.rooms.worker_facts import WEIGHT_TOTAL
from baton.telemetry.enum_counter import enum_counter
from baton.telemetry.failed_room_counter import FailedRoomCounter
from baton.telemetry.histogram import LabelledHistogram, LoopHistogram

_WAIT_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class RefusalReason(Enum):
    """Reason for which a request got no pair of workers, as a metric label."""

    QUEUE_FULL = "queue_full"
    TOO_LATE = "too_late"
    """Reason: the request waited for a pair of workers as long as requests may wait."""
    NOT_IN_TIME = "not_in_time"
    """Reason: the request would have had to wait longer than it may, judging by the work before it and the
    recent throughput."""
    NO_WORKER = "no_worker"
    """Reason: no worker of a side is ready, or none can ever hold the request."""


class ClassBand(Enum):
    """Band of priority classes, as a metric label. There may be any number of classes, so they are not labels
    themselves."""

    ABOVE = "above"
    """Band of the classes with numbers below zero. They are served before requests without a priority."""
    DEFAULT = "default"
    """Label of the band of priority class zero alone, which holds the requests without a priority."""
    BELOW = "below"

    @classmethod
    def of(cls, priority: int) -> "ClassBand":
        if not priority:
            return cls.DEFAULT
        return cls.ABOVE if priority < 0 else cls.BELOW


class ComputedBy(Enum):
    """Reason for which a room's prompt was computed on prefill or on decode, as a metric label."""

    PREFILL = "handed_over"
    """Reason for the usual case: prefill computed the prompt and handed it over."""
    SOONER = "sooner"
    """Reason: decode computed the prompt, because it was expected to finish sooner than prefill."""
    KEPT = "same_process"
    """Reason: decode computed the prompt, because the prefill worker would have been its own process."""
    ALONE = "no_prefill"
    """Reason: decode computed the prompt, because no prefill worker was ready for it."""


def computed_by(side: Side, entry: RoomEntry) -> ComputedBy:
    """Return the reason for which this side computed the prompt of a room."""
    if side is Side.PREFILL:
        return ComputedBy.PREFILL
    if entry.prefill is not None:
        return ComputedBy.SOONER
    return ComputedBy.KEPT if entry.is_same_process else ComputedBy.ALONE


class Loss(Enum):
    """Way in which a worker was lost, as a metric label."""

    LEFT = GOODBYE
    """Way of loss: the worker left by itself by calling Leave, such as after a drain."""
    EXITED = "exited"
    """Way of loss: the starter of the worker reported that its process has ended."""
    SILENT = "silent"
    """Way of loss: the worker's lease ran out."""
    STALLED = "stalled"
    """Way of loss: the worker's process runs, but takes no more turns (iterations of its loop)."""


class ExitRejection(Enum):
    """Reason for which a report that a worker has exited is rejected, as a metric label."""

    ANSWERS = "answers"
    """Reason: the worker that is reported to have exited still answers calls."""
    UNPROVEN = "unproven"
    """Reason: the reporter did not show the secret of the process's starter."""


class BootstrapMetrics:
    """Counters and histograms of the router. The Prometheus registry is injected, so that tests do not share
    one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._failed = FailedRoomCounter("Rooms of clients' requests that failed, by first cause.", registry)
        self._canaries_failed = FailedRoomCounter(
            "Canaries that failed, by first cause. A canary is the room of a test request of Baton's own.",
            registry,
            "baton_canaries_failed",
        )
        self._count_workers(registry)
        self._count_admission(registry)
        self._count_retries(registry)
        self._prompts = enum_counter(
            "baton_prompts_computed_total",
            "Rooms of clients' requests whose prompt was computed, by why that side did it: prefill, as"
            " usual (handed_over); or decode, because it was expected to finish sooner (sooner), is one"
            " process with the prefill worker (same_process), or no prefill worker was ready (no_prefill).",
            "why",
            ComputedBy,
            registry,
        )
        self._prompt_tokens = enum_counter(
            "baton_prompt_tokens_computed_total",
            "Tokens of clients' prompts that were computed, because they were not cached, by the side that"
            " did it.",
            "side",
            Side,
            registry,
        )

    def _count_workers(self, registry: CollectorRegistry) -> None:
        """Make the metrics about lease renewals, lost workers and rejected exit reports."""
        self._renewals = Counter(
            "baton_lease_renewals_total", "Lease renewals by all workers.", registry=registry
        )
        self._lost = Counter(
            "baton_workers_lost_total",
            "Workers that were lost, by how: they signed off (left), their process exited (exited), their"
            " lease ran out (silent), or they lived but their loop made no progress (stalled).",
            ["side", "how"],
            registry=registry,
        )
        for side in Side:
            for how in Loss:
                self._lost.labels(side.value, how.value)
        self._rejected_exits = enum_counter(
            "baton_exits_not_believed_total",
            "Reports of a worker's exit that were rejected, by why: its process still answers (answers), or"
            " the report lacks the secret of the launcher that started the process (unproven).",
            "why",
            ExitRejection,
            registry,
        )

    def _count_admission(self, registry: CollectorRegistry) -> None:
        """Make the metrics about requests that wait for workers or are refused."""
        self._waited = LabelledHistogram(
            "baton_admission_wait_seconds",
            "Time that a request waited for a pair of workers until its room was opened, by priority class:"
            " above is served first, default is without a priority, below is served last.",
            _WAIT_SECONDS,
            "class",
            (each.value for each in ClassBand),
            registry,
        )
        self._refused = enum_counter(
            "baton_admission_refused_requests_total",
            "Requests that got no pair of workers, by why: the queue was full (queue_full), they waited as"
            " long as they may (too_late), they were expected to wait longer than that (not_in_time), or no"
            " worker can take them (no_worker).",
            "why",
            RefusalReason,
            registry,
        )

    def _count_retries(self, registry: CollectorRegistry) -> None:
        """Make the metrics about requests that go on in a new room."""
        self._retries = Counter(
            "baton_request_retries_total",
            "Requests that continued in a new room, by the reason for which the last room failed.",
            ["reason"],
            registry=registry,
        )
        for reason in sorted(RETRIED, key=lambda each: each.value):
            if REASONS[reason].is_attempt:
                self._retries.labels(reason.value)
        self._retracted = Counter(
            "baton_rooms_retracted_total",
            "Rooms of clients' requests that were retracted, because their decode worker needed their KV"
            " pages for older rooms. Their requests continue in new rooms, so these are no failures.",
            registry=registry,
        )
        self._worker_full = Counter(
            "baton_rooms_worker_full_total",
            "Rooms of clients' requests that a worker refused, because all its places were taken by rooms of"
            " this and other bootstraps. Their requests wait for a place again, so these are no failures.",
            registry=registry,
        )
        self._paused = LoopHistogram(
            "baton_retraction_pause_seconds",
            "Time from the retraction of a room until the next token of its request, or the request's end.",
            _WAIT_SECONDS,
            registry,
        )
        self._recomputed = Counter(
            "baton_retraction_recomputed_tokens_total",
            "Tokens of prompt and output that prefill computed again for requests whose room was retracted,"
            " because they were not cached.",
            registry=registry,
        )

    def prompt_computed(self, side: Side, tokens: int, why: ComputedBy) -> None:
        """Count the prompt of a client's room as computed on this side. `tokens`: number of its tokens that
        were not cached."""
        self._prompts[why].inc()
        self._prompt_tokens[side].inc(tokens)

    def room_ended_early(self, cause: Cause, *, canary: bool) -> None:
        if cause.reason is Reason.RETRACTED and not canary:
            self._retracted.inc()
        if cause.reason is Reason.WORKER_FULL and not canary:
            self._worker_full.inc()
        (self._canaries_failed if canary else self._failed).count(cause)

    def resumed(self, paused_s: float, recomputed_tokens: int) -> None:
        """Observe how long a request paused after its room was retracted, in seconds. Called at its next
        token or its end."""
        self._paused.observe(paused_s)
        self._recomputed.inc(recomputed_tokens)

    def retried(self, reason: Reason) -> None:
        self._retries.labels(reason.value).inc()

    def lease_renewed(self) -> None:
        self._renewals.inc()

    def worker_lost(self, side: Side, how: Loss) -> None:
        self._lost.labels(side.value, how.value).inc()

    def exit_not_believed(self, why: ExitRejection) -> None:
        self._rejected_exits[why].inc()

    def refused(self, why: RefusalReason) -> None:
        self._refused[why].inc()

    def admitted(self, priority: int, waited_s: float) -> None:
        self._waited.observe(ClassBand.of(priority).value, waited_s)


class RegistryCollector(Collector):
    """Prometheus collector that makes gauges from the registry's state at each scrape."""

    def __init__(
        self,
        registry: Registry,
        queued: Callable[[], Mapping[int, int]],
        lacking: Callable[[], Mapping[Side, int]],
    ) -> None:
        """Make a collector. `queued`: function that returns the number of waiting requests by priority class.
        `lacking`: function that returns their number by the side that has no space for them."""
        self._registry = registry
        self._queued = queued
        self._lacking = lacking

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Yield all gauges, by whose names Prometheus' library finds this collector."""
        return self.collect()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield self._rooms()
        yield from self._workers()
        yield from self._capacity()
        yield from self._queues()

    def _ready(self, side: Side) -> list[Worker]:
        return [
            each
            for each in self._registry.workers()
            if (each.facts.side, each.state) == (side, WorkerState.READY)
        ]

    def _rooms(self) -> GaugeMetricFamily:
        rooms = GaugeMetricFamily(
            "baton_rooms",
            "Rooms whose workers have not freed all their resources yet, by phase.",
            labels=["phase"],
        )
        for phase in RoomPhase:
            if phase is not RoomPhase.RETIRED:
                rooms.add_metric([phase.value], self._registry.phases[phase])
        return rooms

    def _workers(self) -> Iterator[GaugeMetricFamily]:
        workers = GaugeMetricFamily(
            "baton_workers", "Workers that hold a lease, by state.", labels=["side", "state"]
        )
        states = Count((worker.facts.side, worker.state) for worker in self._registry.workers())
        for side in Side:
            for state in WorkerState:
                workers.add_metric([side.value, state.value], states[side, state])
        yield workers
        weights = GaugeMetricFamily(
            "baton_workers_weight",
            "Ready workers, where each side of a process that serves both counts as its share of the process"
            " (its weight / 100).",
            labels=["side"],
        )
        for side in Side:
            weights.add_metric([side.value], sum(each.weight for each in self._ready(side)) / WEIGHT_TOTAL)
        yield weights
        logged = GaugeMetricFamily(
            "baton_kv_log_workers",
            "Ready workers whose cached prefixes are known whole, by their KV event log. The others are"
            " judged by what they were sent.",
            labels=["side"],
        )
        for side in Side:
            logged.add_metric([side.value], sum(each.kv_log.is_current for each in self._ready(side)))
        yield logged
        yield GaugeMetricFamily(
            "baton_alone_workers",
            "Ready decode workers that can compute prompts themselves if no prefill worker is ready.",
            value=self._registry.alone_count,
        )

    def _capacity(self) -> Iterator[GaugeMetricFamily]:
        places = GaugeMetricFamily(
            "baton_worker_places",
            "Places for rooms on ready workers: taken by clients' rooms, or free.",
            labels=["side", "state"],
        )
        tokens = GaugeMetricFamily(
            "baton_worker_kv_tokens",
            "KV positions of ready workers, as placement counts them: used or needed by rooms, or left. A"
            " decode worker reports its own, and rooms placed since then are added. A prefill worker is"
            " counted by its open rooms.",
            labels=["side", "state"],
        )
        for side in Side:
            ready = self._ready(side)
            taken = sum(worker.client_rooms for worker in ready)
            free = sum(worker.facts.rooms_max - worker.client_rooms for worker in ready)
            places.add_metric([side.value, "taken"], taken)
            places.add_metric([side.value, "free"], free)
            left = sum(max(worker.usage.left, 0) for worker in ready)
            tokens.add_metric([side.value, "used"], sum(each.facts.tokens_max for each in ready) - left)
            tokens.add_metric([side.value, "left"], left)
        yield places
        yield tokens

    def _queues(self) -> Iterator[GaugeMetricFamily]:
        queue = GaugeMetricFamily(
            "baton_admission_queue_requests",
            "Requests waiting for a pair of workers, by priority class: above is served first, default is"
            " without a priority, below is served last.",
            labels=["class"],
        )
        waiting = Count[ClassBand]()
        for priority, count in self._queued().items():
            waiting[ClassBand.of(priority)] += count
        for band in ClassBand:
            queue.add_metric([band.value], waiting[band])
        yield queue
        sides = GaugeMetricFamily(
            "baton_side_queue_requests",
            "Requests waiting for a pair of workers, by the side that lacks a worker for them, or space for"
            " the first of them.",
            labels=["side"],
        )
        lacking = self._lacking()
        for side in Side:
            sides.add_metric([side.value], lacking.get(side, 0))
        yield sides
