"""Tests of admission: the order of the queue, refusals with a time to retry, and that nothing is left
over."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.bootstrap.admission.placement_request import NotInTime, QueueFull, Retry
from baton.fleet.fair_queue import QUANTUM
from baton.fleet.need import Need
from baton.fleet.placement import Pair
from baton.fleet.room_entry import RoomEntry, RoomPhase
from baton.fleet.room_table import DELIVERY_MS
from baton.fleet.worker_table import EXPECTED_MS
from baton.ids import Incarnation, RoomId
from baton.pages.block_hashes import BLOCK_TOKENS, hash_blocks
from baton.rooms.errors import Cause, NoSuchWorker, Reason, TooLarge, TurnStalled
from baton.rooms.phases import Side
from baton.wire.service_role import ServiceRole
from tests.bootstrap.scripted import LEASE_MS, DecodeWorker, House, PrefillWorker, house
from tests.patience import PATIENCE_S
from tests.wire.servers import until


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house() as made:
        yield made


async def fill(at: House) -> None:
    """Take every place: rooms 1 and 2."""
    for place in range(at.prefill.rooms_max):
        await at.admission.admit(f"early-{place}", 3, 5)


def late(at: House, name: str) -> "asyncio.Task[RoomEntry]":
    return asyncio.ensure_future(at.admission.admit(name, 3, 5))


def small_beside(at: House) -> DecodeWorker:
    """A decode worker that cannot hold what the other one can."""
    return DecodeWorker(
        "decode-small", at.decode.side, Incarnation(23), tokens_max=100, address=at.decode.address
    )


async def test_those_who_wait_get_places_in_the_order_in_which_they_came(at: House) -> None:
    await fill(at)
    waiting = [late(at, "a"), late(at, "b")]
    await until(lambda: at.admission.queued() == 2)
    third = late(at, "c")
    await until(lambda: at.admission.queued() == 3)
    at.rooms.answered(RoomId(1))
    at.retired(1)
    assert (await waiting[0]).request_id == "a"
    assert at.admission.queued() == 2
    at.rooms.answered(RoomId(2))
    at.retired(2)
    assert (await waiting[1]).request_id == "b"
    third.cancel()
    with pytest.raises(asyncio.CancelledError):
        await third
    assert at.admission.queued() == 0


async def test_those_who_wait_get_places_by_class_and_within_one_by_turns_of_tenants(at: House) -> None:
    await fill(at)

    def wait(name: str, priority: int = 0, tenant: bytes = b"") -> "asyncio.Task[RoomEntry]":
        coming = at.admission.admit(name, QUANTUM, QUANTUM, priority=priority, tenant=tenant)
        return asyncio.ensure_future(coming)

    waiting = [wait("low", 1), *(wait(f"a{each}", tenant=b"a") for each in range(2))]
    await until(lambda: at.admission.queued() == 3)
    waiting += [wait("b", tenant=b"b"), wait("high", -1)]
    await until(lambda: at.admission.queued() == 5)
    assert [name for name, _ in at.admission.waiting()] == ["high", "a0", "a1", "b", "low"]
    details = {name: event.detail for name, event in at.admission.waiting()}
    assert (details["high"], details["b"]) == ("class -1, 0 before it", "class 0, 1 before it")
    served = []
    for room in range(1, 6):
        at.rooms.answered(RoomId(room))
        at.retired(room)
        served.append(at.entry(room + 2).request_id)
    assert served == ["high", "a0", "b", "a1", "low"]
    await asyncio.gather(*waiting)


async def test_a_queue_full_of_a_class_leaves_those_above_it_a_place(at: House) -> None:
    await fill(at)
    waiting = [
        asyncio.ensure_future(at.admission.admit(f"low-{each}", 3, 5, priority=1)) for each in range(4)
    ]
    await until(lambda: at.admission.queued() == 4)
    with pytest.raises(QueueFull):
        await at.admission.admit("one too many", 3, 5, priority=1)
    waiting += [late(at, f"{each}") for each in range(4)]
    await until(lambda: at.admission.queued() == 8)
    with pytest.raises(QueueFull):
        await at.admission.admit("one too many", 3, 5)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert at.admission.queued() == 0


async def test_bounded_admission_twice_as_many_is_the_most_and_the_lowest_class_makes_place(
    at: House,
) -> None:
    """This holds for any number of classes. The newest request of the tenant with the most waiting is
    refused."""
    await fill(at)

    def waits(name: str, priority: int, tenant: bytes = b"") -> "asyncio.Future[RoomEntry]":
        return asyncio.ensure_future(at.admission.admit(name, 3, 5, priority=priority, tenant=tenant))

    lowest = [waits(f"low-{each}", 2, b"few" if each == 3 else b"many") for each in range(4)]
    middle = [waits(f"middle-{each}", 1) for each in range(4)]
    await until(lambda: at.admission.queued() == 8)
    first = waits("first", 0)
    with pytest.raises(QueueFull, match="its place went to a request of a higher class"):
        await lowest[2]
    assert at.admission.queued() == 8
    with pytest.raises(QueueFull):
        await at.admission.admit("one too many", 3, 5, priority=2)
    at.rooms.answered(RoomId(1))
    at.retired(1)
    assert (await first).request_id == "first"
    rest = [*lowest[:2], lowest[3], *middle]
    assert not any(each.done() for each in rest)
    for each in rest:
        each.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
    assert at.admission.queued() == 0


async def test_nobody_overtakes_the_queue(at: House) -> None:
    await fill(at)
    first = late(at, "a")
    await until(lambda: at.admission.queued() == 1)
    at.registry.side_retired(RoomId(1), at.prefill.side)  # space, and nobody was woken yet
    at.registry.side_retired(RoomId(1), at.decode.side)
    second = late(at, "b")
    assert (await first).request_id == "a"
    assert [name for name, _ in at.admission.waiting()] == ["b"]
    second.cancel()


async def test_no_starvation_who_avoids_a_worker_holds_up_nobody_who_does_not(at: House) -> None:
    """Rooms that failed on decode-0 wait for decode-1, which is full, while decode-0 has places."""
    at.join(DecodeWorker("decode-1", at.decode.side, Incarnation(23), rooms_max=1, address=at.decode.address))
    more = PrefillWorker(
        "prefill-1", at.prefill.side, Incarnation(12), rooms_max=9, address=at.prefill.address
    )
    at.join(more)
    avoiding = Retry(RoomId(9), Reason.ENGINE_FAILED, frozenset({at.decode.incarnation}), wait_s=600.0)
    assert (await at.admission.admit("first", 3, 5, avoiding)).decode.name == "decode-1"
    retries = [asyncio.ensure_future(at.admission.admit(name, 3, 5, avoiding)) for name in ("r1", "r2")]
    await until(lambda: at.admission.queued() == 2)
    for room in (2, 3):
        assert (await at.admission.admit("fresh", 3, 5)).id == room
        assert at.entry(room).decode.name == "decode-0"
    waiting = [late(at, name) for name in ("a", "b")]
    await until(lambda: at.admission.queued() == 4)
    assert [name for name, _ in at.admission.waiting()] == ["r1", "r2", "a", "b"]
    assert [name for name, _ in at.admission.waiting(had_none=True)] == ["a", "b"]
    at.rooms.answered(RoomId(2))
    at.retired(2)
    assert (await waiting[0]).decode.name == "decode-0", "those before it in the queue wait for the other"
    at.rooms.answered(RoomId(1))
    at.retired(1)
    assert (await retries[0]).decode.name == "decode-1"
    assert [name for name, _ in at.admission.waiting()] == ["r2", "b"]
    for each in (retries[1], waiting[1]):
        each.cancel()
    await asyncio.gather(retries[1], waiting[1], return_exceptions=True)


async def test_a_worker_whose_stream_broke_is_waited_for_while_it_has_its_lease(at: House) -> None:
    at.registry.suspect(at.decode.incarnation)
    waiting = [late(at, name) for name in ("a", "b")]
    await until(lambda: at.admission.queued() == 2)
    at.rooms.renew(at.prefill.incarnation)
    assert not any(each.done() for each in waiting)
    at.rooms.renew(at.decode.incarnation)
    assert [(await each).request_id for each in waiting] == ["a", "b"]


async def test_a_prompt_is_hashed_once_however_often_it_is_looked_at(
    at: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []

    def blocks(prompt: tuple[int, ...], salt: int) -> tuple[bytes, ...]:
        hashed.append(len(prompt))
        return ()

    monkeypatch.setattr("baton.bootstrap.admission.admission.hash_blocks", blocks)
    await fill(at)
    prompt = (1, 2, 3)
    await_place = asyncio.ensure_future(at.admission.admit("a", 3, 5, prompt=prompt))
    await until(lambda: at.admission.queued() == 1)
    assert not hashed, "there is nothing to choose"
    more = PrefillWorker("prefill-1", at.prefill.side, Incarnation(12), address=at.prefill.address)
    at.join(more)
    for _ in range(5):
        at.rooms.renew(at.decode.incarnation)
    assert hashed == [3]
    await_place.cancel()


async def test_same_root_only_a_prompt_is_hashed_with_its_salt(at: House) -> None:
    more = PrefillWorker("prefill-1", at.prefill.side, Incarnation(12), address=at.prefill.address)
    at.join(more)
    prompt = tuple(range(BLOCK_TOKENS))
    entry = await at.admission.admit("a", 100, 200, prompt=prompt, salt=7)
    held = next(each for each in at.registry.workers() if each.facts.name == entry.names[Side.PREFILL])
    assert held.cached_tokens(hash_blocks(prompt, 7)) == BLOCK_TOKENS
    assert held.cached_tokens(hash_blocks(prompt)) == held.cached_tokens(hash_blocks(prompt, 8)) == 0


async def test_what_no_worker_can_ever_hold_is_not_hoped_for(at: House) -> None:
    retry = Retry(RoomId(9), Reason.DECODE_LOST, frozenset(), wait_s=600.0, fit_before=False)
    with pytest.raises(TooLarge, match="no prefill worker can hold"):
        await asyncio.wait_for(at.admission.admit("a", 10**9, 10**9, retry), PATIENCE_S)
    assert at.admission.queued() == 0


async def test_what_the_worker_that_is_gone_could_hold_is_hoped_for(at: House) -> None:
    at.join(small_beside(at))
    at.exited("decode-0", 222)
    retry = Retry(RoomId(9), Reason.DECODE_LOST, frozenset(), wait_s=600.0)
    waiting = asyncio.ensure_future(at.admission.admit("a", 3, 500, retry))
    await until(lambda: at.admission.queued() == 1)
    at.decode.incarnation = Incarnation(24)
    at.join(at.decode)
    assert (await waiting).decode.name == "decode-0"


async def test_no_starvation_what_waits_for_a_large_worker_leaves_the_small_one_to_others(at: House) -> None:
    at.join(small_beside(at))
    more = PrefillWorker(
        "prefill-1", at.prefill.side, Incarnation(12), rooms_max=99, address=at.prefill.address
    )
    at.join(more)
    for number in range(at.decode.rooms_max):
        await at.admission.admit(f"large-{number}", 3, 500)
    large = [asyncio.ensure_future(at.admission.admit(f"late-{number}", 3, 500)) for number in range(2)]
    await until(lambda: at.admission.queued() == 2)
    assert (await at.admission.admit("small", 3, 5)).decode.name == "decode-small"
    at.rooms.answered(RoomId(1))
    at.retired(1)
    assert (await large[0]).decode.name == "decode-0"
    large[1].cancel()


async def test_a_place_that_is_free_costs_no_look_at_all_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with house(max_queue=300) as at:
        await fill(at)
        waiting = [late(at, str(number)) for number in range(200)]
        await until(lambda: at.admission.queued() == 200)
        looks = looks_for_pairs(at, monkeypatch)
        at.rooms.answered(RoomId(1))
        at.retired(1)
        assert (await waiting[0]).request_id == "0"
        assert len(looks) <= 4, "one room, one look that fails, at each of the two sides that report"
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def looks_for_pairs(at: House, monkeypatch: pytest.MonkeyPatch) -> list[Need]:
    """Record every request that placement is looked up for from now on, and return the growing list."""
    looks: list[Need] = []
    place = at.registry.place

    def counted(need: Need, *more: Any) -> Pair:
        looks.append(need)
        return place(need, *more)

    monkeypatch.setattr(at.registry, "place", counted)
    return looks


async def test_failure_adds_no_load_who_hopes_for_a_worker_is_not_looked_at_for_other_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each wake looks for a pair once. Other requests that wait for the same are skipped, as they are when
    all workers are full."""
    async with house(places=9) as at:
        at.exited("decode-0", 222)
        retry = Retry(RoomId(9), Reason.DECODE_LOST, frozenset(), wait_s=600.0)
        hoping = [asyncio.ensure_future(at.admission.admit("a", 3, 5, retry)) for _ in range(4)]
        waiting = [late(at, f"{each}") for each in range(4)]
        await until(lambda: at.admission.queued() == 8)
        counts = []
        for _ in range(6):
            looks = looks_for_pairs(at, monkeypatch)
            at.admission.wake()
            for _ in range(3):
                await asyncio.sleep(0)
            counts.append(len(looks))
        assert counts[1:] == [1] * 5, "at the first of those that wait"
        at.decode.incarnation = Incarnation(23)
        at.join(at.decode)
        await asyncio.gather(*hoping, *waiting)
        assert at.admission.queued() == 0


