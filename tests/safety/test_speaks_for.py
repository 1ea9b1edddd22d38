"""Tests that one side's certificate cannot act for a worker of the other, nor declare it dead."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from baton.bootstrap import credential_store
from baton.bootstrap.bootstrap_services import RoomService, WorkerRegistry
from baton.bootstrap.credential_store import CredentialStore
from baton.fleet.need import Need
from baton.fleet.room_entry import RoomPhase
from baton.fleet.worker_record import WorkerState
from baton.ids import Incarnation
from baton.rooms.phases import Side
from baton.wire.baton.v1 import rooms_pb2, rooms_pb2_grpc, workers_pb2, workers_pb2_grpc
from baton.wire.channel import Channels, Server
from baton.wire.conversions import side_to_wire
from baton.wire.errors import NotProven, RemoteError, remote_error
from baton.wire.service_role import ServiceRole
from baton.wire.tls_identity import Identity
from baton.wire.worker_credential import incarnation_of, of_ranks
from tests.bootstrap.scripted import LAYOUT, House, ScriptedWorker, house
from tests.safety.certificates import of

CALL_S: Final = 20.0
DRAWN: Final = (b"drawn by somebody", b"drawn by the next", b"drawn by a later one")
UNKNOWN, NEXT, LATER = map(incarnation_of, DRAWN)
SECURED: Final = pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
SIDES: Final = pytest.mark.parametrize("side", list(Side), ids=lambda side: side.value)


class Stack:
    """A bootstrap with a worker of each side, and callers with any party's certificate."""

    def __init__(self, at: House, address: str, folder: Path | None) -> None:
        self.at = at
        self._address = address
        self.channels = {
            party: Channels.showing(None if folder is None else Identity(of(folder, party)))
            for party in ServiceRole
        }

    async def ask(self, party: ServiceRole, request: Any) -> str:
        """Return how the call ended: OK, or the kind of error."""
        channel = self.channels[party].to(self._address, ServiceRole.BOOTSTRAP)
        workers = workers_pb2_grpc.WorkerRegistryStub(channel)
        method = {
            workers_pb2.RegisterRequest: workers.Register,
            workers_pb2.RenewRequest: workers.Renew,
            workers_pb2.DrainRequest: workers.Drain,
            workers_pb2.LeaveRequest: workers.Leave,
            workers_pb2.ReportExitRequest: workers.ReportExit,
            rooms_pb2.ReportRoomsRequest: rooms_pb2_grpc.RoomServiceStub(channel).ReportRooms,
            rooms_pb2.CancelRoomRequest: rooms_pb2_grpc.RoomServiceStub(channel).CancelRoom,
        }[type(request)]
        try:
            await method(request, timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            remote: RemoteError = remote_error(error)
            assert (remote.kind == "NotAdmitted") == (remote.code is grpc.StatusCode.PERMISSION_DENIED)
            return remote.kind
        return "OK"

    def worker(self, side: Side) -> ScriptedWorker:
        return self.at.prefill if side is Side.PREFILL else self.at.decode

    async def close(self) -> None:
        for channels in self.channels.values():
            await channels.close()


@asynccontextmanager
async def stack(folder: Path | None) -> AsyncIterator[Stack]:
    """A stack with certificates from this folder, or without any if it is None."""
    async with house() as at:
        server = Server(None if folder is None else Identity(of(folder, "bootstrap")))
        workers_pb2_grpc.add_WorkerRegistryServicer_to_server(WorkerRegistry(at.rooms), server.grpc)
        rooms_pb2_grpc.add_RoomServiceServicer_to_server(RoomService(at.rooms), server.grpc)
        address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
        await server.start(())
        made = Stack(at, address, folder)
        try:
            yield made
        finally:
            await made.close()
            await server.stop(0)


def without_proof(request: Any, shown: bytes) -> Any:
    """Return the request of a caller that knows all but the worker's secret, with `shown` in its place."""
    made = type(request)()
    made.CopyFrom(request)
    made.credential = shown
    return made


def other(side: Side) -> ServiceRole:
    """Return the worker role of the other side."""
    return ServiceRole.DECODE if side is Side.PREFILL else ServiceRole.PREFILL


def registration(
    party: ServiceRole, name: str, incarnation: int, credential: bytes = b""
) -> workers_pb2.RegisterRequest:
    """`credential`: one of DRAWN where none is given, the incarnation's own if one of them is."""
    own = next((each for each in DRAWN if incarnation_of(each) == incarnation), DRAWN[0])
    return workers_pb2.RegisterRequest(
        worker=rooms_pb2.Peer(name=name, incarnation=incarnation, address="127.0.0.1:1"),
        side=side_to_wire(Side(party.value)),
        layout=LAYOUT,
        tokens_max=100,
        rooms_max=1,
        credential=credential or own,
    )


def spoken(worker: ScriptedWorker, room: int) -> list[Any]:
    """Return all requests that are sent in a worker's name, its goodbye last."""
    named, own = worker.incarnation, worker.credential
    event = rooms_pb2.RoomEvent(name="granted").SerializeToString()
    report = rooms_pb2.RoomReport(room=room, event=event, retired=True)
    return [
        workers_pb2.RenewRequest(incarnation=named, credential=own),
        rooms_pb2.ReportRoomsRequest(incarnation=named, reports=[report], credential=own),
        workers_pb2.DrainRequest(incarnation=named, credential=own),
        workers_pb2.ReportExitRequest(name=worker.name, pid=worker.pid + 1),
        workers_pb2.LeaveRequest(incarnation=named, credential=own),
    ]


@SIDES
async def test_nobody_speaks_for_a_worker_of_the_other_side(ours: Path, side: Side) -> None:
    async with stack(ours) as here:
        worker, registry = here.worker(side), here.at.registry
        pair = (registry.worker(here.at.prefill.incarnation), registry.worker(here.at.decode.incarnation))
        room = here.at.admission.open_on("request-1", pair, Need(5, 5))
        exited = workers_pb2.ReportExitRequest(name=worker.name, pid=worker.pid)
        *rest, late, leave = spoken(worker, room.id)
        again = registration(other(side), "another", worker.incarnation)
        exited.secret = worker.exit_secret
        for request in (*rest, exited, leave, again):
            assert await here.ask(other(side), request) == "NotAdmitted", request
        assert await here.ask(other(side), late) == "OK", "it names no process that is known"
        assert registry.departed() == []
        assert registry.worker(worker.incarnation).state is WorkerState.READY
        assert [event.name for event in room.events] == ["opened"]
        assert len(room.waiting_for) == 2
        for request in (*rest, late, leave):
            assert await here.ask(ServiceRole.of(side), request) == "OK", request
        assert registry.departed() == [worker.incarnation]
        assert side not in room.waiting_for


@SIDES
async def test_exit_by_starter_whom_a_bootstrap_has_forgotten_nobody_registers_as_and_says_goodbye(
    ours: Path, side: Side
) -> None:
    """The bootstrap was restarted while the worker was stopped."""
    async with stack(ours) as here:
        for shown in DRAWN[1:]:
            forged = registration(ServiceRole.of(side), "another", UNKNOWN, shown)
            assert await here.ask(ServiceRole.of(side), forged) == "NotProven"
            leave = workers_pb2.LeaveRequest(incarnation=UNKNOWN, credential=shown)
            assert await here.ask(ServiceRole.of(side), leave) == "UnknownWorker"
        assert here.at.registry.departed() == []
        assert (
            await here.ask(ServiceRole.of(side), registration(ServiceRole.of(side), "another", UNKNOWN))
            == "OK"
        )


@SIDES
async def test_a_worker_that_fell_silent_is_not_taken_for_dead_on_the_other_sides_word(
    ours: Path, side: Side
) -> None:
    """The silent worker's process may still write."""
    async with stack(ours) as here:
        worker, registry = here.worker(side), here.at.registry
        for silent in (here.at.prefill, here.at.decode):
            here.at.rooms.lose(silent.incarnation, "its lease ran out", proof=None)
        for request in (
            workers_pb2.LeaveRequest(incarnation=worker.incarnation),
            workers_pb2.ReportExitRequest(name=worker.name, pid=worker.pid),
            registration(other(side), worker.name, UNKNOWN),
            registration(other(side), "another", worker.incarnation),
        ):
            assert await here.ask(other(side), request) == "NotAdmitted", request
        assert registry.departed() == []
        next_holder = registration(ServiceRole.of(side), worker.name, UNKNOWN)
        assert await here.ask(ServiceRole.of(side), next_holder) == "NameInUse", "it answers"
        worker.found = UNKNOWN  # another process does
        assert await here.ask(ServiceRole.of(side), next_holder) == "OK"
        assert registry.departed() == [], "its process may have another address, or none, and still write"


async def test_nobody_says_goodbye_for_a_worker_that_is_not_known(ours: Path) -> None:
    """The bootstrap was restarted, and the workers have not registered again."""
    async with stack(ours) as here:
        goodbye = workers_pb2.LeaveRequest(incarnation=UNKNOWN)
        for party in (ServiceRole.PREFILL, ServiceRole.DECODE):
            assert await here.ask(party, goodbye) == "UnknownWorker"
        assert here.at.registry.departed() == []


@SIDES
async def test_exit_by_starter_no_certificate_is_proof_and_the_starters_secret_is(
    ours: Path, side: Side
) -> None:
    for party in (ServiceRole.of(side), ServiceRole.BOOTSTRAP):
        async with stack(ours) as here:
            worker = here.worker(side)
            worker.found = UNKNOWN  # another process answers where it listened
            exited = workers_pb2.ReportExitRequest(name=worker.name, pid=worker.pid)
            assert await here.ask(party, exited) == "NotProven"
            here.at.rooms.lose(worker.incarnation, "its lease ran out", proof=None)
            assert await here.ask(party, exited) == "NotProven", "nor is silence beside it"
            assert here.at.registry.departed() == []
            exited.secret = worker.exit_secret
            assert await here.ask(party, exited) == "OK"
            assert here.at.registry.departed() == [Incarnation(worker.incarnation)]


@SECURED
@SIDES
async def test_nobody_speaks_for_a_worker_of_whom_it_knows_all_but_the_credential(
    ours: Path, side: Side, secured: bool
) -> None:
    """Another worker of its side cannot do so either, nor can one of its own ranks for its leader."""
    async with stack(ours if secured else None) as here:
        worker, registry = here.worker(side), here.at.registry
        pair = (registry.worker(here.at.prefill.incarnation), registry.worker(here.at.decode.incarnation))
        room = here.at.admission.open_on("request-1", pair, Need(5, 5))
        renew, report, drain, _, leave = spoken(worker, room.id)
        again = registration(ServiceRole.of(side), worker.name, worker.incarnation)
        for shown in (b"", b"x" * 32, of_ranks(worker.credential)):
            for request in (renew, report, drain, leave):
                assert await here.ask(ServiceRole.of(side), without_proof(request, shown)) == "NotProven", (
                    request
                )
            if shown:
                assert await here.ask(ServiceRole.of(side), without_proof(again, shown)) == "NotProven"
        assert registry.worker(worker.incarnation).state is WorkerState.READY
        assert (registry.departed(), len(room.waiting_for)) == ([], 2)
        report.rank = 1
        assert await here.ask(ServiceRole.of(side), report) == "NotProven", "the leader's is not a rank's"
        lines = without_proof(report, of_ranks(worker.credential))
        assert await here.ask(ServiceRole.of(side), lines) == "OK"
        assert [event.name for event in room.events] == ["opened", "granted"]
        assert len(room.waiting_for) == 2, "a rank adds lines alone"


async def test_a_registration_without_a_credential_is_none(ours: Path) -> None:
    async with stack(None) as here:
        for shown in (b"", b"short", b"x" * 65):
            asked = registration(ServiceRole.PREFILL, "another", UNKNOWN)
            asked.credential = shown
            assert await here.ask(ServiceRole.PREFILL, asked) == "Malformed"


async def test_a_room_is_ended_by_whoever_opened_it_or_shows_the_bootstraps_certificate(ours: Path) -> None:
    for secured in (False, True):
        async with stack(ours if secured else None) as here:
            registry = here.at.registry
            pair = (registry.worker(here.at.prefill.incarnation), registry.worker(here.at.decode.incarnation))
            rooms = [here.at.admission.open_on(f"request-{n}", pair, Need(5, 5)) for n in range(2)]
            key = here.at.rooms.credentials.key_of(rooms[1].id)
            for shown in (b"", key):
                told = rooms_pb2.RoomReport(room=rooms[0].id, outcome=rooms_pb2.Outcome(), key=shown)
                cancel = rooms_pb2.CancelRoomRequest(room=rooms[0].id, key=shown)
                for request in (cancel, rooms_pb2.ReportRoomsRequest(reports=[told])):
                    if secured:
                        assert await here.ask(ServiceRole.DECODE, request) == "NotAdmitted", request
                    else:
                        assert await here.ask(ServiceRole.DECODE, request) == "NotProven", request
                assert rooms[0].phase is RoomPhase.OPEN
            if secured:
                assert await here.ask(ServiceRole.BOOTSTRAP, cancel) == "OK"
            else:
                cancel.key = here.at.rooms.credentials.key_of(rooms[0].id)
                assert await here.ask(ServiceRole.DECODE, cancel) == "OK"
            assert rooms[0].phase is RoomPhase.CLOSING


def test_the_credential_of_a_worker_that_lives_outlasts_all_that_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Past the bound, credentials that were unused for longest are forgotten. Otherwise many registrations
    could displace a live worker's credential and let a caller register in its name."""
    monkeypatch.setattr(credential_store, "KEPT_MAX", 4)
    known, own, lives, idle = CredentialStore(), bytes(16), Incarnation(1), Incarnation(2)
    known.enter(lives, own)
    known.enter(idle, own)
    for other in range(3, 20):
        known.enter(Incarnation(other), bytes([other]) * 16)
        known.check(lives, own)
        if known.knows(idle):
            with pytest.raises(NotProven):
                known.check(idle, bytes([other]) * 16)
    known.check(lives, own)
    assert not known.knows(idle)
    assert not known.knows(Incarnation(3))
