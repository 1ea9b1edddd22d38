"""Tests of the bootstrap's metrics: refused requests, lost workers, queue lengths and waiting times."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.bootstrap.admission.placement_request import QueueFull
from baton.fleet.need import Need
from baton.ids import RoomId
from baton.rooms.errors import Cause, NoSuchWorker, Reason
from baton.rooms.phases import Side
from baton.rooms.worker_load import WorkerLoad
from tests.bootstrap.scripted import House, house
from tests.wire.servers import until


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house(max_queue=1) as made:
        yield made


def count(at: House, name: str, **labels: str) -> float:
    value = at.metrics.get_sample_value(name, labels)
    assert value is not None, "it is there from the start"
    return value


async def test_a_full_queue_and_a_side_without_worker_are_counted_apart(at: House) -> None:
    for each in ("a", "b"):
        await at.admission.admit(each, 3, 5)
    waiting = asyncio.ensure_future(at.admission.admit("c", 3, 5))
    await until(lambda: at.admission.queued() == 1)
    with pytest.raises(QueueFull):
        await at.admission.admit("d", 3, 5)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    at.rooms.lose(at.decode.incarnation, "it has left", proof="left")
    with pytest.raises(NoSuchWorker):
        await at.admission.admit("e", 3, 5)
    refused = {
        why: count(at, "baton_admission_refused_requests_total", why=why)
        for why in ("queue_full", "too_late", "no_worker")
    }
    assert refused == {"queue_full": 1, "too_late": 0, "no_worker": 1}
    waited = count(at, "baton_admission_wait_seconds_count", **{"class": "default"})
    assert waited == 2, "those that got a room"


async def test_who_waits_and_for_how_long_is_told_by_class() -> None:
    async with house(max_queue=9) as at:
        for each in ("a", "b"):
            await at.admission.admit(each, 3, 5)
        classes = (-7, 0, 0, 3, 4)
        waiting = [asyncio.ensure_future(at.admission.admit("c", 3, 5, priority=each)) for each in classes]
        await until(lambda: at.admission.queued() == len(classes))

        def by_class(name: str) -> list[float]:
            return [count(at, name, **{"class": each}) for each in ("above", "default", "below")]

        assert by_class("baton_admission_queue_requests") == [1, 2, 2]
        at.rooms.answered(RoomId(1))
        at.retired(1)
        await waiting[0]
        assert by_class("baton_admission_queue_requests") == [0, 2, 2]
        assert by_class("baton_admission_wait_seconds_count") == [1, 2, 0]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert by_class("baton_admission_queue_requests") == [0, 0, 0]


async def test_a_canarys_room_that_fails_is_counted_apart(at: House) -> None:
    pair = (at.registry.worker(at.prefill.incarnation), at.registry.worker(at.decode.incarnation))
    cause = Cause(Reason.TRANSFER_FAILED, "no way to it")
    at.rooms.fail(at.admission.open_on("canary", pair, Need(5, 5)).id, cause)
    names = ("baton_rooms_failed_total", "baton_canaries_failed_total")
    assert [count(at, name, reason="transfer_failed") for name in names] == [0, 1]
    at.rooms.fail((await at.admission.admit("a", 3, 5)).id, cause)
    assert [count(at, name, reason="transfer_failed") for name in names] == [1, 1]


async def test_a_request_that_waited_for_too_long_is_counted() -> None:
    async with house(max_queue=1, queue_timeout_ms=10, places=1) as at:
        await at.admission.admit("a", 3, 5)
        with pytest.raises(TimeoutError):
            await at.admission.admit("b", 3, 5)
        assert count(at, "baton_admission_refused_requests_total", why="too_late") == 1


async def test_a_worker_is_lost_once_and_in_the_way_in_which_it_was_noticed_first(at: House) -> None:
    at.rooms.lose(at.prefill.incarnation, "its lease ran out", proof=None)
    at.exited("prefill-0", 111)  # said when nobody waits for it any more
    at.exited("decode-0", 222)
    lost = {
        (side, how): count(at, "baton_workers_lost_total", side=side, how=how)
        for side in ("prefill", "decode")
        for how in ("left", "exited", "silent")
    }
    assert {key for key, value in lost.items() if value} == {("prefill", "silent"), ("decode", "exited")}


async def test_places_are_those_of_ready_workers_and_say_how_many_are_taken(at: House) -> None:
    def places(side: str) -> tuple[float, float]:
        name = "baton_worker_places"
        return count(at, name, side=side, state="taken"), count(at, name, side=side, state="free")

    assert places("prefill") == (0, 2)
    await at.admission.admit("a", 3, 5)
    assert places("prefill") == places("decode") == (1, 1)
    at.rooms.answered(RoomId(1))
    at.retired(1)
    assert places("decode") == (0, 2)
    at.registry.drain(at.decode.incarnation)
    assert places("decode") == (0, 0)


async def test_kv_is_used_as_decode_says_it_and_by_open_rooms_elsewhere(at: House) -> None:
    def tokens(side: str) -> tuple[float, float]:
        name = "baton_worker_kv_tokens"
        return count(at, name, side=side, state="used"), count(at, name, side=side, state="left")

    assert tokens("prefill") == tokens("decode") == (0, 1_000)
    await at.admission.admit("a", 3, 5)
    assert (tokens("prefill"), tokens("decode")) == ((3, 997), (5, 995))
    load = WorkerLoad((100,), (0,), 0, 0, 0, RoomId(1))
    at.registry.mark_delivered(RoomId(1), Side)
    at.rooms.update_load(at.decode.incarnation, load)
    assert tokens("decode") == (900, 100)
    at.rooms.update_load(at.decode.incarnation, replace(load, requested=(300,), number=1))
    assert tokens("decode") == (1_000, 0), "more is asked for than is left"


async def test_those_who_wait_are_counted_on_the_side_that_has_no_space_for_the_first(at: House) -> None:
    def sides() -> tuple[float, float]:
        prefill, decode = (count(at, "baton_side_queue_requests", side=side.value) for side in Side)
        return prefill, decode

    assert sides() == (0, 0)
    at.rooms.update_load(at.decode.incarnation, WorkerLoad((0,), (0,), 9, 0, 0, RoomId(0)))
    waiting = asyncio.ensure_future(at.admission.admit("a", 3, 5))
    await until(lambda: at.admission.queued() == 1)
    assert sides() == (0, 1)
    at.rooms.update_load(at.decode.incarnation, WorkerLoad((100,), (0,), 0, 0, 0, RoomId(0), 1))
    await waiting
    assert sides() == (0, 0)


def of_stack(at: House) -> tuple[float, float, float]:
    """Return what a gateway reads: waiting requests, running requests, and the used share of the KV cache."""
    names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
    waiting, running, used = (count(at, f"vllm:{name}", model_name="m") for name in names)
    return waiting, running, used


async def test_a_gateway_reads_one_server_where_there_is_a_stack(at: House) -> None:
    assert of_stack(at) == (0, 0, 0)
    await at.admission.admit("a", 300, 500)
    assert of_stack(at)[:2] == (1, 0)
    assert of_stack(at)[2] == pytest.approx(0.302), "decode is the fuller side"
    at.registry.mark_streaming(RoomId(1))
    assert of_stack(at)[:2] == (0, 1)
    await at.admission.admit("b", 3, 5)
    queued = asyncio.ensure_future(at.admission.admit("c", 3, 5))
    await until(lambda: at.admission.queued() == 1)
    assert of_stack(at)[:2] == (2, 1), "one waits for workers, one for its prompt"
    at.rooms.answered(RoomId(1))
    assert of_stack(at)[:2] == (2, 0), "an answered request runs no more, although its room is not retired"
    at.retired(1)
    await queued
    for room in (2, 3):
        at.rooms.answered(RoomId(room))
        at.retired(room)
    assert of_stack(at) == (0, 0, 0)


async def test_a_gateway_does_not_see_canaries(at: House) -> None:
    pair = (at.registry.worker(at.prefill.incarnation), at.registry.worker(at.decode.incarnation))
    room = at.admission.open_on("canary", pair, Need(5, 5)).id
    assert of_stack(at)[:2] == (0, 0)
    at.registry.mark_streaming(room)
    assert of_stack(at)[:2] == (0, 0)


async def test_prefills_queue_is_told_in_seconds_of_one_worker(at: House) -> None:
    name = "baton_prefill_queue_seconds"
    assert count(at, name) == 0
    await at.admission.admit("a", 300, 500)
    assert count(at, name) == 0, "no throughput is known"
    load = WorkerLoad((0,), (0,), 0, 0, 0, RoomId(0), 1, tokens_waiting=100, tokens_per_s=200)
    at.rooms.update_load(at.prefill.incarnation, load)
    assert count(at, name) == 2, "100 tokens that it reports, and 300 placed since"
    await at.admission.admit("b", 100, 105)
    queued = asyncio.ensure_future(at.admission.admit("c", 50, 55))
    await until(lambda: at.admission.queued() == 1)
    assert count(at, name) == 2.75, "the queue at the router counts, too"
    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    at.registry.drain(at.prefill.incarnation)
    assert count(at, name) == 0, "the work of a draining worker is no reason for another one"
