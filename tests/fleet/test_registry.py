"""Tests of the registry of workers and rooms: joining, leases, placement, and the end of each room."""

from collections.abc import Collection
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from baton.fleet.need import Need
from baton.fleet.pair_health import BROKEN_AFTER
from baton.fleet.registry import Registry
from baton.fleet.room_entry import EVENTS_PER_ROOM_MAX, RoomEntry, RoomPhase
from baton.fleet.room_table import CANARY_ROOMS_FILED_MAX, CLOSING_MS, DELIVERY_MS, OPEN_MS_MAX, OUTCOME_MS
from baton.fleet.worker_record import Worker, WorkerState
from baton.fleet.worker_table import DEPARTED_MAX, TURN_MS_MAX
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import (
    Cause,
    DeclaredGone,
    NameInUse,
    NoCapacity,
    NoSuchWorker,
    Reason,
    TooLarge,
    TurnStalled,
    UnknownRoom,
    UnknownWorker,
    WorkerRefused,
)
from baton.rooms.phases import Side
from baton.rooms.timeline import Event
from baton.rooms.worker_facts import ServedEngine, StackFacts, WorkerFacts

DIGEST, OTHER_DIGEST = (sha256(secret).digest() for secret in (b"of a starter", b"of another"))

LEASE_MS, KEPT, FAILED_KEPT = 1000, 3, 2
STACK = StackFacts(schema="1", dtype=("bfloat16",), layers=(30,))
LOST = Cause(Reason.DECODE_LOST, "its process is gone")


def facts(side: Side, number: int, *, tokens_max: int = 1000, rooms_max: int = 10) -> WorkerFacts:
    return WorkerFacts(
        name=f"{side.value}-{number}",
        side=side,
        incarnation=Incarnation(number + (100 if side is Side.DECODE else 0)),
        address=f"127.0.0.1:{9000 + number}",
        model="model",
        stack=STACK,
        tokens_max=tokens_max,
        rooms_max=rooms_max,
        pid=1000 + number,
        exit_digest=DIGEST,
    )


def registry_of(*workers: WorkerFacts, first_room: int = 500) -> Registry:
    registry = Registry("model", first_room, LEASE_MS, KEPT, FAILED_KEPT)
    for each in workers:
        registry.register(each, 0)
        registry.mark_proven(each.incarnation)
    return registry


def test_what_the_workers_quantise_is_known_once_one_is_there() -> None:
    registry = Registry("model", 500, LEASE_MS, KEPT, FAILED_KEPT)
    assert registry.quantize is None
    registry.register(replace(facts(Side.DECODE, 1), stack=replace(STACK, quantize="int8")), 0)
    assert registry.quantize == "int8"


def test_what_the_engines_promise_holds_for_all_workers() -> None:
    registry = Registry("model", 500, LEASE_MS, KEPT, FAILED_KEPT)
    assert registry.engine is None
    one, other = (replace(facts(side, 1), engine="torch", batch_invariant=True) for side in Side)
    registry.register(one, 0)
    assert registry.engine == ServedEngine("torch", "bfloat16", batch_invariant=True, whole_prompts=False)
    registry.register(replace(other, batch_invariant=False, whole_prompts=True), 0)
    assert registry.engine == ServedEngine("torch", "bfloat16", batch_invariant=False, whole_prompts=True)


def test_schema_agreed_the_first_worker_brings_the_weights_that_a_router_lacks() -> None:
    registry = Registry("config-", 500, LEASE_MS, KEPT, FAILED_KEPT, weights_known=False)
    first, second = (replace(each, model="config-weights") for each in (P1, D1))
    for model in ("other-weights", "config-", "config", ""):
        with pytest.raises(WorkerRefused, match="model differs: this stack has config-, the worker has"):
            registry.register(replace(first, model=model), 0)
    with pytest.raises(TurnStalled):
        registry.register(replace(second, model="config-others"), 0, turn_ms=TURN_MS_MAX)
    registry.register(first, 0)
    with pytest.raises(WorkerRefused, match="this stack has config-weights, the worker has config-others"):
        registry.register(replace(second, model="config-others"), 0)
    registry.register(second, 0)
    assert len(registry.workers()) == 2


