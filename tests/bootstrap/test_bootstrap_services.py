"""Tests of the bootstrap's gRPC services for workers and other routers, over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from baton.bootstrap import bootstrap_services
from baton.bootstrap.bootstrap_services import RoomService, WorkerRegistry
from baton.fleet.room_entry import RoomPhase
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.rooms.timeline import Moment
from baton.wire import liveness
from baton.wire.baton.v1 import rooms_pb2, rooms_pb2_grpc, workers_pb2, workers_pb2_grpc
from baton.wire.conversions import outcome_to_wire
from baton.wire.errors import RemoteError, remote_error
from baton.wire.layout_messages import layout_to_wire
from baton.wire.load_messages import load_from_wire
from baton.wire.receiver_secret import digest_of
from baton.wire.worker_credential import incarnation_of, of_ranks
from tests.bootstrap.scripted import House, ScriptedWorker, house
from tests.layouts import one_group
from tests.wire.servers import channel_to, serving, until

OWN = b"drawn by this worker"
MINE = incarnation_of(OWN)


STRANGER = Incarnation(99)


class Client:
    """A client of both services of one bootstrap. Errors are RemoteError."""

    def __init__(self, at: House, channel: grpc.aio.Channel) -> None:
        self.at = at
        self.rooms = rooms_pb2_grpc.RoomServiceStub(channel)
        self.workers = workers_pb2_grpc.WorkerRegistryStub(channel)

    async def call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=20)
        except grpc.aio.AioRpcError as error:
            raise remote_error(error) from error

    def key(self, room: int) -> bytes:
        return self.at.rooms.credentials.key_of(RoomId(room))

    def credential(self, incarnation: int) -> bytes:
        """Return the credential of one of the two workers or of the stranger, or an empty one for any
        other."""
        workers = (self.at.prefill, self.at.decode)
        other = OWN if incarnation == STRANGER else b""
        return next((each.credential for each in workers if each.incarnation == incarnation), other)

    async def open(self, name: str = "request-1") -> int:
        reply = await self.call(
            self.rooms.OpenRoom, rooms_pb2.OpenRoomRequest(request_id=name, prompt_tokens=3, tokens=5)
        )
        return int(reply.room)

    async def report(self, reporter: int, *reports: rooms_pb2.RoomReport) -> None:
        request = rooms_pb2.ReportRoomsRequest(incarnation=reporter, reports=reports)
        request.credential = self.credential(reporter)
        for report in request.reports:
            report.key = b"" if reporter else self.key(report.room)
        await self.call(self.rooms.ReportRooms, request)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with house() as at:

        def add(server: grpc.aio.Server) -> None:
            rooms_pb2_grpc.add_RoomServiceServicer_to_server(RoomService(at.rooms), server)
            workers_pb2_grpc.add_WorkerRegistryServicer_to_server(WorkerRegistry(at.rooms), server)

        async with serving(add) as address, channel_to(address) as channel:
            yield Client(at, channel)


async def test_a_room_is_opened_reported_and_filed(client: Client) -> None:
    room = await client.open()
    shown = await client.call(client.rooms.GetRoom, rooms_pb2.GetRoomRequest(room=room))
    assert (shown.request_id, shown.prefill.name, shown.decode.name) == ("request-1", "prefill-0", "decode-0")
    assert shown.phase == "open"
    await client.report(0, rooms_pb2.RoomReport(room=room, outcome=outcome_to_wire(None)))
    for worker in (client.at.prefill, client.at.decode):
        event = rooms_pb2.RoomEvent(source=worker.name, name="retired").SerializeToString()
        await client.report(worker.incarnation, rooms_pb2.RoomReport(room=room, event=event, retired=True))
    shown = await client.call(client.rooms.GetRoom, rooms_pb2.GetRoomRequest(room=room))
    assert shown.phase == "retired"
    assert not shown.HasField("cause")
    assert [event.name for event in shown.events] == ["opened", "answered", "retired", "retired"]
    await client.at.at_rest()


async def test_a_worker_that_is_not_the_rooms_is_not_believed(client: Client) -> None:
    """The reporter is an authenticated worker of the stack, but the room is another worker's."""
    client.at.rooms.credentials.enter(STRANGER, OWN)
    room = await client.open()
    outcome = outcome_to_wire(Cause(Reason.ENGINE_FAILED, "made up"))
    event = rooms_pb2.RoomEvent(source="x", name="made up").SerializeToString()
    for reporter in (STRANGER, client.at.prefill.incarnation):
        told = event if reporter == STRANGER else b""
        await client.report(
            reporter,
            rooms_pb2.RoomReport(room=room, event=told, outcome=outcome, retired=reporter == STRANGER),
        )
    await client.report(STRANGER, rooms_pb2.RoomReport(room=12345, retired=True))
    entry = client.at.entry(room)
    assert entry.phase is RoomPhase.OPEN
    assert len(entry.waiting_for) == 2
    assert "made up" not in client.at.events(room)


