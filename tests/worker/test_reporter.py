"""Tests of a worker's reports to the bootstrap: batched and bounded, without losing a retired room."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.request import Request
from baton.rooms.timeline import Moment
from baton.telemetry.room_spans import RoomSpans
from baton.wire.baton.v1 import rooms_pb2, rooms_pb2_grpc
from baton.wire.conversions import Malformed
from baton.wire.errors import errors_as_status
from baton.wire.message_limits import REPORTS_MAX
from baton.worker import reporter as module
from baton.worker.reporter import DETAIL_CHARS_MAX, LINES_MAX, RankReporter, Reporter
from tests.support.manual_clock import ManualClock
from tests.trace.notes import PARENT, Notes
from tests.wire.servers import channel_to, serving, until


@dataclass
class Bootstrap(rooms_pb2_grpc.RoomServiceServicer):
    batches: list[list[rooms_pb2.RoomReport]] = field(default_factory=list)
    incarnations: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    loads: list[int | None] = field(default_factory=list)
    """Free pages that each batch told of."""
    away: int = 0
    """Calls that end without an answer of its own."""
    refuse: int = 0
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def ReportRooms(self, request: Any, context: Any) -> rooms_pb2.ReportRoomsReply:  # noqa: N802
        async with errors_as_status(context):
            await self.may_answer.wait()
            if self.away:
                self.away -= 1
                await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
            if self.refuse:
                self.refuse -= 1
                raise Malformed("cause.reason")
        self.incarnations.add(request.incarnation)
        self.ranks.add(request.rank)
        self.batches.append(list(request.reports))
        self.loads.append(request.load.free_pages[0] if request.HasField("load") else None)
        return rooms_pb2.ReportRoomsReply()

    @property
    def rooms(self) -> list[int]:
        return [report.room for batch in self.batches for report in batch]


Bench = tuple[Bootstrap, Reporter]


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    monkeypatch.setattr(module, "PAUSE_S", 0.001)
    bootstrap = Bootstrap()  # type: ignore[abstract]
    bootstrap.may_answer.set()

    def add(server: grpc.aio.Server) -> None:
        rooms_pb2_grpc.add_RoomServiceServicer_to_server(bootstrap, server)

    async with serving(add) as address, channel_to(address) as channel:
        reporter = Reporter(channel, Incarnation(5), "w", ManualClock(now_ms=7, wall_ms=42))
        yield bootstrap, reporter


async def running(reporter: Reporter, holds: Any) -> None:
    task = asyncio.ensure_future(reporter.run())
    await until(holds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (Reason.RETRACTED, ("DEBUG", "room retracted")),
        (Reason.LOCAL, ("DEBUG", "prompt left to decode")),
        (Reason.ENGINE_FAILED, ("INFO", "room failed")),
    ],
)
async def test_an_end_is_logged_for_what_it_was(
    bench: Bench, caplog: pytest.LogCaptureFixture, reason: Reason, told: tuple[str, str]
) -> None:
    with caplog.at_level(logging.DEBUG, "baton.worker.reporter"):
        bench[1].failed(RoomId(1), Cause(reason, "as it happens"))
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [told]


async def test_lines_leave_in_order_in_batches(bench: Bench) -> None:
    bootstrap, reporter = bench
    for room in range(1, REPORTS_MAX + 2):
        reporter.report(RoomId(room), Moment.GRANTED, "2 pages")
    reporter.retired(RoomId(1))
    await running(reporter, lambda: len(bootstrap.rooms) == REPORTS_MAX + 2)
    assert [len(batch) for batch in bootstrap.batches] == [REPORTS_MAX, 2]
    assert bootstrap.rooms == [*range(1, REPORTS_MAX + 2), 1]
    assert bootstrap.incarnations == {5}
    line, last = bootstrap.batches[0][0], bootstrap.batches[1][1]
    event = rooms_pb2.RoomEvent.FromString(line.event)
    assert (event.source, event.name, event.detail) == ("w", "granted", "2 pages")
    assert (event.wall_ms, event.host_us) == (42, 7_000)
    assert not line.retired
    assert last.retired


async def test_past_the_bound_lines_are_dropped_and_retired_rooms_are_not(bench: Bench) -> None:
    _, reporter = bench
    for room in range(LINES_MAX + 10):
        reporter.report(RoomId(room), Moment.CHUNK_COMPUTED)
    assert reporter.dropped == 10
    reporter.retired(RoomId(3))
    assert len(reporter.pending) == LINES_MAX + 1
    reporter.report(RoomId(1), Moment.CHUNK_COMPUTED)
    assert reporter.dropped == 11


async def test_a_bootstrap_that_was_away_gets_everything_later(bench: Bench) -> None:
    bootstrap, reporter = bench
    bootstrap.away = 3
    reporter.report(RoomId(1), Moment.ACCEPTED)
    reporter.retired(RoomId(1))
    await running(reporter, lambda: len(bootstrap.rooms) == 2)
    assert bootstrap.away == 0
    assert reporter.dropped == 0


async def test_what_the_bootstrap_refuses_holds_up_nothing_else(bench: Bench) -> None:
    bootstrap, reporter = bench
    bootstrap.refuse = 1
    reporter.report(RoomId(1), Moment.ACCEPTED)
    await running(reporter, lambda: reporter.dropped == 1)
    reporter.report(RoomId(2), Moment.ACCEPTED)
    await running(reporter, lambda: bootstrap.rooms == [2])


async def test_two_flushes_at_once_send_everything_exactly_once(bench: Bench) -> None:
    bootstrap, reporter = bench
    bootstrap.may_answer.clear()
    for room in (1, 2):
        reporter.retired(RoomId(room))
    flushes = [asyncio.ensure_future(reporter.flush()) for _ in range(2)]
    await asyncio.sleep(0.01)
    for room in (3, 4):
        reporter.retired(RoomId(room))
    bootstrap.may_answer.set()
    await asyncio.gather(*flushes)
    assert bootstrap.rooms == [1, 2, 3, 4]


async def test_long_details_are_cut(bench: Bench) -> None:
    bootstrap, reporter = bench
    reporter.report(RoomId(1), Moment.FAILED, "x" * 10_000)
    await reporter.flush()
    assert len(rooms_pb2.RoomEvent.FromString(bootstrap.batches[0][0].event).detail) == DETAIL_CHARS_MAX


async def test_a_rank_that_does_not_lead_tells_what_it_saw_itself_in_its_leaders_name() -> None:
    bootstrap = Bootstrap()  # type: ignore[abstract]
    bootstrap.may_answer.set()

    def add(server: grpc.aio.Server) -> None:
        rooms_pb2_grpc.add_RoomServiceServicer_to_server(bootstrap, server)

    async with serving(add) as address, channel_to(address) as channel:
        rank = RankReporter(channel, 2, ManualClock(now_ms=7, wall_ms=42))
        rank.led_by(Incarnation(5), b"of the ranks")
        rank.report(RoomId(1), Moment.GRANTED)
        rank.report_of_rank(RoomId(1), Moment.LANDED, "2 pages")
        rank.retired(RoomId(1))
        await rank.flush()
    [[line]] = bootstrap.batches
    event = rooms_pb2.RoomEvent.FromString(line.event)
    assert (event.name, event.detail, line.retired) == ("landed", "2 pages", False)
    assert (bootstrap.incarnations, bootstrap.ranks) == ({5}, {2})


async def test_a_traced_room_is_one_span_which_is_its_leaders() -> None:
    async with channel_to("127.0.0.1:1") as channel:
        clock = ManualClock()
        notes = Notes()
        spans = RoomSpans(notes, "prefill")
        leader, rank = Reporter(channel, Incarnation(5), "w", clock, spans), RankReporter(channel, 1, clock)
        request = Request("r1", (1, 2), 4, trace=PARENT)
        for reporter in (leader, rank):
            reporter.opened(RoomId(7), request)
            reporter.report(RoomId(7), Moment.COMPUTING)
            reporter.report_of_rank(RoomId(7), Moment.WRITTEN)
        assert len(spans) == 1
        for reporter in (leader, rank):
            reporter.failed(RoomId(7), Cause(Reason.ENGINE_FAILED, "prefill: the step raised"))
            reporter.retired(RoomId(7))
    (span,) = notes.spans
    assert span.parent == PARENT
    assert span.events == ["computing", "written", "failed", "retired"]
    assert span.error == "engine_failed: prefill: the step raised"
    assert (span.ended, len(spans)) == (1, 0)


async def test_what_is_left_on_the_worker_is_told_where_something_was_given_back(bench: Bench) -> None:
    bootstrap, reporter = bench
    told = iter(range(7, 10))
    reporter.load = lambda: rooms_pb2.WorkerLoad(free_pages=[next(told)])
    for number in (1, 2):
        reporter.report(RoomId(number), Moment.ACCEPTED)
        await reporter.flush()
        reporter.retired(RoomId(number))
        await reporter.flush()
    assert bootstrap.loads == [None, 7, None, 8]