def test_schema_agreed_the_weights_stay_when_the_last_worker_has_left() -> None:
    """A request may wait for new workers, to go on after its own output."""
    registry = Registry("config-", 500, LEASE_MS, KEPT, FAILED_KEPT, weights_known=False)
    registry.register(replace(P1, model="config-weights"), 0)
    registry.leave(P1.incarnation, "left", 0)
    with pytest.raises(WorkerRefused):
        registry.register(replace(P2, model="config-others"), 0)
    registry.register(replace(P2, model="config-weights"), 0)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"stack": replace(STACK, encoding=("plain",))}, "encoding"), ({"page_tokens": 32}, "page_tokens")],
)
def test_schema_agreed_engines_that_write_pages_differently_are_refused(
    changes: dict[str, Any], field: str
) -> None:
    encoded = replace(STACK, encoding=("amx",))
    registry = registry_of(replace(facts(Side.PREFILL, 1), stack=encoded, page_tokens=16))
    other = replace(facts(Side.DECODE, 1), stack=encoded, page_tokens=16)
    with pytest.raises(WorkerRefused) as caught:
        registry.register(replace(other, **changes), 0)
    assert caught.value.field == field
    registry.register(other, 0)


def placed(registry: Registry, need: Need, avoid: Collection[Incarnation] = ()) -> tuple[Worker, Worker]:
    prefill, decode = registry.place(need, avoid)
    assert prefill is not None
    return prefill, decode


def pair(registry: Registry, tokens: int = 10) -> tuple[Worker, Worker]:
    return placed(registry, Need(tokens, tokens))


def opened(registry: Registry, tokens: int = 10, now_ms: int = 0) -> RoomEntry:
    return registry.open_room("request", pair(registry, tokens), Need(tokens, tokens), now_ms)


def over(registry: Registry, entry: RoomEntry, cause: Cause | None = None) -> None:
    registry.end(entry.id, cause, 0)
    for side in Side:
        registry.side_retired(entry.id, side)


P1, P2, D1, D2 = (
    facts(Side.PREFILL, 1),
    facts(Side.PREFILL, 2),
    facts(Side.DECODE, 1),
    facts(Side.DECODE, 2),
)


@pytest.fixture
def stack() -> Registry:
    return registry_of(P1, D1)


# ---- workers


def test_schema_agreed_another_model_is_refused_by_name(stack: Registry) -> None:
    with pytest.raises(
        WorkerRefused, match="model differs: this stack has model, the worker has other"
    ) as caught:
        stack.register(replace(P2, model="other"), 0)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("other", "field", "text"),
    [
        ({"layers": (32,)}, "layers", "this stack has 30, the worker has 32"),
        ({"layers": (25, 5)}, "layers", "this stack has 30, the worker has 25; 5"),
        ({"schema": "2"}, "schema", "this stack has 1, the worker has 2"),
    ],
)
def test_schema_agreed_another_geometry_is_refused_by_field(
    stack: Registry, other: dict[str, Any], field: str, text: str
) -> None:
    with pytest.raises(WorkerRefused, match=text) as caught:
        stack.register(replace(P2, stack=replace(STACK, **other)), 0)
    assert caught.value.field == field
    assert len(stack.workers()) == 2


@pytest.mark.parametrize("side", Side)
def test_schema_agreed_another_context_than_the_bootstraps_is_refused_by_name(side: Side) -> None:
    """The first worker is checked already, since the bootstrap would accept prompts that the worker cannot
    hold."""
    stack = Registry("model", 500, LEASE_MS, KEPT, FAILED_KEPT, context_length=4096)
    worker = replace(P1, side=side, context_length=4096)
    for other in (0, 4095, 8192):
        text = f"context_length differs: this stack has 4096, the worker has {other}"
        with pytest.raises(WorkerRefused, match=text) as caught:
            stack.register(replace(worker, context_length=other), 0)
        assert caught.value.field == "context_length"
    stack.register(worker, 0)


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("page_tokens", [24, 12, 3])
def test_schema_agreed_a_page_size_that_is_no_multiple_of_anothers_is_refused(
    side: Side, page_tokens: int
) -> None:
    stack = registry_of(replace(P1, page_tokens=16))
    with pytest.raises(
        WorkerRefused, match=f"this stack has 16, the worker has {page_tokens}: neither is a multiple"
    ) as caught:
        stack.register(replace(P2, side=side, page_tokens=page_tokens), 0)
    assert caught.value.field == "page_tokens"
    assert len(stack.workers()) == 1


@pytest.mark.parametrize("page_tokens", [1, 8, 16, 48])
def test_page_sizes_may_differ_by_a_factor(page_tokens: int) -> None:
    stack = registry_of(replace(P1, page_tokens=16), replace(P2, page_tokens=page_tokens))
    assert len(stack.workers()) == 2


def test_schema_agreed_a_page_size_fits_every_worker_that_there_is() -> None:
    stack = registry_of(replace(P1, page_tokens=16), replace(P2, page_tokens=48))
    with pytest.raises(WorkerRefused, match="this stack has 48, the worker has 32"):
        stack.register(replace(D1, page_tokens=32), 0)


