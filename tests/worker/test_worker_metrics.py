"""Tests that a worker's metrics exist from its start, and count each event once."""

import pytest
from prometheus_client import CollectorRegistry, Gauge

from baton.decode.metrics import DecodeMetrics
from baton.prefill.metrics import PrefillMetrics
from baton.rooms.phases import RECEIVER_MOVES, Phase
from baton.rooms.queues import RoomQueue
from baton.telemetry.process_metrics import describe_process
from baton.worker.metrics import WorkerMetrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> WorkerMetrics:
    return WorkerMetrics(RECEIVER_MOVES, {}, registry)


def test_a_sides_phases_are_those_that_its_rooms_are_in(
    metrics: WorkerMetrics, registry: CollectorRegistry
) -> None:
    metrics.record_rooms(dict.fromkeys(Phase, 0) | {Phase.TRANSFERRING: 2}, unknown=0)
    value = registry.get_sample_value
    assert value("baton_rooms", {"phase": "transferring"}) == 2
    assert value("baton_rooms", {"phase": "failed"}) == 0
    assert value("baton_rooms", {"phase": "sealing"}) is None, "a receiver never seals"
    assert value("baton_room_phase_seconds_count", {"phase": "bootstrapping"}) == 0


def test_what_somebody_else_counts_is_added_once(metrics: WorkerMetrics, registry: CollectorRegistry) -> None:
    for lines in (3, 3, 5):
        metrics.record_turn(0.001, lines)
    assert registry.get_sample_value("baton_timeline_lines_dropped_total") == 5
    assert registry.get_sample_value("baton_turns_total") == 3


@pytest.mark.parametrize("side", [PrefillMetrics, DecodeMetrics])
def test_what_a_turn_does_not_change_is_not_set_again(
    side: type[PrefillMetrics | DecodeMetrics], registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []
    put = Gauge.set

    def noted(gauge: Gauge, value: float) -> None:
        told.append(value)
        put(gauge, value)

    monkeypatch.setattr(Gauge, "set", noted)
    metrics = PrefillMetrics(registry) if side is PrefillMetrics else DecodeMetrics(registry, max_running=8)
    for waiting in (3, 3, 4, 4):
        if side is PrefillMetrics:
            metrics.record_queues({RoomQueue.BOOTSTRAP: 0, RoomQueue.WAITING: waiting, RoomQueue.INFLIGHT: 1})
        else:
            metrics.record_queues(
                {
                    RoomQueue.PREALLOC: 0,
                    RoomQueue.TRANSFER: 1,
                    RoomQueue.WAITING: waiting,
                    RoomQueue.RUNNING: 2,
                }
            )
    assert told[-1] == 4
    assert told.count(3) == told.count(4) == 1
    name = f"baton_{'prefill_waiting_queue' if side is PrefillMetrics else 'decode_waiting'}_requests"
    assert registry.get_sample_value(name) == 4


def test_a_lease_that_is_held_and_one_that_is_not_are_counted_apart(
    metrics: WorkerMetrics, registry: CollectorRegistry
) -> None:
    for held in (False, True, True):
        metrics.leases.tried(held)
    assert registry.get_sample_value("baton_lease_renewals_total") == 2
    assert registry.get_sample_value("baton_lease_failures_total") == 1


def test_a_process_exports_its_identity_and_its_start(registry: CollectorRegistry) -> None:
    describe_process(registry, "decode", "decode-1", rank=3)
    told = [sample.labels for family in registry.collect() for sample in family.samples if sample.labels]
    assert [(each["role"], each["worker"], each["rank"]) for each in told] == [("decode", "decode-1", "3")]
    started = registry.get_sample_value("process_start_time_seconds")
    assert started is not None
    assert started > 0
