"""Tests of requests whose room at another bootstrap is adopted, or is not and begins anew."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.bootstrap import room_backend
from baton.ids import NO_PEER, RoomId
from baton.rooms.errors import Reason
from baton.rooms.phases import Side
from baton.rooms.request import Request
from baton.wire.baton.v1 import inference_pb2
from baton.wire.load_messages import Orphan, adoption_key
from tests.bootstrap.scripted import LENGTH, House, Step, accepted, asked, ended, house, read, tokens
from tests.bootstrap.test_request_stream import decodes, prefills, two_pairs
from tests.bootstrap.test_retracted import RETRACTED, count, failures
from tests.bootstrap.test_worker_full import FULL, report, says
from tests.wire.servers import until

P, D = Side.PREFILL, Side.DECODE
RESUMED = replace(asked(), resumes=True)
THEIRS = RoomId(2**40)
"""Room that another bootstrap opened, and whose tokens the client of RESUMED has read in part."""
GIVEN: Step = inference_pb2.StreamRoomReply(accepted=inference_pb2.Accepted(term=1))


def reported(at: House, request: Request = RESUMED) -> None:
    """Let decode-0 report the room of another bootstrap that computes the request, and may be adopted."""
    at.rooms.orphans.update(at.decode.incarnation, [Orphan(THEIRS, adoption_key(request), NO_PEER)])


@pytest.fixture
async def at() -> AsyncIterator[House]:
    """A house in which a request may have one room that fails."""
    async with house(rooms_max=1, places=9) as made:
        yield made


async def test_full_is_no_failure_a_room_is_adopted_at_a_worker_without_a_free_place(at: House) -> None:
    """The room has its place there. No other request gets one before the worker's next report."""
    at.decode.gives = [GIVEN, tokens(0, [7, 8, 9], LENGTH), ended(D)]
    at.prefill.script, at.decode.script = prefills(), decodes()
    says(at, at.decode, others=9)
    at.rooms.registry.mark_full(at.decode.incarnation)
    other = asyncio.ensure_future(at.backend.generate(replace(asked(), request_id="request-2")))
    await until(lambda: at.admission.queued() == 1)
    reported(at)
    assert await read(await at.backend.generate(RESUMED)) == ([7, 8, 9], "length")
    assert (at.decode.adopting, at.decode.called) == ([THEIRS], [])
    assert not other.done()
    says(at, at.decode)
    assert await read(await other) == ([7, 8, 9], "length")
    assert (failures(at), count(at, "baton_rooms_worker_full_total")) == (0, 0)


async def test_a_request_whose_room_is_not_adopted_waits_like_a_new_one_where_a_worker_is_full(
    at: House,
) -> None:
    at.prefill.script, at.decode.scripts = [accepted(P)], [FULL]
    at.decode.says = report(others=8)
    reported(at)
    reading = asyncio.ensure_future(read(await at.backend.generate(RESUMED)))
    await until(lambda: at.admission.queued() == 1)
    assert at.decode.adopting == [THEIRS]
    assert at.entry(THEIRS).cause is not None
    assert "worker full" in at.events(1)
    at.prefill.script, at.decode.script = prefills(), decodes()
    says(at, at.decode)
    assert await reading == ([7, 8, 9], "length")
    assert failures(at) == 0


async def test_the_time_in_the_queue_begins_when_no_room_was_found_to_adopt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room_backend, "ORPHAN_S", 1.1)
    async with house(places=9, queue_timeout_ms=1_000) as at:
        at.prefill.script, at.decode.scripts = [accepted(P)], [FULL]
        at.decode.says = report(others=9)
        stream = await at.backend.generate(RESUMED)
        reading = asyncio.ensure_future(read(stream))
        await until(lambda: at.entry(1).cause is not None)
        at.prefill.script, at.decode.script = prefills(), decodes()
        await until(lambda: at.admission.queued() == 1 or reading.done())
        says(at, at.decode)
        assert await reading == ([7, 8, 9], "length")


async def test_an_adopted_request_that_is_retracted_and_refused_waits_as_a_retracted_one(at: House) -> None:
    """It had a room, though not of this bootstrap. So the queue neither ends its wait nor rejects it."""
    at.decode.gives = [GIVEN, tokens(0, [7]), ended(D, RETRACTED)]
    at.prefill.script, at.decode.scripts = [accepted(P)], [FULL]
    at.decode.says = report(others=7)
    reported(at)
    reading = asyncio.ensure_future(read(await at.backend.generate(RESUMED)))
    await until(lambda: bool(at.admission.promises.queued) or at.admission.queued() == 1)
    [one] = at.admission.promises.queued[at.decode.incarnation].values()
    retry = one.waiting.request.retry
    assert retry is not None
    assert (retry.reason, retry.is_refused, retry.until_s) == (Reason.RETRACTED, True, None)
    at.prefill.script, at.decode.script = prefills(), decodes()
    at.retired(THEIRS)
    says(at, at.decode)
    assert await reading == ([7, 8, 9], "length")
    assert at.entry(1).retry_of == THEIRS
    assert count(at, "baton_rooms_worker_full_total") == 1


async def test_the_answer_is_computed_anew_at_once_if_decode_is_lost_before_it_gives_the_room() -> None:
    async with two_pairs(places=9) as at:
        at.decode.gives = [asyncio.Event()]
        at.prefill.script, at.decode_1.script = prefills(), decodes()
        reported(at)
        answering = asyncio.ensure_future(at.backend.generate(RESUMED))
        await until(lambda: at.decode.adopting == [THEIRS])
        at.rooms.lose(at.decode.incarnation, "its lease ran out", proof=None)
        async with asyncio.timeout(room_backend.ADOPTION_S / 2):
            stream = await answering
        assert await read(stream) == ([7, 8, 9], "length")
        assert at.decode_1.called