async def test_who_comes_and_has_no_worker_is_told_so_though_others_wait(at: House) -> None:
    at.join(small_beside(at))
    await fill(at)
    waiting = late(at, "a")
    await until(lambda: at.admission.queued() == 1)
    at.registry.drain(at.decode.incarnation)
    with pytest.raises(NoSuchWorker, match="no decode worker that is ready can hold 500 tokens"):
        await at.admission.admit("b", 3, 500)
    waiting.cancel()


async def test_who_waits_behind_one_that_may_be_served_is_told_when_there_is_no_worker_for_it_any_more(
    at: House,
) -> None:
    at.join(small_beside(at))
    await fill(at)
    small = late(at, "small")
    await until(lambda: at.admission.queued() == 1)
    large = asyncio.ensure_future(at.admission.admit("large", 3, 500))
    await until(lambda: at.admission.queued() == 2)
    at.rooms.lose(at.decode.incarnation, "it has left", proof="left")
    with pytest.raises(NoSuchWorker, match="no decode worker can hold 500 tokens"):
        await large
    assert not small.done()
    small.cancel()


async def test_no_starvation_who_had_a_room_keeps_no_newcomer_from_one_however_many_they_are() -> None:
    """The requests that had a room avoid the worker that has places."""
    async with house(max_queue=200, places=9) as at:
        full = DecodeWorker("decode-1", at.decode.side, Incarnation(23), rooms_max=1, address="127.0.0.1:1")
        at.join(full)
        at.registry.drain(at.decode.incarnation)
        await at.admission.admit("early", 3, 5)
        avoiding = Retry(RoomId(9), Reason.ENGINE_FAILED, frozenset({Incarnation(24)}), wait_s=600.0)
        had = [asyncio.ensure_future(at.admission.admit("had", 3, 5, avoiding)) for _ in range(70)]
        waiting = late(at, "a")
        await until(lambda: at.admission.queued() == 71)
        third = DecodeWorker("decode-2", at.decode.side, Incarnation(24), rooms_max=9, address="127.0.0.1:1")
        at.join(third)
        assert (await waiting).decode.name == "decode-2"
        assert not any(each.done() for each in had)
        for each in had:
            each.cancel()
        await asyncio.gather(*had, return_exceptions=True)