@pytest.mark.parametrize("side", Side)
def test_a_name_is_held_once_in_the_whole_stack(stack: Registry, side: Side) -> None:
    other = replace(P2, name=P1.name, side=side)
    with pytest.raises(NameInUse, match=f"held by incarnation 1 for {LEASE_MS - 400} ms"):
        stack.register(other, 400)
    stack.leave(P1.incarnation, None, 0)
    stack.register(other, 400)
    assert stack.worker(other.incarnation).facts == other


def test_registering_again_renews_and_keeps_what_is_known(stack: Registry) -> None:
    entry = opened(stack)
    stack.register(P1, 900)
    worker = stack.worker(P1.incarnation)
    assert (worker.lease_until_ms, worker.rooms, worker.state) == (
        900 + LEASE_MS,
        {entry.id},
        WorkerState.READY,
    )


def test_a_lease_ends_by_silence(stack: Registry) -> None:
    stack.renew(P1.incarnation, 500)
    assert stack.expired(LEASE_MS - 1) == []
    assert stack.expired(LEASE_MS) == [D1.incarnation]
    assert stack.expired(LEASE_MS + LEASE_MS // 3) == [D1.incarnation]
    assert stack.expired(LEASE_MS + 500) == [P1.incarnation, D1.incarnation]


def test_silence_counts_only_while_somebody_listens(stack: Registry) -> None:
    """Each worker is charged a third of a lease for the ten leases in which the bootstrap stood still."""
    stack.expired(0)
    stack.expired(LEASE_MS // 2)
    stood_until = LEASE_MS // 2 + 10 * LEASE_MS
    stack.renew(P1.incarnation, stood_until)
    assert stack.expired(stood_until) == []
    left = {worker.facts.name: worker.lease_until_ms - stood_until for worker in stack.workers()}
    charged = LEASE_MS // 3 + LEASE_MS // 3
    assert left == {P1.name: LEASE_MS, D1.name: LEASE_MS - charged}
    heard = stood_until + LEASE_MS // 3
    assert stack.expired(heard) == []
    assert stack.expired(heard + LEASE_MS // 3) == [D1.incarnation]


def test_live_is_not_lost_silence_counts_up_to_what_was_heard(stack: Registry) -> None:
    """Calls that came later may still wait in the bootstrap's own accept queue."""
    for now_ms in range(0, 4 * LEASE_MS, LEASE_MS // 4):
        assert stack.expired(now_ms, accepted_until_ms=LEASE_MS - 1) == []
    stack.renew(P1.incarnation, 4 * LEASE_MS)
    assert stack.expired(4 * LEASE_MS, accepted_until_ms=LEASE_MS) == [D1.incarnation]
    assert stack.expired(4 * LEASE_MS, accepted_until_ms=9 * LEASE_MS) == [D1.incarnation], (
        "nobody hears the future"
    )


def test_honest_health_a_worker_whose_turn_does_not_end_gets_no_lease(stack: Registry) -> None:
    stack.renew(D1.incarnation, 500, TURN_MS_MAX - 1)
    with pytest.raises(TurnStalled, match=r"its turn has not ended for 3\.2 s"):
        stack.renew(D1.incarnation, 600, 3_200)
    assert stack.worker(D1.incarnation).lease_until_ms == 500 + LEASE_MS
    stack.leave(D1.incarnation, None, 600)
    with pytest.raises(TurnStalled):
        stack.register(D1, 700, 3_300)
    stack.register(D1, 800, 0)
    assert stack.worker(D1.incarnation).state is WorkerState.JOINING


def test_a_turn_may_take_as_long_as_a_long_lease() -> None:
    stack = Registry("model", 500, 10 * TURN_MS_MAX, KEPT, FAILED_KEPT)
    stack.register(D1, 0, 10 * TURN_MS_MAX - 1)
    with pytest.raises(TurnStalled):
        stack.renew(D1.incarnation, 0, 10 * TURN_MS_MAX)


def test_who_was_declared_gone_is_told_so_whatever_it_asks(stack: Registry) -> None:
    stack.leave(D1.incarnation, "exit seen", 0)
    with pytest.raises(DeclaredGone):
        stack.renew(D1.incarnation, 0)
    with pytest.raises(DeclaredGone):
        stack.register(D1, 0)
    with pytest.raises(DeclaredGone):
        stack.drain(D1.incarnation)


def test_a_worker_that_left_must_register_again(stack: Registry) -> None:
    stack.leave(D1.incarnation, None, 0)
    with pytest.raises(UnknownWorker):
        stack.renew(D1.incarnation, 0)
    with pytest.raises(UnknownWorker):
        stack.drain(D1.incarnation)
    stack.register(D1, 0)
    assert stack.worker(D1.incarnation).state is WorkerState.JOINING


def test_proof_not_time_a_lost_lease_declares_nobody_gone(stack: Registry) -> None:
    stack.leave(D1.incarnation, None, 0)
    assert stack.departed() == []


def test_proof_not_time_a_names_next_holder_does_not_prove_that_the_last_is_gone(stack: Registry) -> None:
    """A stopped process does not see that another took its name, and may write when it goes on."""
    stack.leave(D1.incarnation, None, 0)
    stack.register(replace(D1, incarnation=Incarnation(7)), 0)
    assert stack.departed() == []
    assert stack.silent(D1.name) == [D1.incarnation]
    with pytest.raises(NameInUse):
        stack.register(D1, 0)


@pytest.mark.parametrize("silent", [False, True])
def test_an_exit_is_proof_for_the_process_that_exited_alone(stack: Registry, silent: bool) -> None:
    stack.register(D2, 0)
    if silent:
        stack.leave(D1.incarnation, None, 0)
    assert stack.exited(D1.name, D1.pid, DIGEST) == [D1.incarnation]
    assert stack.exited(D1.name, D1.pid + 7, DIGEST) == []
    assert stack.exited(D1.name[:-1], D1.pid, DIGEST) == []
    assert stack.exited(D1.name, 0, DIGEST) == []


def test_an_exit_whose_process_id_was_never_told_names_nobody() -> None:
    stack = registry_of(replace(D1, pid=0))
    assert stack.exited(D1.name, 0, DIGEST) == []


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("shown", [b"", bytes(32), OTHER_DIGEST, DIGEST[:-1]])
def test_exit_by_starter_nobody_else_ends_a_process(stack: Registry, silent: bool, shown: bytes) -> None:
    """OTHER_DIGEST is that of another worker's starter."""
    stack.register(replace(D2, exit_digest=OTHER_DIGEST), 0)
    if silent:
        stack.leave(D1.incarnation, None, 0)
    assert stack.of_process(D1.name, D1.pid) == [D1.incarnation]
    assert stack.exited(D1.name, D1.pid, shown) == []


def test_exit_by_starter_nobody_ends_a_process_that_registered_no_digest() -> None:
    stack = registry_of(replace(D1, exit_digest=b""))
    assert stack.of_process(D1.name, D1.pid) == [D1.incarnation]
    for shown in (b"", DIGEST, sha256(b"").digest()):
        assert stack.exited(D1.name, D1.pid, shown) == []


def test_exit_by_starter_a_report_ends_one_start_of_a_process_and_no_later_one(stack: Registry) -> None:
    """In containers, every process of a worker has the same name and process id."""
    stack.leave(D1.incarnation, None, 0)
    again = replace(D1, incarnation=Incarnation(7), exit_digest=OTHER_DIGEST)
    stack.register(again, 0)
    assert stack.of_process(D1.name, D1.pid) == [D1.incarnation, again.incarnation]
    assert stack.exited(D1.name, D1.pid, DIGEST) == [D1.incarnation]
    stack.leave(D1.incarnation, "exited", 0)
    assert stack.exited(D1.name, D1.pid, DIGEST) == [], "once more, for the next one"
    assert stack.exited(D1.name, D1.pid, OTHER_DIGEST) == [again.incarnation]


def test_leaving_by_proof_releases_its_side_and_by_silence_does_not() -> None:
    stack = registry_of(P1, D1, D2)
    entries = [opened(stack), opened(stack)]
    assert [entry.decode for entry in entries] == [D1, D2]
    assert stack.leave(D1.incarnation, "exit seen", 0) == [entries[0]]
    assert stack.leave(D2.incarnation, None, 0) == [entries[1]]
    assert entries[0].waiting_for == {Side.PREFILL}
    assert entries[1].waiting_for == {Side.PREFILL, Side.DECODE}
    assert stack.departed() == [D1.incarnation]


def test_an_ended_room_whose_last_worker_is_proven_gone_is_over(stack: Registry) -> None:
    entry = opened(stack)
    stack.end(entry.id, LOST, 0)
    stack.side_retired(entry.id, Side.PREFILL)
    assert stack.leave(D1.incarnation, "exit seen", 0) == []
    assert (entry.phase, stack.open_count()) == (RoomPhase.RETIRED, 0)


def test_a_silent_workers_rooms_are_released_by_the_proof_that_comes_later(stack: Registry) -> None:
    entry = opened(stack)
    stack.leave(D1.incarnation, None, 0)
    stack.end(entry.id, LOST, 0)
    stack.side_retired(entry.id, Side.PREFILL)
    stack.register(replace(D1, incarnation=Incarnation(999), exit_digest=b""), 1)
    assert entry.phase is RoomPhase.CLOSING
    for gone in stack.exited(D1.name, D1.pid, DIGEST):
        stack.leave(gone, "exited", 0)
    assert stack.get(entry.id).phase is RoomPhase.RETIRED


def test_what_is_remembered_of_the_departed_is_bounded(stack: Registry) -> None:
    for number in range(1, DEPARTED_MAX + 3):
        stack.leave(Incarnation(10_000 + number), "exit seen", 0)
    departed = stack.departed()
    assert len(departed) == DEPARTED_MAX
    assert departed[-1] == 10_000 + DEPARTED_MAX + 2


def test_a_suspect_gets_no_rooms_until_it_renews_and_is_worth_waiting_for(stack: Registry) -> None:
    stack.suspect(D1.incarnation)
    with pytest.raises(NoCapacity, match="a stream to every decode worker broke"):
        pair(stack)
    stack.renew(D1.incarnation, 10)
    pair(stack)
    stack.suspect(D1.incarnation)
    stack.leave(D1.incarnation, None, 0)
    with pytest.raises(NoSuchWorker, match="no decode worker is ready"):
        pair(stack)


def test_a_missing_side_is_told_even_while_the_other_is_suspect(stack: Registry) -> None:
    stack.suspect(P1.incarnation)
    stack.drain(D1.incarnation)
    with pytest.raises(NoSuchWorker, match="no decode worker is ready"):
        pair(stack)


def test_a_suspect_that_was_never_proven_is_not_worth_waiting_for(stack: Registry) -> None:
    stack.drain(D1.incarnation)
    stack.register(D2, 0)
    stack.suspect(D2.incarnation)
    with pytest.raises(NoSuchWorker, match="no decode worker is ready"):
        pair(stack)


def test_a_canary_takes_no_place_that_a_client_is_given() -> None:
    stack = registry_of(replace(P1, rooms_max=1), replace(D1, rooms_max=1))
    canary = stack.open_room("canary", pair(stack), Need(1, 2), 0, canary=True)
    entry = opened(stack)
    with pytest.raises(NoCapacity, match=r"every .* worker is full"):
        pair(stack)
    over(stack, entry)
    over(stack, canary)
    assert [(worker.rooms, worker.canaries) for worker in stack.workers()] == [(set(), set())] * 2


def test_an_unproven_suspect_is_to_be_proven_first(stack: Registry) -> None:
    stack.register(D2, 0)
    stack.suspect(D2.incarnation)
    stack.renew(D2.incarnation, 10)
    assert stack.worker(D2.incarnation).state is WorkerState.JOINING


def test_draining_stays_draining(stack: Registry) -> None:
    stack.drain(D1.incarnation)
    stack.suspect(D1.incarnation)
    stack.mark_proven(D1.incarnation)
    stack.renew(D1.incarnation, 10)
    assert stack.worker(D1.incarnation).state is WorkerState.DRAINING
    with pytest.raises(NoSuchWorker):
        pair(stack)


# ---- placing


def test_the_least_loaded_pair_is_taken_by_share_of_its_cache() -> None:
    small, large = replace(D1, tokens_max=100), replace(D2, tokens_max=1000)
    stack = registry_of(P1, P2, small, large)
    order = [opened(stack, tokens=70) for _ in range(10)]
    assert [entry.decode.name for entry in order] == [large.name] * 9 + [small.name]
    assert [entry.names[Side.PREFILL] for entry in order] == [P1.name, P2.name] * 5


def test_what_nobody_can_ever_hold_is_not_waited_for() -> None:
    stack = registry_of(P1, replace(D1, tokens_max=100))
    with pytest.raises(NoSuchWorker, match="no decode worker can hold 101 tokens: the largest holds 100"):
        stack.place(Need(10, 101))
    with pytest.raises(TooLarge, match="no prefill worker can hold 1001 tokens"):
        stack.place(Need(1001, 50))


@pytest.mark.parametrize("state", [WorkerState.JOINING, WorkerState.DRAINING])
def test_what_a_worker_that_is_not_ready_could_hold_may_be_hoped_for(state: WorkerState) -> None:
    stack = registry_of(P1, replace(D1, tokens_max=100))
    stack.register(replace(D2, tokens_max=200), 0)
    if state is WorkerState.DRAINING:
        stack.drain(D2.incarnation)
    with pytest.raises(NoSuchWorker, match="that is ready can hold 101 tokens: the largest holds 100") as no:
        stack.place(Need(10, 101))
    assert not isinstance(no.value, TooLarge)
    with pytest.raises(TooLarge, match="the largest holds 200"):
        stack.place(Need(10, 201))


def test_how_much_a_request_may_take_is_what_workers_hold_that_get_rooms() -> None:
    stack = registry_of(P1, replace(D1, tokens_max=100))
    stack.register(replace(D2, tokens_max=200), 0)
    small = facts(Side.DECODE, 3, tokens_max=50)
    stack.register(small, 0)
    assert holding(stack) == (200, 100), "the others get none yet"
    stack.suspect(small.incarnation)
    assert holding(stack) == (200, 100), "nor when it renews"
    for each in (D2.incarnation, small.incarnation):
        stack.renew(each, 0)
        stack.mark_proven(each)
    assert holding(stack) == (200, 200)
    stack.suspect(D2.incarnation)
    assert holding(stack) == (200, 200), "it will again in a moment"
    stack.drain(D2.incarnation)
    assert holding(stack) == (200, 100)
    stack.drain(D1.incarnation)
    assert holding(stack) == (200, 50)
    stack.drain(small.incarnation)
    assert holding(stack) == (200, 200), "better than nothing to go by"
    for each in (D1.incarnation, D2.incarnation, small.incarnation):
        stack.leave(each, None, 0)
    assert holding(stack) == (0, 0)


def holding(stack: Registry) -> tuple[int, int]:
    """Return the most tokens of a request on the largest decode worker ever, and on the largest one now."""
    return stack.tokens_max(Side.DECODE), stack.tokens_max_now(Side.DECODE)


def test_a_request_is_charged_to_each_side_with_what_it_takes_there(stack: Registry) -> None:
    need = Need(prompt_tokens=7, tokens=30)
    entry = stack.open_room("request", stack.place(need), need, 0)
    assert [stack.worker(each.incarnation).tokens for each in (P1, D1)] == [7, 9], "what it begins with"
    over(stack, entry)
    assert [stack.worker(each.incarnation).tokens for each in (P1, D1)] == [0, 0]


def test_no_worker_of_a_role_names_the_role() -> None:
    with pytest.raises(NoSuchWorker, match="no prefill worker is ready"):
        pair(registry_of(D1))
    with pytest.raises(NoSuchWorker, match="no decode worker is ready"):
        pair(registry_of(P1))


def test_bounded_admission_a_full_worker_is_worth_waiting_for() -> None:
    stack = registry_of(P1, replace(D1, rooms_max=1))
    entry = opened(stack)
    with pytest.raises(NoCapacity, match="every decode worker"):
        pair(stack)
    stack.side_retired(entry.id, Side.DECODE)
    pair(stack)


def test_a_missing_side_is_told_even_while_the_other_is_full() -> None:
    registry = registry_of(facts(Side.PREFILL, 1, rooms_max=1), D1)
    opened(registry)
    registry.leave(D1.incarnation, None, 0)
    with pytest.raises(NoSuchWorker, match="no decode worker is ready"):
        pair(registry)


def test_who_is_to_be_avoided_gets_the_request_only_if_there_is_no_other() -> None:
    stack = registry_of(P1, P2, D1)
    avoid = {P1.incarnation, D1.incarnation}
    assert [worker.facts for worker in placed(stack, Need(10, 10), avoid=avoid)] == [P2, D1]
    assert placed(stack, Need(10, 10), avoid=avoid | {P2.incarnation})[0].facts is P1
    stack.suspect(P2.incarnation)
    assert placed(stack, Need(10, 10), avoid=avoid)[0].facts is P1, "who is not ready is no other"


def test_who_is_to_be_avoided_is_not_taken_because_the_other_is_full() -> None:
    """A worker that fails everything at once always has a place."""
    stack = registry_of(P1, D1, replace(D2, rooms_max=1))
    entry = stack.open_room("request", placed(stack, Need(10, 10), avoid={D1.incarnation}), Need(10, 10), 0)
    assert entry.decode.name == D2.name
    with pytest.raises(NoCapacity):
        placed(stack, Need(10, 10), avoid={D1.incarnation})
    assert stack.place(Need(10, 10))[1].facts is D1


def test_who_is_too_small_is_no_other() -> None:
    stack = registry_of(P1, D1, replace(D2, tokens_max=5))
    assert placed(stack, Need(10, 10), avoid={D1.incarnation})[1].facts is D1


# ---- rooms


def test_rooms_of_one_request_come_newest_first_whatever_became_of_them(stack: Registry) -> None:
    first, second, third = (opened(stack) for _ in range(3))
    over(stack, second)
    over(stack, third, LOST)
    assert stack.find("request") == [third, second, first]


def test_canaries_take_no_kept_rooms_place(stack: Registry) -> None:
    """A worker that never gets ready makes one canary room a second."""
    failed = opened(stack)
    over(stack, failed, LOST)
    need = Need(10, 10)
    for _ in range(CANARY_ROOMS_FILED_MAX + 20):
        over(stack, stack.open_room("canary", pair(stack), need, 0, canary=True), LOST)
    assert stack.get(failed.id) is failed
    assert stack.known_count() == 1 + CANARY_ROOMS_FILED_MAX
    assert len(stack.find("canary")) == CANARY_ROOMS_FILED_MAX


def test_room_unique_ids_are_never_used_again(stack: Registry) -> None:
    seen: list[RoomId] = []
    for _ in range(5):
        entry = opened(stack)
        seen.append(entry.id)
        over(stack, entry)
    assert seen == [500, 501, 502, 503, 504]


def test_id_carries_no_placement_whoever_serves_the_next_room_its_id_is_the_next() -> None:
    stack = registry_of(P1, P2, D1, D2, first_room=500)
    pairs = [(prefill, decode) for prefill in (P1, P2) for decode in (D2, D1)]
    ids = [
        stack.open_room(
            "request",
            (stack.worker(prefill.incarnation), stack.worker(decode.incarnation)),
            Need(10, 10),
            0,
        ).id
        for prefill, decode in (*pairs, *reversed(pairs))
    ]
    assert ids == list(range(500, 508))


def test_find_is_by_the_whole_request_id_newest_first(stack: Registry) -> None:
    rooms = [stack.open_room(name, pair(stack), Need(10, 10), 0).id for name in ("a", "ab", "a-1", "a")]
    assert [entry.id for entry in stack.find("a")] == [rooms[3], rooms[0]]


def test_the_first_outcome_is_kept(stack: Registry) -> None:
    entry = opened(stack)
    assert stack.end(entry.id, LOST, 5)
    assert not stack.end(entry.id, None, 6)
    assert (entry.cause, entry.closing_ms, entry.phase) == (LOST, 5, RoomPhase.CLOSING)


def test_a_room_is_over_when_it_ended_and_both_sides_gave_back(stack: Registry) -> None:
    entry = opened(stack)
    phases = [entry.phase]
    for step in (
        lambda: stack.mark_streaming(entry.id),
        lambda: stack.side_retired(entry.id, Side.PREFILL),
        lambda: stack.side_retired(entry.id, Side.PREFILL),
        lambda: stack.end(entry.id, None, 0),
        lambda: stack.mark_streaming(entry.id),
        lambda: stack.side_retired(entry.id, Side.DECODE),
    ):
        step()
        phases.append(entry.phase)
    streaming, closing = [RoomPhase.STREAMING] * 3, [RoomPhase.CLOSING] * 2
    assert phases == [RoomPhase.OPEN, *streaming, *closing, RoomPhase.RETIRED]
    assert stack.open_count() == 0
    assert stack.get(entry.id) is entry


def test_zero_at_idle_load_is_taken_off_once(stack: Registry) -> None:
    entry = opened(stack, tokens=30)
    assert [worker.tokens for worker in stack.workers()] == [30, 30]
    for _ in range(2):
        stack.side_retired(entry.id, Side.DECODE)
    assert stack.worker(D1.incarnation).tokens == 0
    assert stack.worker(P1.incarnation).tokens == 30
    over(stack, entry)
    assert [(worker.tokens, worker.rooms) for worker in stack.workers()] == [(0, set()), (0, set())]


def test_room_issued_news_of_unknown_rooms_creates_nothing(stack: Registry) -> None:
    room = RoomId(1)
    stack.side_retired(room, Side.DECODE)
    stack.mark_streaming(room)
    stack.abandon(room)
    assert not stack.end(room, LOST, 0)
    assert not stack.record(room, Event(0, "decode-1", "failed"))
    assert stack.open_count() == 0
    with pytest.raises(UnknownRoom):
        stack.get(room)


def test_kept_rooms_are_bounded_and_failed_ones_are_kept_apart(stack: Registry) -> None:
    failed = []
    for number in range(6):
        entry = opened(stack)
        over(stack, entry, LOST if number % 2 else None)
        failed += [entry.id] if number % 2 else []
    assert [entry.id for entry in stack.rooms() if entry.cause] == failed[:-3:-1]
    assert sum(entry.cause is None for entry in stack.rooms()) == KEPT


@pytest.mark.parametrize("reason", [Reason.ANSWERED, Reason.CLIENT_GONE])
def test_a_client_that_had_enough_is_no_failure(stack: Registry, reason: Reason) -> None:
    entry = opened(stack)
    over(stack, entry, Cause(reason, "enough"))
    for _ in range(KEPT):
        over(stack, opened(stack))
    with pytest.raises(UnknownRoom):
        stack.get(entry.id)


def test_a_timeline_is_bounded_and_counts_what_it_dropped(stack: Registry) -> None:
    entry = opened(stack)
    for number in range(EVENTS_PER_ROOM_MAX + 2):
        assert stack.record(entry.id, Event(number, "decode-1", "landed"))
    assert (len(entry.events), entry.events_dropped) == (EVENTS_PER_ROOM_MAX, 2)


def test_a_line_is_read_once_and_only_when_somebody_asks(stack: Registry) -> None:
    reads = 0

    def read() -> Event:
        nonlocal reads
        reads += 1
        return Event(2, "decode-1", "landed")

    entry = opened(stack)
    first = Event(1, "bootstrap", "opened")
    for line in (first, read):
        entry.record(line)
    assert reads == 0
    for _ in range(2):
        assert entry.events == [first, Event(2, "decode-1", "landed")]
    assert reads == 1


def test_room_ends_an_ended_room_is_not_waited_for_for_ever(stack: Registry) -> None:
    entry = opened(stack)
    assert stack.overdue(10**9) == []
    stack.end(entry.id, LOST, 100)
    assert stack.overdue(100 + CLOSING_MS - 1) == []
    assert stack.overdue(100 + CLOSING_MS) == [entry]
    stack.abandon(entry.id)
    assert (entry.phase, stack.open_count()) == (RoomPhase.RETIRED, 0)
    assert [worker.tokens for worker in stack.workers()] == [0, 0]


def test_room_ends_a_room_that_nobody_ends_comes_to_light(stack: Registry) -> None:
    entry = opened(stack, now_ms=100)
    for side in Side:
        stack.side_retired(entry.id, side)
    assert stack.orphans(100 + OPEN_MS_MAX - 1) == []
    assert stack.orphans(100 + OPEN_MS_MAX) == [entry]
    stack.end(entry.id, Cause(Reason.DEADLINE, "nobody ended it"), 200)
    assert stack.orphans(10**12) == []
    assert stack.open_count() == 0


@pytest.mark.parametrize("asked", [(), (Side.PREFILL,), (Side.DECODE,)])
def test_room_ends_a_room_that_its_opener_brings_nowhere_ends_soon(
    stack: Registry, asked: tuple[Side, ...]
) -> None:
    entry = opened(stack, now_ms=100)
    stack.mark_delivered(entry.id, asked)
    assert stack.orphans(100 + DELIVERY_MS - 1) == []
    assert stack.orphans(100 + DELIVERY_MS) == [entry]
    stack.mark_delivered(entry.id, Side)
    assert stack.orphans(100 + DELIVERY_MS) == []
    assert stack.orphans(100 + OPEN_MS_MAX) == [entry]


def test_room_ends_a_room_that_both_workers_gave_back_waits_for_its_opener_and_no_longer(
    stack: Registry,
) -> None:
    entry = opened(stack)
    stack.side_retired(entry.id, Side.PREFILL)
    assert stack.orphans(5) == []
    stack.side_retired(entry.id, Side.DECODE)
    assert stack.orphans(10) == []
    assert stack.orphans(10 + OUTCOME_MS - 1) == []
    assert stack.orphans(10 + OUTCOME_MS) == [entry]
    stack.end(entry.id, LOST, 10 + OUTCOME_MS)
    assert stack.orphans(10 + 2 * OUTCOME_MS) == []


def apart(registry: Registry, prefill: WorkerFacts, decode: WorkerFacts) -> None:
    failed = Cause(Reason.CONNECT_FAILED, "no way there")
    for _ in range(BROKEN_AFTER):
        registry.pairs.ended((prefill.incarnation, decode.incarnation), failed, canary=False)


def test_a_pair_that_does_not_connect_gets_no_room_while_another_does() -> None:
    stack = registry_of(P1, P2, D1, D2)
    apart(stack, P1, D1)
    for _ in range(4):
        entry = opened(stack)
        assert (entry.prefill, entry.decode) != (P1, D1)
    assert stack.unreachable() == []


def test_the_only_pair_gets_rooms_though_it_does_not_connect_and_is_named() -> None:
    stack = registry_of(P1, D1)
    apart(stack, P1, D1)
    assert (opened(stack).prefill, opened(stack).decode) == (P1, D1)
    assert [(one.facts, other.facts) for one, other in stack.unreachable()] == [(P1, D1)]
    stack.pairs.ended((P1.incarnation, D1.incarnation), None, canary=True)
    assert stack.unreachable() == []


def test_whom_a_request_avoids_it_gets_before_a_pair_that_does_not_connect() -> None:
    stack = registry_of(P1, P2, D1)
    apart(stack, P1, D1)
    assert placed(stack, Need(10, 10), avoid={P2.incarnation})[0].facts is P2
