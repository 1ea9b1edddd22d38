"""Tests of a worker's reports to the bootstrap: batched and bounded, without losing a retired room."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest

from baton.ids import NO_OPENER, Incarnation, Opener, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.request import Request
from baton.rooms.timeline import Moment
from baton.telemetry.room_spans import RoomSpans
from baton.wire.baton.v1 import rooms_pb2, rooms_pb2_grpc
from baton.wire.conversions import Malformed
from baton.wire.errors import errors_as_status
from baton.wire.message_limits import REPORTS_MAX
from baton.worker import report_queue as module
from baton.worker.report_queue import LINES_MAX
from baton.worker.reporter import DETAIL_CHARS_MAX, UNKNOWN_MAX, UNKNOWN_MS, RankReporter, Reporter
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
        reporter = Reporter(lambda _: channel, Incarnation(5), "w", ManualClock(now_ms=7, wall_ms=42))
        reporter.use({NO_OPENER: address})
        yield bootstrap, reporter


async def running(reporter: Reporter, holds: Any) -> None:
    task = asyncio.ensure_future(reporter.run())
    await until(holds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (Reason.RETRACTED, ("DEBUG", "room ended without a failure")),
        (Reason.WORKER_FULL, ("DEBUG", "room ended without a failure")),
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
        rank = RankReporter(lambda _: channel, 2, ManualClock(now_ms=7, wall_ms=42))
        rank.use({NO_OPENER: address})
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
        leader = Reporter(lambda _: channel, Incarnation(5), "w", clock, spans)
        rank = RankReporter(lambda _: channel, 1, clock)
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
    reporter.load = lambda _: rooms_pb2.WorkerLoad(free_pages=[next(told)])
    for number in (1, 2):
        reporter.report(RoomId(number), Moment.ACCEPTED)
        await reporter.flush()
        reporter.retired(RoomId(number))
        await reporter.flush()
    assert bootstrap.loads == [None, 7, None, 8]


ONE, OTHER, LATE = Opener(1), Opener(2), Opener(3)
ASKED = Request("r1", (1, 2), 4)


@asynccontextmanager
async def two_bootstraps(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[list[Bootstrap], list[str], Reporter, ManualClock]]:
    """Run two bootstraps, and a reporter that knows neither. Yield them with the bootstraps' addresses."""
    monkeypatch.setattr(module, "RETRY_S", 0.001)
    monkeypatch.setattr(module, "PAUSE_S", 0.001)
    bootstraps = [Bootstrap(), Bootstrap()]  # type: ignore[abstract]
    adders = [partial(rooms_pb2_grpc.add_RoomServiceServicer_to_server, each) for each in bootstraps]
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(add)) for add in adders]
        channels = {each: await stack.enter_async_context(channel_to(each)) for each in addresses}
        clock = ManualClock()
        reporter = Reporter(channels.__getitem__, Incarnation(5), "w", clock)
        for each in bootstraps:
            each.may_answer.set()
        yield bootstraps, addresses, reporter, clock


async def test_opener_owns_the_lines_of_a_room_go_to_its_opener_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_bootstraps(monkeypatch) as ((first, second), addresses, reporter, _):
        reporter.use({ONE: addresses[0], OTHER: addresses[1]})
        reporter.load = lambda opener: rooms_pb2.WorkerLoad(free_pages=[opener])
        for room, opener in ((11, ONE), (22, OTHER)):
            reporter.opened(RoomId(room), ASKED, opener)
            reporter.report(RoomId(room), Moment.GRANTED)
            reporter.retired(RoomId(room))
        await running(reporter, lambda: not reporter.pending)
        assert (first.rooms, second.rooms) == ([11, 11], [22, 22])
        assert (first.loads, second.loads) == ([ONE], [OTHER]), "each gets the load as of its own rooms"
        assert (reporter.pending, reporter.dropped) == ([], 0)


async def test_a_bootstrap_that_is_silent_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_bootstraps(monkeypatch) as ((first, second), addresses, reporter, _):
        first.may_answer.clear()
        reporter.use({ONE: addresses[0], OTHER: addresses[1]})
        for room, opener in ((11, ONE), (22, OTHER)):
            reporter.opened(RoomId(room), ASKED, opener)
            reporter.report(RoomId(room), Moment.GRANTED)
        await running(reporter, lambda: second.rooms == [22])
        assert first.rooms == []


async def test_what_waits_for_an_opener_that_is_gone_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_bootstraps(monkeypatch) as ((first, second), addresses, reporter, _):
        reporter.use({ONE: addresses[0], OTHER: addresses[1]})
        reporter.opened(RoomId(11), ASKED, ONE)
        reporter.report(RoomId(11), Moment.GRANTED)
        reporter.use({LATE: addresses[0], OTHER: addresses[1]}, [ONE])
        reporter.retired(RoomId(11))
        assert reporter.dropped == 2
        reporter.opened(RoomId(12), ASKED, LATE)
        reporter.retired(RoomId(12))
        await running(reporter, lambda: first.rooms == [12] and not reporter.pending)
        assert second.rooms == []
        assert (reporter.pending, reporter.dropped) == ([], 2)


async def test_lines_wait_for_the_address_of_their_opener_and_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_bootstraps(monkeypatch) as ((first, second), addresses, reporter, _):
        reporter.use({ONE: addresses[0]})
        reporter.opened(RoomId(22), ASKED, OTHER)
        reporter.report(RoomId(22), Moment.ACCEPTED)
        task = asyncio.ensure_future(reporter.run())
        await asyncio.sleep(0.01)
        assert second.rooms == []
        reporter.use({ONE: addresses[0], OTHER: addresses[1]})
        reporter.retired(RoomId(22))
        await until(lambda: len(second.rooms) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [line.retired for batch in second.batches for line in batch] == [False, True]
        assert first.rooms == []


async def test_zero_at_idle_lines_for_an_opener_that_never_answers_are_dropped_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with two_bootstraps(monkeypatch) as (_, _addresses, reporter, clock):
        for opener in range(UNKNOWN_MAX + 1):
            reporter.opened(RoomId(100 + opener), ASKED, Opener(100 + opener))
            reporter.retired(RoomId(100 + opener))
        assert (len(reporter.pending), reporter.dropped) == (UNKNOWN_MAX, 1)
        clock.advance(UNKNOWN_MS)
        await running(reporter, lambda: not reporter.pending)
        assert reporter.dropped == UNKNOWN_MAX + 1


async def test_a_room_without_an_opener_is_reported_to_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_bootstraps(monkeypatch) as ((first, second), addresses, reporter, _):
        reporter.use({ONE: addresses[0], OTHER: addresses[1]})
        reporter.opened(RoomId(7), ASKED)
        reporter.retired(RoomId(7))
        await running(reporter, lambda: first.rooms == second.rooms == [7])


async def test_a_rank_reaches_the_only_bootstrap_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        two_bootstraps(monkeypatch) as ((first, second), addresses, _, clock),
        channel_to(addresses[0]) as at_first,
        channel_to(addresses[1]) as at_second,
    ):
        channels = dict(zip(addresses, (at_first, at_second), strict=True))
        rank = RankReporter(channels.__getitem__, 1, clock, addresses[1])
        for is_only_one in (True, False):
            rank.use({ONE: addresses[0]}, is_only_one=is_only_one)
            rank.opened(RoomId(11), ASKED, ONE)
            rank.report_of_rank(RoomId(11), Moment.LANDED)
            await rank.flush()
            rank.retired(RoomId(11))
        assert (first.rooms, second.rooms) == ([11], [11])
