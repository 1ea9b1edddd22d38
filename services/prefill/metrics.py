"""What does a prefill worker count?"""

from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.rooms.phases import SENDER_MOVES
from services.rooms.queues import RoomQueue
from services.worker.metrics import Counts, WorkerMetrics

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class PrefillMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.worker = WorkerMetrics(SENDER_MOVES, registry)
        bootstrap = Gauge(
            "baton_prefill_bootstrap_queue_requests", "Rooms without a destination yet.", registry=registry
        )
        waiting = Gauge(
            "baton_prefill_waiting_queue_requests", "Rooms that are to be computed.", registry=registry
        )
        inflight = Gauge(
            "baton_prefill_inflight_queue_requests",
            "Rooms that are computed and not yet all written.",
            registry=registry,
        )
        self._queues: Counts[RoomQueue] = Counts(
            {RoomQueue.BOOTSTRAP: bootstrap, RoomQueue.WAITING: waiting, RoomQueue.INFLIGHT: inflight}
        )
        self._tokens = Counter("baton_prefill_tokens_total", "Prompt tokens computed.", registry=registry)
        self._scored = Counter(
            "baton_prefill_scored_tokens_total",
            "Prompt tokens whose log-probability was computed for their caller.",
            registry=registry,
        )
        self._first_token = Histogram(
            "baton_prefill_first_token_seconds",
            "From a room's arrival here until its first token was drawn.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._bytes = Counter(
            "baton_kv_transfer_bytes_total", "Bytes of KV pages written to decode workers.", registry=registry
        )
        self._seconds = Histogram(
            "baton_kv_transfer_seconds",
            "From the start of a room's computation until its seal was written.",
            buckets=_SECONDS,
            registry=registry,
        )

        self._transfer = Counter(
            "baton_kv_transfer_busy_seconds_total",
            "Time during which pages of a room that were ready were not all written.",
            registry=registry,
        )
        self._hidden = Counter(
            "baton_kv_transfer_hidden_seconds_total",
            "The part of the busy seconds that went on beside a step.",
            registry=registry,
        )

    def record_queues(self, queues: Mapping[RoomQueue, int]) -> None:
        self._queues.record(queues)

    def computed(self, tokens: int, scored: int) -> None:
        self._tokens.inc(tokens)
        self._scored.inc(scored)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def sent(self, length: int) -> None:
        self._bytes.inc(length)

    def transferred(self, busy_s: float, hidden_s: float) -> None:
        """The pages of one room."""
        self._transfer.inc(busy_s)
        self._hidden.inc(hidden_s)

    def sealed(self, seconds: float) -> None:
        self._seconds.observe(seconds)