async def test_a_room_that_is_opened_as_its_time_ends_is_taken() -> None:
    async with house(queue_timeout_ms=50) as at:
        await fill(at)
        waiting = late(at, "a")
        await until(lambda: at.admission.queued() == 1)

        def retire() -> None:
            at.rooms.answered(RoomId(1))
            at.retired(1)

        asyncio.get_running_loop().call_later(0.01, retire)
        time.sleep(0.2)  # noqa: ASYNC251: both are due when the loop looks again, the end of its time last
        entry = await waiting
        assert (entry.request_id, entry.cause) == ("a", None)
        assert at.admission.queued() == 0


async def test_past_its_bound_the_queue_takes_nobody(at: House) -> None:
    await fill(at)
    waiting = [late(at, str(each)) for each in range(4)]
    await until(lambda: at.admission.queued() == 4)
    with pytest.raises(QueueFull):
        await at.admission.admit("one too many", 3, 5)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert at.admission.queued() == 0


async def test_waiting_has_an_end() -> None:
    async with house(queue_timeout_ms=1) as at:
        await fill(at)
        with pytest.raises(TimeoutError):
            await at.admission.admit("late", 3, 5)
        assert at.admission.queued() == 0


async def test_who_would_wait_too_long_is_told_so_at_once_and_when_to_come_back() -> None:
    async with house(queue_timeout_ms=5_000, max_queue=50) as at:
        await fill(at)
        waiting = [late(at, str(each)) for each in range(12)]
        await until(lambda: at.admission.queued() == 12)
        for room in range(1, 5):
            at.clock.advance(1_000)
            at.rooms.answered(RoomId(room))
            at.retired(room)
        assert at.admission.queued() == 4, "a second each: those behind them are turned away by now"
        await until(lambda: waiting[-1].done())
        assert [each.done() for each in waiting] == [True] * 4 + [False] * 4 + [True] * 4
        with pytest.raises(NotInTime, match="it would wait 9 s for workers: 8 requests before it"):
            await waiting[-1]
        with pytest.raises(NotInTime, match="it would wait 5 s for workers: 4 requests before it"):
            await at.admission.admit("late", 3, 5)
        assert at.admission.retry_after_s() == 2, "by then it will wait 3.3 s, as it may"
        for room in range(5, 8):
            at.rooms.answered(RoomId(room))
            at.retired(room)
        another = late(at, "soon enough")
        await until(lambda: at.admission.queued() == 2)
        for each in (*waiting, another):
            each.cancel()
        await asyncio.gather(*waiting, another, return_exceptions=True)