async def test_a_line_is_put_down_under_the_name_of_whoever_sent_it(client: Client) -> None:
    room = await client.open()
    event = rooms_pb2.RoomEvent(source="bootstrap", name="landed").SerializeToString()
    decode = client.at.decode
    request = rooms_pb2.ReportRoomsRequest(incarnation=decode.incarnation, credential=decode.credential)
    request.reports.add(room=room, event=event)
    await client.call(client.rooms.ReportRooms, request)
    request.rank, request.credential = 3, of_ranks(decode.credential)
    request.reports[0].retired = True
    await client.call(client.rooms.ReportRooms, request)
    await client.report(0, rooms_pb2.RoomReport(room=room, event=event))
    entry = client.at.entry(room)
    assert entry.waits_for_opener == {Side.PREFILL}, "decode has heard of it"
    assert [each.source for each in entry.events] == ["bootstrap", "decode-0", "decode-0/3", "caller"]
    assert len(entry.waiting_for) == 2, "that a room was given back is the leader's word"


async def test_watching_tells_what_was_and_what_comes_until_the_room_is_retired(client: Client) -> None:
    room = await client.open()
    call = client.rooms.WatchRoom(rooms_pb2.WatchRoomRequest(room=room), timeout=20)
    events = call.__aiter__()
    assert (await anext(events)).name == "opened"
    client.at.rooms.timelines.report(RoomId(room), Moment.BROKEN_OFF)
    assert (await anext(events)).name == "broken off"
    client.at.rooms.answered(RoomId(room))
    client.at.retired(room)
    assert [event.name async for event in events] == ["answered"]
    await until(lambda: not client.at.rooms.timelines.watchers)


async def test_a_watcher_that_nobody_woke_looks_by_itself(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap_services, "WATCH_S", 0.01)
    room = await client.open()
    call = client.rooms.WatchRoom(rooms_pb2.WatchRoomRequest(room=room), timeout=20)
    events = call.__aiter__()
    assert (await anext(events)).name == "opened"
    client.at.registry.end(RoomId(room), None, 0)
    client.at.registry.abandon(RoomId(room))
    assert [event.name async for event in events] == []


async def test_a_watcher_that_leaves_is_forgotten(client: Client) -> None:
    room = await client.open()
    call = client.rooms.WatchRoom(rooms_pb2.WatchRoomRequest(room=room), timeout=20)
    await call.read()
    assert len(client.at.rooms.timelines.watchers) == 1
    call.cancel()
    await until(lambda: not client.at.rooms.timelines.watchers)


async def test_cancelling_ends_the_room_on_both_workers_once(client: Client) -> None:
    room = await client.open()
    for why in ("changed my mind", "again"):
        request = rooms_pb2.CancelRoomRequest(room=room, why=why, key=client.key(room))
        await client.call(client.rooms.CancelRoom, request)
    at = client.at
    await until(lambda: at.prefill.cancels == at.decode.cancels == {room: "cancelled"})
    cause = at.entry(room).cause
    assert cause is not None
    assert cause.text == "changed my mind"


async def test_listing_finds_one_request_exactly_and_newest_first(client: Client) -> None:
    rooms = [await client.open(name) for name in ("a", "ab")]
    both = await client.call(client.rooms.ListRooms, rooms_pb2.ListRoomsRequest())
    assert [room.room for room in both.rooms] == rooms[::-1]
    one = await client.call(client.rooms.ListRooms, rooms_pb2.ListRoomsRequest(request_id="a"))
    assert [room.room for room in one.rooms] == rooms[:1]
    newest = await client.call(client.rooms.ListRooms, rooms_pb2.ListRoomsRequest(limit=1))
    assert [room.room for room in newest.rooms] == rooms[1:]


@pytest.mark.parametrize(
    ("asked", "code", "says"),
    [
        ({"prompt_tokens": 0, "tokens": 5}, grpc.StatusCode.INVALID_ARGUMENT, "prompt_tokens"),
        ({"prompt_tokens": 6, "tokens": 5}, grpc.StatusCode.INVALID_ARGUMENT, "tokens"),
        ({"prompt_tokens": 3, "tokens": 5_000}, grpc.StatusCode.UNAVAILABLE, "decode worker can hold"),
        (
            {"request_id": "x" * 300, "prompt_tokens": 3, "tokens": 5},
            grpc.StatusCode.INVALID_ARGUMENT,
            "request_id",
        ),
    ],
)
async def test_a_room_that_cannot_be_is_refused(
    client: Client, asked: dict[str, Any], code: grpc.StatusCode, says: str
) -> None:
    with pytest.raises(RemoteError, match=says) as error:
        await client.call(client.rooms.OpenRoom, rooms_pb2.OpenRoomRequest(**asked))
    assert error.value.code is code
    assert client.at.registry.open_count() == 0


