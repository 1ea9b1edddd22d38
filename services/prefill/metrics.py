"""Prometheus metrics of a prefill worker."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter

from baton.rooms.phases import SENDER_MOVES
from baton.rooms.queues import RoomQueue
from baton.telemetry.histogram import LoopHistogram
from baton.worker.metrics import WorkerMetrics

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


QUEUES: Final = {
    RoomQueue.BOOTSTRAP: (
        "baton_prefill_bootstrap_queue_requests",
        "Rooms for which the decode worker has not sent the destination pages yet.",
    ),
    RoomQueue.WAITING: (
        "baton_prefill_waiting_queue_requests",
        "Rooms whose prompts are not completely computed yet.",
    ),
    RoomQueue.INFLIGHT: (
        "baton_prefill_inflight_queue_requests",
        "Rooms whose prompts are computed, but whose KV pages are not all written to decode yet.",
    ),
}


class PrefillMetrics(WorkerMetrics):
    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(SENDER_MOVES, QUEUES, registry)
        self._tokens = Counter("baton_prefill_tokens_total", "Prompt tokens computed.", registry=registry)
        self._scored = Counter(
            "baton_prefill_scored_tokens_total",
            "Prompt tokens whose log-probabilities were computed, because the client asked for them.",
            registry=registry,
        )
        self._first_token = LoopHistogram(
            "baton_prefill_first_token_seconds",
            "Time from a room's arrival at this worker until its first output token was sampled.",
            _SECONDS,
            registry,
        )
        self._bytes = Counter(
            "baton_kv_transfer_bytes_total", "Bytes of KV pages written to decode workers.", registry=registry
        )
        self._seconds = LoopHistogram(
            "baton_kv_transfer_seconds",
            "Time from the start of a room's computation until its seal was written, the last write behind"
            " all its pages.",
            _SECONDS,
            registry,
        )
        self._transfer = Counter(
            "baton_kv_transfer_busy_seconds_total",
            "Time during which a room had computed pages that were not all written to decode, summed over"
            " rooms.",
            registry=registry,
        )
        self._hidden = Counter(
            "baton_kv_transfer_hidden_seconds_total",
            "Part of the busy seconds during which an engine step was running.",
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
        """Record how long the transfer of one room's pages took. `busy_s`: seconds in which computed pages
        were not all written. `hidden_s`: seconds of these in which a step ran."""
        self._transfer.inc(busy_s)
        self._hidden.inc(hidden_s)

    def sealed(self, seconds: float) -> None:
        self._seconds.observe(seconds)