async def test_a_request_given_up_exactly_when_its_room_opens_leaves_no_room(at: House) -> None:
    await fill(at)
    waiting = late(at, "a")
    await until(lambda: at.admission.queued() == 1)
    at.rooms.answered(RoomId(1))
    at.retired(1)
    assert at.entry(3).request_id == "a", "its room is open, and it has not heard of it"
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert at.entry(3).phase is RoomPhase.RETIRED
    at.rooms.answered(RoomId(2))
    at.retired(2)
    await at.at_rest()


async def test_a_new_worker_and_one_that_is_back_wake_the_queue(at: House) -> None:
    at.decode.rooms_max = 9
    at.rooms.lose(at.decode.incarnation, "replaced", proof="left")
    at.decode.incarnation = Incarnation(23)
    at.join(at.decode)
    await fill(at)
    waiting = late(at, "a")
    await until(lambda: at.admission.queued() == 1)
    other = PrefillWorker("prefill-1", at.prefill.side, Incarnation(12), address=at.prefill.address)
    at.join(other)
    assert (await waiting).names[Side.PREFILL] == "prefill-1"
    await at.admission.admit("b", 3, 5)
    at.registry.suspect(other.incarnation)
    waiting = late(at, "c")
    await until(lambda: at.admission.queued() == 1)
    at.registry.side_retired(RoomId(3), other.side)
    at.rooms.renew(other.incarnation)
    assert (await waiting).names[Side.PREFILL] == "prefill-1"


