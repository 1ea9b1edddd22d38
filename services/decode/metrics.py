"""Prometheus metrics of a decode worker."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.rooms.phases import LOCAL_MOVES, RECEIVER_MOVES
from baton.rooms.queues import RoomQueue
from baton.rooms.steps.draft_budget import DraftSource
from baton.telemetry.histogram import LoopHistogram
from baton.worker.metrics import Counts, WorkerMetrics

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

QUEUES: Final = {
    RoomQueue.PREALLOC: ("baton_decode_prealloc_queue_requests", "Rooms that have no KV pages yet."),
    RoomQueue.TRANSFER: (
        "baton_decode_transfer_queue_requests",
        "Rooms whose KV pages have not all arrived, or whose prompts are being computed by this worker.",
    ),
    RoomQueue.WAITING: (
        "baton_decode_waiting_requests",
        "Sequences of admitted rooms that wait because the batch is full.",
    ),
    RoomQueue.RUNNING: (
        "baton_decode_running_requests",
        "Sequences in the batch, which are being generated.",
    ),
}


class DecodeMetrics(WorkerMetrics):
    def __init__(self, registry: CollectorRegistry, max_running: int) -> None:
        super().__init__({**RECEIVER_MOVES, **LOCAL_MOVES}, QUEUES, registry)
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._max_running = max_running
        batch = gauge(
            "baton_decode_batch_places", "Places for sequences in the batch: taken, or free.", ["state"]
        )
        self._batch = Counts({state: batch.labels(state) for state in ("taken", "free")})
        self._tokens = counter("baton_decode_tokens_total", "Output tokens generated.")
        self._handover = LoopHistogram(
            "baton_handover_seconds",
            "Time from a room's arrival at this worker until all its KV had arrived and it was admitted.",
            _SECONDS,
            registry,
        )
        self._revocations = counter(
            "baton_kv_revocations_total",
            "Times that this worker took back the memory that prefill workers could write to.",
        )

        self._local = counter(
            "baton_decode_local_rooms_total",
            "Rooms whose prompts this worker computed, because that was sooner or no prefill worker was"
            " ready.",
        )
        self._computed = counter(
            "baton_decode_prompt_tokens_total", "Prompt tokens that this decode worker computed."
        )
        self._grown = counter(
            "baton_decode_pages_grown_total", "KV pages that running rooms took for new output tokens."
        )
        self._retracted = counter(
            "baton_decode_rooms_retracted_total",
            "Rooms that were retracted, because older rooms needed their KV pages. Their requests continue in"
            " new rooms.",
        )
        self._given_up = counter(
            "baton_decode_retracted_tokens_total",
            "Tokens of retracted rooms whose KV this worker had. They are computed again unless cached by"
            " then.",
        )

        draft_pages = gauge(
            "baton_decode_draft_pages",
            "KV pages of the draft model, by state; 0 without a draft model.",
            ["state"],
        )
        self._draft_pages = Counts({state: draft_pages.labels(state) for state in ("taken", "free")})
        drafts = counter(
            "baton_decode_draft_tokens_total",
            "Drafted tokens that were checked (speculative decoding), by source and outcome: taken or"
            " missed.",
            ["source", "outcome"],
        )
        self._drafts = {
            source: (drafts.labels(source.value, "taken"), drafts.labels(source.value, "missed"))
            for source in DraftSource
        }

    def record_drafts(self, pages: Mapping[str, int]) -> None:
        """Set the gauges of the draft model's KV pages. `pages`: number of pages in each state (`taken`,
        `free`)."""
        self._draft_pages.record(pages)

    def record_queues(self, queues: Mapping[RoomQueue, int]) -> None:
        super().record_queues(queues)
        running = queues[RoomQueue.RUNNING]
        self._batch.record({"taken": running, "free": self._max_running - running})

    def decoded(self, tokens: int) -> None:
        self._tokens.inc(tokens)

    def drafted(self, source: DraftSource, drafted: int, taken: int) -> None:
        """Count the draft tokens of one sequence in a step. `drafted`: number of verified tokens. `taken`:
        number of accepted ones."""
        if drafted:
            all_taken, all_missed = self._drafts[source]
            all_taken.inc(taken)
            all_missed.inc(drafted - taken)

    def claimed(self) -> None:
        self._local.inc()

    def computed(self, tokens: int) -> None:
        """Count prompt tokens that this decode worker computed itself."""
        if tokens:
            self._computed.inc(tokens)

    def grew(self, pages: int, retracted: Sequence[int]) -> None:
        """Count pages that running rooms took for their output, and rooms that were retracted (preempted).
        `retracted`: number of tokens with KV, for each retracted room."""
        if pages:
            self._grown.inc(pages)
        if retracted:
            self._retracted.inc(len(retracted))
            self._given_up.inc(sum(retracted))

    def revoked(self) -> None:
        self._revocations.inc()

    def admitted(self, handover_s: float) -> None:
        self._handover.observe(handover_s)
