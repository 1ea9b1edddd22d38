"""Tests that a room which a full worker refused is no failure, and that its request waits again."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count as count_up

import pytest

from baton.api.backend import BackendError, NoWorker, Overloaded, RoomFailed
from baton.fleet.need import Need
from baton.ids import RoomId
from baton.rooms.errors import Cause, Reason, RosterFull
from baton.rooms.phases import Side
from baton.telemetry.room_spans import RoomSpans
from baton.wire.baton.v1 import rooms_pb2
from baton.wire.load_messages import load_from_wire
from tests.bootstrap.scripted import CANARY, House, ScriptedWorker, Step, accepted, asked, house, read
from tests.bootstrap.test_request_stream import PairHealth, broken, decodes, prefills, two_pairs
from tests.bootstrap.test_request_timeline import story
from tests.bootstrap.test_retracted import count, failures, next_token, retracted
from tests.trace.notes import PARENT, Notes
from tests.wire.servers import until

P, D = Side.PREFILL, Side.DECODE
TAKEN = "all 10 places for rooms are taken"
FULL: list[Step] = [RosterFull(TAKEN)]
DECODE_FULL = Cause(Reason.WORKER_FULL, f"decode worker decode-0 is full: {TAKEN}")
numbers = count_up(1)


def report(others: int = 0) -> rooms_pb2.WorkerLoad:
    """Return a worker's next report of its load. `others`: number of other bootstraps' rooms on it."""
    return rooms_pb2.WorkerLoad(
        number=next(numbers), free_pages=[1_000], asked_pages=[0], running_max=64, other_rooms=others
    )


def says(at: House, worker: ScriptedWorker, others: int = 0) -> None:
    """Let a worker report its load to the bootstrap."""
    at.rooms.update_load(worker.incarnation, load_from_wire(report(others)))
    at.admission.wake()


@pytest.fixture
async def at() -> AsyncIterator[House]:
    """A house in which a request may have one room that fails."""
    async with house(rooms_max=1, places=9) as made:
        yield made


@pytest.fixture
async def pairs() -> AsyncIterator[PairHealth]:
    """A house with a second pair, which only requests get that find no place on the first one."""
    async with two_pairs(rooms_max=1, places=9) as made:
        yield made


@pytest.mark.parametrize("side", list(Side), ids=lambda side: side.value)
async def test_full_is_no_failure_the_request_goes_on_elsewhere_at_once(
    pairs: PairHealth, side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """It costs no attempt, no worker and no pair is blamed, and nothing is counted or logged as failed."""
    at, notes = pairs, Notes()
    at.rooms.timelines.spans = RoomSpans(notes)
    full, other = (at.prefill, at.decode) if side is P else (at.decode, at.prefill)
    full.script, other.scripts = FULL, [[accepted(other.side)]]
    for worker, script in ((at.prefill, prefills()), (at.prefill_1, prefills()), (at.decode, decodes())):
        worker.script = worker.script or script
    at.decode_1.script = decodes()
    request = replace(asked(), trace=PARENT)
    assert await read(await at.backend.generate(request)) == ([7, 8, 9], "length")
    assert full.called == [2], "it has said that it is full"
    first, second = at.entry(2), at.entry(3)
    text = f"{side.value} worker {full.name} is full: {TAKEN}"
    assert (first.cause, first.has_failed) == (Cause(Reason.WORKER_FULL, text), False)
    told = {event.name: event.detail for event in first.events}
    assert (told["worker full"], told["goes on"]) == (text, f"as room 3 {second.where}")
    assert {"failed", "retried", "not retried"}.isdisjoint(told)
    assert second.events[0].detail.endswith(", for room 2: worker_full")
    assert second.worker(side).name == f"{side.value}-1"
    assert failures(at) == 0
    assert count(at, "baton_rooms_worker_full_total") == 1
    assert count(at, "baton_rooms_retracted_total") == 0
    assert at.registry.pairs.failures == {}
    assert [record for record in caplog.records if record.levelname not in ("DEBUG", "INFO")] == []
    assert [span.error for span in notes.spans] == [None] * 2
    await until(lambda: other.cancels.get(2) == "worker_full")
    at.prefill.cancelled.set()
    at.decode.cancelled.set()
    await at.all_at_rest(2, 3)
    assert list(at.registry.index.failures()) == []


async def test_full_is_no_failure_however_often_it_happens(at: House) -> None:
    """Without another worker, each report of a place brings one more try. A request may have one room that
    fails."""
    at.prefill.script = [accepted(P)]
    at.decode.scripts = [FULL] * 6
    at.decode.says = report(others=9)
    reading = asyncio.ensure_future(read(await at.backend.generate(asked())))
    for room in range(1, 7):
        await until(lambda: at.admission.queued() == 1)
        at.admission.wake()
        at.rooms.renew(at.decode.incarnation)
        assert at.decode.called == list(range(1, room + 1)), (
            "nothing is tried before the worker's next report"
        )
        at.decode.says = report(others=9)
        if room == 6:
            at.prefill.script, at.decode.script = prefills(), decodes()
        says(at, at.decode)
    assert await reading == ([7, 8, 9], "length")
    assert at.decode.called == list(range(1, 8))
    assert failures(at) == 0


async def test_a_report_with_the_refusal_is_none_of_a_free_place(at: House) -> None:
    """The load that came with the refusal names a place that was free a moment later, or counts rooms in
    another way."""
    at.prefill.script, at.decode.script = [accepted(P)], FULL
    at.decode.says = report()
    reading = asyncio.ensure_future(read(await at.backend.generate(asked())))
    await until(lambda: at.admission.queued() == 1)
    late = asyncio.ensure_future(at.admission.admit("late", 3, 5))
    await until(lambda: at.admission.queued() == 2)
    for each in (reading, late):
        each.cancel()
    await asyncio.gather(reading, late, return_exceptions=True)
    assert at.decode.called == [1]


async def test_its_turn_comes_before_that_of_all_who_came_later(at: House) -> None:
    """The refused request had its turn already. It comes before requests of a higher class, too."""
    at.prefill.script, at.decode.scripts = [accepted(P)], [FULL]
    at.decode.says = report(others=9)
    stream = await at.backend.generate(asked())
    await until(lambda: at.entry(1).cause == DECODE_FULL)
    above = asyncio.ensure_future(at.admission.admit("above", 3, 5, priority=-1))
    await until(lambda: at.admission.queued() == 1)
    reading = asyncio.ensure_future(read(stream))
    await until(lambda: at.admission.queued() == 2)
    at.prefill.script, at.decode.script = prefills(), decodes()
    says(at, at.decode, others=7)  # the refused room counts there until prefill gives its part back
    assert await reading == ([7, 8, 9], "length")
    assert not above.done()
    above.cancel()
    await asyncio.gather(above, return_exceptions=True)


async def end_of(at: House, error: type[BackendError]) -> BackendError:
    """Return the error of a request whose rooms are all refused."""
    at.prefill.script, at.decode.script = [accepted(P)], FULL
    at.decode.says = report(others=9)
    stream = await at.backend.generate(asked())
    with pytest.raises(error) as failed:
        await stream.next()
    assert at.admission.queued() == 0
    assert at.events(1)[-1] == "not retried"
    assert [each.id for each in at.registry.index.failures()] == [1], "the request failed, and is listed"
    return failed.value


async def test_it_waits_as_long_as_any_other_request_and_is_answered_429_then() -> None:
    async with house(places=9, queue_timeout_ms=300) as at:
        busy = await end_of(at, Overloaded)
        assert str(busy) == "every worker is busy: no pair of workers had space in time"
        assert count(at, "baton_admission_refused_requests_total", why="too_late") == 1
        told = await story(at, "request-1")
        assert (told["state"], told["cause"]["reason"]) == ("failed", "not retried")
        assert told["cause"]["meaning"].startswith("A worker was full, and in its time no pair of workers")


async def test_it_is_refused_as_any_other_request_where_the_queue_is_full() -> None:
    async with house(places=9, max_queue=0) as at:
        busy = await end_of(at, Overloaded)
        assert str(busy) == "every worker is busy: the queue for workers is full: 0 requests"


async def test_without_any_worker_it_is_told_so() -> None:
    async with house(places=9, wait_s=0.0) as at:
        at.prefill.script, at.decode.script = [accepted(P)], FULL
        stream = await at.backend.generate(asked())
        await until(lambda: at.entry(1).cause == DECODE_FULL)
        at.rooms.lose(at.decode.incarnation, "gone", proof="left")
        with pytest.raises(NoWorker, match="no decode worker is ready"):
            await stream.next()


async def test_attempts_before_and_after_a_refusal_count_as_ever() -> None:
    """Two rooms may fail. The refused one between them is none of these, and has no pause behind it."""
    async with house(rooms_max=2, places=9) as at:
        lost = broken(D, Reason.ENGINE_FAILED)
        at.prefill.script, at.decode.scripts, at.decode.script = [accepted(P)], [lost, FULL], lost
        at.decode.says = report()
        reading = asyncio.ensure_future(read(await at.backend.generate(asked())))
        await until(lambda: at.admission.queued() == 1)
        assert at.events(1)[-1] == "retried"
        at.retired(1)
        says(at, at.decode)
        assert await reading == ([], "engine_failed")
        assert at.decode.called == [1, 2, 3]
        assert [at.entry(room).has_failed for room in (1, 2, 3)] == [True, False, True]
        assert (at.entry(2).retry_of, at.entry(3).retry_of) == (1, 2)
        assert "goes on" in at.events(2)
        assert count(at, "baton_request_retries_total", reason="engine_failed") == 1


async def test_a_retracted_request_that_is_refused_waits_as_a_retracted_one(at: House) -> None:
    """It is not refused by a full queue, and its time ends as that of a retracted request."""
    at.prefill.scripts, at.prefill.script = [prefills()], [accepted(P)]
    at.decode.scripts, at.decode.script = [retracted(next_token)], FULL
    at.decode.says = report(others=7)
    async with asyncio.timeout(5):
        stream = await at.backend.generate(asked())
        assert (await stream.next()).tokens
        reading = asyncio.ensure_future(read(stream))
        await until(lambda: at.admission.queued() == 1)
        assert at.events(2)[-1] != "not retried"
        [one] = at.admission.promises.queued[at.decode.incarnation].values()
        retry = one.waiting.request.retry
        assert retry is not None
        assert (retry.room, retry.reason, retry.is_refused) == (RoomId(2), Reason.RETRACTED, True)
        assert retry.margin > 0
        assert retry.until_s is None, "the queue's time is for requests that had no other room"
        at.prefill.script, at.decode.script = prefills(), decodes()
        at.retired(1)
        says(at, at.decode)
        assert await reading == ([8, 9], "length")
    assert count(at, "baton_retraction_pause_seconds_count") == 1


async def test_explain_says_which_worker_was_full_and_that_the_request_waits_again(at: House) -> None:
    at.prefill.script, at.decode.scripts = [accepted(P)], [FULL]
    at.decode.says = report(others=9)
    reading = asyncio.ensure_future(read(await at.backend.generate(asked())))
    await until(lambda: at.admission.queued() == 1)
    at.clock.advance(1_500)
    told = await story(at, "request-1")
    assert (told["state"], told["cause"]["reason"]) == ("paused", "worker_full")
    waits = f"Waits for a place again, since {DECODE_FULL.text}, 1,500 ms after it came."
    assert told["headline"] == waits
    at.prefill.script, at.decode.script = prefills(), decodes()
    says(at, at.decode)
    assert await reading == ([7, 8, 9], "length")
    told = await story(at, "request-1")
    assert told["state"] == "answered"
    assert told["headline"].endswith(f" It waited for a place again: {DECODE_FULL.text}.")
    assert "Paused" not in told["headline"]
    assert "failure" not in {line["kind"] for line in told["lines"]}


async def test_a_canary_that_a_full_worker_refuses_is_no_clients_room(at: House) -> None:
    at.prefill.script, at.decode.script = [accepted(P)], FULL
    pair = (at.registry.worker(at.prefill.incarnation), at.registry.worker(at.decode.incarnation))
    request = replace(CANARY, prompt=(1, 2, 3))
    entry = at.admission.open_on("canary", pair, Need(3, 5))
    with pytest.raises(RoomFailed, match=TAKEN):
        await at.backend.follow(entry, request).next()
    assert count(at, "baton_rooms_worker_full_total") == 0