async def test_who_waits_for_a_role_that_is_gone_is_told_so(at: House) -> None:
    await fill(at)
    waiting = late(at, "a")
    await until(lambda: at.admission.queued() == 1)
    at.rooms.lose(at.prefill.incarnation, "it has left", proof="left")
    with pytest.raises(NoSuchWorker, match="prefill"):
        await waiting
    assert at.admission.queued() == 0


async def test_where_a_worker_was_lost_a_moment_ago_a_new_request_waits_for_the_next(at: House) -> None:
    at.exited(at.decode.name, at.decode.pid)
    waiting = late(at, "a")
    await until(lambda: at.admission.queued() == 1)
    at.decode.incarnation = Incarnation(23)
    at.join(at.decode, proven=False)
    assert not waiting.done()
    at.rooms.proven(at.decode.incarnation)
    assert (await waiting).request_id == "a"


async def test_a_new_request_waits_for_what_starts_in_place_of_a_worker_that_broke_and_of_none_that_leaves(
    at: House,
) -> None:
    at.admission.drain(at.decode.incarnation)
    with pytest.raises(NoSuchWorker, match="no decode worker is ready"):
        await at.admission.admit("a", 3, 5)
    at.admission.drain(at.decode.incarnation, broken=True)
    waiting = late(at, "b")
    await until(lambda: at.admission.queued() == 1)
    at.exited(at.decode.name, at.decode.pid)
    at.decode.incarnation = Incarnation(23)
    at.join(at.decode, proven=False)
    assert not waiting.done()
    at.rooms.proven(at.decode.incarnation)
    assert (await waiting).request_id == "b"