async def test_whoever_opens_a_room_learns_all_that_decode_is_to_be_told_of_prefill(client: Client) -> None:
    at = client.at
    said = rooms_pb2.WorkerLoad(number=1, tokens_waiting=500, tokens_per_s=1_000)
    at.registry.update_load(at.prefill.incarnation, load_from_wire(said), at.clock.now_ms())
    asked = rooms_pb2.OpenRoomRequest(request_id="request-1", prompt_tokens=30, tokens=50)
    reply = await client.call(client.rooms.OpenRoom, asked)
    assert (reply.prefill_ms, reply.prefill_own_ms) == (530, 30)


@pytest.mark.parametrize("method", ["GetRoom", "CancelRoom", "WatchRoom"])
async def test_an_unknown_room_is_not_found(client: Client, method: str) -> None:
    request = getattr(rooms_pb2, f"{method}Request")(room=99)
    call = getattr(client.rooms, method)(request, timeout=20)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await (call.read() if method == "WatchRoom" else call)
    assert remote_error(error.value).kind == "UnknownRoom"
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_opener_that_gives_up_while_it_waits_leaves_nothing(client: Client) -> None:
    for name in ("a", "b"):
        await client.open(name)
    waiting = asyncio.ensure_future(client.open("c"))
    await until(lambda: client.at.admission.queued() == 1)
    waiting.cancel()
    await until(lambda: client.at.admission.queued() == 0)
    assert client.at.registry.open_count() == 2


