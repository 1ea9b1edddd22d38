"""Prometheus metrics of a prefill worker."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter

from baton.rooms.phases import SENDER_MOVES
from baton.rooms.queues import RoomQueue
from baton.telemetry.histogram import LoopHistogram
from baton.worker.metrics import WorkerMetrics

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


QUEUES: Final = {
    RoomQueue.BOOTSTRAP: ("baton_prefill_bootstrap_queue_requests", "Rooms without a destination yet."),
    RoomQueue.WAITING: ("baton_prefill_waiting_queue_requests", "Rooms that are to be computed."),
    RoomQueue.INFLIGHT: (
        "baton_prefill_inflight_queue_requests",
        "Rooms that are computed and not yet all written.",
    ),
}


class PrefillMetrics(WorkerMetrics):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(SENDER_MOVES, QUEUES, registry)
        self._tokens = Counter("baton_prefill_tokens_total", "Prompt tokens computed.", registry=registry)
        self._scored = Counter(
            "baton_prefill_scored_tokens_total",
            "Prompt tokens whose log-probability was computed for their caller.",
            registry=registry,
        )
        self._first_token = LoopHistogram(
            "baton_prefill_first_token_seconds",
            "From a room's arrival here until its first token was drawn.",
            _SECONDS,
            registry,
        )
        self._bytes = Counter(
            "baton_kv_transfer_bytes_total", "Bytes of KV pages written to decode workers.", registry=registry
        )
        self._seconds = LoopHistogram(
            "baton_kv_transfer_seconds",
            "From the start of a room's computation until its seal was written.",
            _SECONDS,
            registry,
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

    def computed(self, tokens: int, scored: int) -> None:
        self._tokens.inc(tokens)
        self._scored.inc(scored)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def sent(self, length: int) -> None:
        self._bytes.inc(length)

    def transferred(self, busy_s: float, hidden_s: float) -> None:
        """Record the transfer of one room's pages. `busy_s`: seconds in which ready pages were not all
        written. `hidden_s`: seconds of that in which a step ran."""
        self._transfer.inc(busy_s)
        self._hidden.inc(hidden_s)

    def sealed(self, seconds: float) -> None:
        self._seconds.observe(seconds)
