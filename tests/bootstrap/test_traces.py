"""Tests of the trace span of each room and of the trace context that workers are sent."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from baton.api.backend import Hangup
from baton.handover import opened_room
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.telemetry.room_spans import RoomSpans
from tests.bootstrap.scripted import House, accepted, asked, ended, house, read
from tests.bootstrap.test_request_stream import decodes, prefills
from tests.trace.notes import PARENT, TRACE, Notes

P, D = Side.PREFILL, Side.DECODE


@pytest.fixture(params=[None, P, D], ids=["both at once", "prefill late", "decode late"])
async def at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    """A house in which one side receives a room after the other has ended it. No script answers a cancel."""
    monkeypatch.setattr(opened_room, "LINGER_S", 0.2)
    async with house(rooms_max=2) as made:
        for worker in (made.prefill, made.decode):
            worker.late_s = 0.05 if worker.side is request.param else 0.0
        yield made


def traced(at: House) -> Notes:
    notes = Notes()
    at.rooms.timelines.spans = RoomSpans(notes)
    return notes


async def test_each_room_of_a_request_is_a_span_beside_the_others_and_its_workers_children(at: House) -> None:
    notes = traced(at)
    at.prefill.scripts = [[accepted(P)], prefills()]
    failed = Cause(Reason.TRANSFER_FAILED, "as it happens")
    at.decode.scripts = [[accepted(D), ended(D, failed)], decodes()]
    stream = await at.backend.generate(replace(asked(), trace=PARENT))
    assert (await read(stream))[1] == "length"
    first, second = notes.spans
    assert first.parent == second.parent == PARENT
    assert first.error == "transfer_failed: as it happens"
    assert first.attributes["baton.reason"] == "transfer_failed"
    assert second.attributes["baton.retry_of"] == first.attributes["baton.room"] == "1"
    assert second.error is None
    assert [span.events[0] for span in notes.spans] == ["opened", "opened"]
    assert [span.events[-1] for span in notes.spans] == ["failed", "answered"]
    assert [span.ended for span in notes.spans] == [1, 1]
    await at.unfollowed()
    for worker in (at.prefill, at.decode):
        assert [request.trace for request in worker.asked] == [first.trace, second.trace]
    assert {at.entry(room).trace_id for room in (1, 2)} == {TRACE}
    assert len(at.rooms.timelines.spans) == 0


async def test_a_client_that_hangs_up_ends_its_span_which_is_none_of_a_failure(at: House) -> None:
    notes = traced(at)
    at.prefill.script = [accepted(P)]
    stream = await at.backend.generate(replace(asked(), trace=PARENT))
    await stream.hang_up(Hangup.CLIENT_GONE)
    (span,) = notes.spans
    assert (span.error, span.attributes["baton.reason"], span.ended) == (None, "client_gone", 1)
    assert len(at.rooms.timelines.spans) == 0


async def test_where_nothing_is_traced_workers_hear_what_the_caller_sent(at: House) -> None:
    at.prefill.script, at.decode.script = prefills(), decodes()
    stream = await at.backend.generate(replace(asked(), trace=PARENT))
    assert (await read(stream))[1] == "length"
    await at.unfollowed()
    assert [request.trace for request in (*at.prefill.asked, *at.decode.asked)] == [PARENT, PARENT]
    assert at.entry().trace_id == TRACE


async def test_a_room_without_a_trace_has_no_span(at: House) -> None:
    notes = traced(at)
    at.prefill.script, at.decode.script = prefills(), decodes()
    assert (await read(await at.backend.generate(asked())))[1] == "length"
    assert notes.spans == []
    await at.unfollowed()
    assert at.prefill.asked[0].trace is None