async def test_a_worker_registers_renews_drains_and_leaves(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    at, workers = client.at, client.workers
    layout = layout_to_wire(one_group("model", "float32", 4, (0,), (0,), 2))
    for worker in (at.prefill, at.decode):
        at.rooms.lose(worker.incarnation, "gone", proof="left")
    register = workers_pb2.RegisterRequest(
        worker=rooms_pb2.Peer(name="new", incarnation=MINE, address="127.0.0.1:1"),
        side=rooms_pb2.SIDE_PREFILL,
        layout=layout,
        schema="s",
        tokens_max=10,
        rooms_max=1,
        credential=OWN,
    )
    reply = await client.call(workers.Register, register)
    assert reply.lease_ms == at.registry.lease_ms
    renewed = await client.call(workers.Renew, workers_pb2.RenewRequest(incarnation=MINE, credential=OWN))
    assert set(renewed.departed) == {11, 22}
    assert renewed.unproven
    at.rooms.proven(MINE)
    renewed = await client.call(workers.Renew, workers_pb2.RenewRequest(incarnation=MINE, credential=OWN))
    assert not renewed.unproven
    await client.call(workers.Drain, workers_pb2.DrainRequest(incarnation=MINE, credential=OWN))
    assert at.registry.worker(MINE).state.value == "draining"
    other = workers_pb2.RegisterRequest()
    other.CopyFrom(register)
    other.credential = b"drawn by another worker"
    other.worker.name, other.layout.groups[0].dtype = "other", "bfloat16"
    other.worker.incarnation = incarnation_of(other.credential)
    with pytest.raises(RemoteError, match="dtype differs") as error:
        await client.call(workers.Register, other)
    assert (error.value.kind, error.value.field) == ("WorkerRefused", "dtype")
    await client.call(workers.Leave, workers_pb2.LeaveRequest(incarnation=MINE, credential=OWN))
    assert "worker left" in caplog.messages
    assert "worker lost" not in caplog.messages, "nobody is to be warned of a rolling replacement"
    with pytest.raises(RemoteError) as error:
        await client.call(workers.Renew, workers_pb2.RenewRequest(incarnation=MINE, credential=OWN))
    assert error.value.kind == "DeclaredGone"


def not_believed(client: Client, why: str) -> float:
    return client.at.metrics.get_sample_value("baton_exits_not_believed_total", {"why": why}) or 0.0


def exit_of(worker: ScriptedWorker, **more: Any) -> workers_pb2.ReportExitRequest:
    """Return the report of the worker's exit, as the starter of its process sends it."""
    known: dict[str, Any] = {"name": worker.name, "pid": worker.pid, "secret": worker.exit_secret}
    return workers_pb2.ReportExitRequest(**(known | more))


async def test_a_process_seen_to_exit_is_lost_and_one_of_another_pid_is_not(client: Client) -> None:
    prefill, report = client.at.prefill, client.workers.ReportExit
    prefill.found = 99  # another process has its port
    await client.call(report, exit_of(prefill, pid=5))
    assert len(client.at.registry.workers()) == 2
    await client.call(report, exit_of(prefill))
    assert [worker.facts.name for worker in client.at.registry.workers()] == ["decode-0"]
    await client.call(report, exit_of(prefill))  # the reply to the first one was lost


@pytest.mark.parametrize("heard", ["it answers", "another answers", "it is silent"])
@pytest.mark.parametrize("leased", [True, False], ids=["leased", "its lease ran out"])
async def test_exit_by_starter_no_report_is_believed_without_the_starters_secret(
    client: Client, monkeypatch: pytest.MonkeyPatch, heard: str, leased: bool
) -> None:
    """A stopped process is silent, and what it has posted still lands."""
    monkeypatch.setattr(liveness, "ASK_S", 0.05)
    at = client.at
    at.prefill.mute = asyncio.Event() if heard == "it is silent" else None
    at.prefill.found = 99 if heard == "another answers" else None
    if not leased:
        at.rooms.lose(at.prefill.incarnation, "its lease ran out", proof=None)
    forged = (b"", b"x" * 16, at.decode.exit_secret, digest_of(at.prefill.exit_secret), at.prefill.credential)
    for secret in forged:
        with pytest.raises(RemoteError, match="for its starter to report") as refused:
            await client.call(client.workers.ReportExit, exit_of(at.prefill, secret=secret))
        assert refused.value.kind == "NotProven"
    assert at.registry.departed() == []
    assert at.registry.holds_lease(at.prefill.incarnation) == leased
    assert not_believed(client, "unproven") == len(forged)


@pytest.mark.parametrize("leased", [True, False], ids=["leased", "its lease ran out"])
async def test_exit_by_starter_the_starters_report_is_believed_of_a_process_that_does_not_answer(
    client: Client, monkeypatch: pytest.MonkeyPatch, leased: bool
) -> None:
    """After the report, no time passes until the lease runs out."""
    monkeypatch.setattr(liveness, "ASK_S", 0.05)
    at, at.prefill.mute = client.at, asyncio.Event()
    if not leased:
        at.rooms.lose(at.prefill.incarnation, "its lease ran out", proof=None)
    await client.call(client.workers.ReportExit, exit_of(at.prefill))
    assert at.registry.departed() == [at.prefill.incarnation]


@pytest.mark.parametrize("leased", [True, False], ids=["leased", "its lease ran out"])
async def test_a_worker_that_answers_is_not_taken_for_dead_on_its_starters_word_either(
    client: Client, leased: bool
) -> None:
    """If a live worker were believed dead, its memory would be reused while peers write to it."""
    at = client.at
    if not leased:
        at.rooms.lose(at.prefill.incarnation, "its lease ran out", proof=None)
    with pytest.raises(RemoteError, match="it answers") as refused:
        await client.call(client.workers.ReportExit, exit_of(at.prefill))
    assert refused.value.kind == "NotGone"
    assert at.registry.departed() == []
    assert not_believed(client, "answers") == 1


async def test_exit_by_starter_a_report_says_nothing_of_a_later_start_of_the_same_name_and_pid(
    client: Client,
) -> None:
    at = client.at
    at.prefill.found = 99
    await client.call(client.workers.ReportExit, exit_of(at.prefill))
    later = replace(
        at.prefill.facts, incarnation=Incarnation(12), exit_digest=digest_of(b"of another starter")
    )
    at.rooms.register(later)
    with pytest.raises(RemoteError) as refused:
        await client.call(client.workers.ReportExit, exit_of(at.prefill))
    assert refused.value.kind == "NotProven"
    assert at.registry.holds_lease(later.incarnation)
    assert at.registry.departed() == [at.prefill.incarnation]


async def test_a_registration_says_by_whose_secret_its_exit_is_reported(client: Client) -> None:
    at, workers = client.at, client.workers
    layout = layout_to_wire(one_group("model", "float32", 16, (0,), (0,), 8))
    wire = workers_pb2.RegisterRequest(
        worker=rooms_pb2.Peer(name="more", incarnation=MINE, address="127.0.0.1:1"),
        side=rooms_pb2.SIDE_PREFILL,
        layout=layout,
        tokens_max=100,
        rooms_max=1,
        credential=OWN,
        pid=7,
        kv_checksum="record",
    )
    for digest in (b"short", bytes(33)):
        wire.exit_digest = digest
        with pytest.raises(RemoteError, match="exit_digest"):
            await client.call(workers.Register, wire)
    wire.exit_digest = digest_of(b"drawn by its starter")
    await client.call(workers.Register, wire)
    shown = workers_pb2.ReportExitRequest(name="more", pid=7, secret=b"drawn by its starter")
    await client.call(workers.ReportExit, shown)
    assert at.registry.departed() == [MINE]