@pytest.mark.parametrize("joins", [False, True])
async def test_a_worker_is_expected_for_a_while_and_then_no_more(at: House, *, joins: bool) -> None:
    at.exited(at.decode.name, at.decode.pid)
    waiting = late(at, "a")
    await until(lambda: at.admission.queued() == 1)
    at.clock.advance(EXPECTED_MS - 1)
    at.decode.incarnation = Incarnation(23)
    if joins:
        at.join(at.decode, proven=False)
    at.admission.wake()
    assert not waiting.done()
    at.clock.advance(1)
    at.admission.wake()
    assert at.admission.queued() == joins, "one that has just registered is about to be tried"
    at.clock.advance(EXPECTED_MS)
    at.admission.wake()
    with pytest.raises(NoSuchWorker, match="no decode worker is ready"):
        await waiting
    with pytest.raises(NoSuchWorker):
        await at.admission.admit("b", 3, 5)


async def test_time_ends_leases_rooms_that_nobody_reports_and_queues_that_nobody_woke(at: House) -> None:
    await fill(at)
    at.rooms.answered(RoomId(1))
    at.rooms.follow(RoomId(2), lambda _: None)
    waiting = late(at, "a")
    await until(lambda: at.admission.queued() == 1)
    keeper = asyncio.ensure_future(at.rooms.keep_time())
    at.clock.advance(LEASE_MS - 1)
    for worker in (at.prefill, at.decode):
        at.rooms.renew(worker.incarnation)
    for _ in range(30):
        at.clock.advance(LEASE_MS - 1)
        for worker in (at.prefill, at.decode):
            at.rooms.renew(worker.incarnation)
    assert (await asyncio.wait_for(waiting, PATIENCE_S)).request_id == "a", (
        "room 1 was filed without a report"
    )
    assert "filed" in at.events(1)
    for _ in range(4):
        at.clock.advance(LEASE_MS // 3)
        at.rooms.look()
    assert not at.registry.workers()
    causes = {at.entry(room).cause for room in (2, 3)}
    assert {cause.reason.value for cause in causes if cause} == {"prefill_lost"}
    assert all("its lease ran out" in cause.text for cause in causes if cause)
    keeper.cancel()


async def test_honest_health_rooms_of_a_worker_whose_turn_does_not_end_fail_at_once_and_say_so(
    at: House,
) -> None:
    await fill(at)
    with pytest.raises(TurnStalled):
        at.rooms.renew(at.decode.incarnation, turn_ms=3_200)
    assert [worker.facts.name for worker in at.registry.workers()] == [at.prefill.name]
    text = f"decode worker {at.decode.name}: its turn has not ended for 3.2 s"
    assert {at.entry(room).cause for room in (1, 2)} == {Cause(Reason.DECODE_LOST, text)}
    assert at.registry.departed() == [], "a turn that stands still proves nothing"
    at.join(at.decode)
    assert at.registry.worker(at.decode.incarnation).has_free_room, "it is back as it was, without a restart"


async def test_live_is_not_lost_a_lease_runs_out_only_before_what_was_heard(at: House) -> None:
    heard_ms = at.clock.now_ms()
    for _ in range(12):
        at.clock.advance(LEASE_MS // 3)
        at.rooms.look(heard_ms)
    assert len(at.registry.workers()) == 2
    at.rooms.look(at.clock.now_ms())
    assert not at.registry.workers()


async def test_a_room_that_its_opener_forgets_gives_its_places_back(at: House) -> None:
    for number in (1, 2):
        await at.admission.admit(f"{number}", 3, 5)
    at.registry.mark_delivered(RoomId(2), {Side.DECODE})
    at.prefill.absent = at.decode.absent = {1, 2}
    keeper = asyncio.ensure_future(at.rooms.keep_time())
    at.clock.advance(DELIVERY_MS)
    for worker in (at.prefill, at.decode):
        at.rooms.renew(worker.incarnation)
    await until(lambda: at.registry.open_count() == 0)
    causes = [at.entry(room).cause for room in (1, 2)]
    text = "its opener never brought it to"
    assert causes == [
        Cause(Reason.DEADLINE, f"{text} {which}") for which in ("decode and prefill", "prefill")
    ]
    assert all(worker.tokens == 0 for worker in at.registry.workers())
    keeper.cancel()


async def test_ways_to_workers_that_are_gone_are_closed(at: House) -> None:
    at.channels.to(at.prefill.address, ServiceRole.PREFILL, at.prefill.incarnation)
    at.channels.to(at.prefill.address, ServiceRole.PREFILL, Incarnation(999))
    keeper = asyncio.ensure_future(at.rooms.keep_time())
    await until(lambda: at.channels.incarnations() == {at.prefill.incarnation})
    await at.admission.admit("a", 3, 5)
    at.rooms.lose(at.prefill.incarnation, "silent", proof=None)
    at.rooms.look()
    await asyncio.sleep(0)
    assert at.prefill.incarnation in at.channels.incarnations(), "an open room has it still"
    at.retired(1)
    await until(lambda: at.prefill.incarnation not in at.channels.incarnations())
    keeper.cancel()


async def test_when_the_process_ends_those_who_wait_and_those_who_are_served_are_told_why(at: House) -> None:
    await fill(at)
    waiting = late(at, "a")
    await until(lambda: at.admission.queued() == 1)
    why = Cause(Reason.BOOTSTRAP_LOST, "the bootstrap stops")
    at.rooms.end_all(why)
    with pytest.raises(NoSuchWorker, match="the bootstrap stops"):
        await waiting
    assert [at.entry(room).cause for room in (1, 2)] == [why, why]
    with pytest.raises(NoSuchWorker, match="the bootstrap stops"):
        await at.admission.admit("afterwards", 3, 5)
    for room in (1, 2):
        at.retired(room)
    await at.at_rest()


async def test_when_the_process_ends_a_request_that_hopes_for_a_worker_hopes_no_more(at: House) -> None:
    at.exited("decode-0", 222)
    retry = Retry(RoomId(9), Reason.DECODE_LOST, frozenset(), wait_s=600.0)
    hoping = asyncio.ensure_future(at.admission.admit("a", 3, 5, retry))
    await until(lambda: at.admission.queued() == 1)
    at.rooms.end_all(Cause(Reason.BOOTSTRAP_LOST, "the bootstrap stops"))
    with pytest.raises(NoSuchWorker, match="the bootstrap stops"):
        await hoping
    assert at.admission.queued() == 0
