"""Tests of what a stolen certificate or secret allows, one for each line of docs/security.md."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from baton.bootstrap.bootstrap_services import RoomService, WorkerRegistry
from baton.fleet.need import Need
from baton.fleet.room_entry import RoomPhase
from baton.fleet.worker_record import WorkerState
from baton.ids import Incarnation
from baton.rooms.phases import Side
from baton.wire.baton.v1 import rooms_pb2, rooms_pb2_grpc, workers_pb2, workers_pb2_grpc
from baton.wire.channel import Channels, Server, open_channel
from baton.wire.method_authorization import ALLOWED_CALLERS
from baton.wire.service_role import ServiceRole
from baton.wire.tls_identity import Identity
from tests.bootstrap.scripted import house
from tests.safety.certificates import made, of
from tests.safety.test_admittance import METHODS, call, request_of
from tests.safety.test_admittance import serving as serving_all
from tests.safety.test_speaks_for import (
    DRAWN,
    LATER,
    NEXT,
    SIDES,
    UNKNOWN,
    Stack,
    registration,
    spoken,
    stack,
)

PAGE: Final = Path(__file__).parents[2] / "docs" / "security.md"
HANDOVER: Final = {"HandoverService/HandOver"}
RUN: Final = {
    *("PrefillService/RunRoom", "PrefillService/RunRooms"),
    *("DecodeService/StreamRoom", "DecodeService/StreamRooms"),
}
READ: Final = {f"RoomService/{each}" for each in ("GetRoom", "ListRooms", "WatchRoom")}
REGISTRY: Final = {f"WorkerRegistry/{each}" for each in ("Register", "Renew", "Drain", "Leave")}


def test_each_line_of_the_page_has_its_test() -> None:
    lines = [
        line for line in PAGE.read_text().splitlines() if "(`tests/safety/" in line or "| `test_" in line
    ]
    named = {name for line in lines for name in re.findall(r"`(test_\w+)`", line)}
    here = {name for name in globals() if name.startswith("test_")} - {
        "test_each_line_of_the_page_has_its_test"
    }
    elsewhere = {
        "test_no_method_is_served_to_a_caller_without_the_token",
        "test_each_caller_is_let_in_to_its_own_routes_alone",
        "test_authorised_writer_a_receiver_is_believed_by_the_secret_that_a_room_named",
        "test_authorised_writer_a_close_that_comes_before_its_room_ends_it_for_its_own_receiver_alone",
        "test_authorised_writer_a_worker_lets_go_of_no_room_of_anothers",
    }
    suite = "".join(path.read_text() for path in PAGE.parents[1].glob("tests/*/test_*.py"))
    assert all(f"def {name}(" in suite for name in named)
    assert named == here | elsewhere


async def reached(folder: Path, party: ServiceRole) -> set[str]:
    """Return all methods that a certificate may call."""
    async with serving_all(of(folder, "bootstrap")) as (address, _):
        channel = open_channel(address, ServiceRole.BOOTSTRAP, Identity(of(folder, party)))
        found = {
            f"{each.containing_service.name}/{each.name}": await call(channel, each, request_of(each, party))
            for each in METHODS
        }
        await channel.close()
    assert set(found.values()) <= {"OK", "PERMISSION_DENIED"}
    return {name for name, how in found.items() if how == "OK"}


async def test_the_bootstraps_certificate_opens_reads_and_ends_rooms_and_is_no_worker(ours: Path) -> None:
    admitted = await reached(ours, ServiceRole.BOOTSTRAP)
    assert admitted >= RUN | READ | {"RoomService/OpenRoom", "RoomService/CancelRoom"}
    assert not admitted & (HANDOVER | REGISTRY)
    async with stack(ours) as here:
        for side in Side:
            worker = here.worker(side)
            *asked, _, leave = spoken(worker, 1)
            for request in (*asked, leave, registration(ServiceRole.of(side), "another", NEXT)):
                if not isinstance(request, rooms_pb2.ReportRoomsRequest | workers_pb2.ReportExitRequest):
                    assert await here.ask(ServiceRole.BOOTSTRAP, request) == "NotAdmitted", request
            exited = workers_pb2.ReportExitRequest(name=worker.name, pid=worker.pid)
            for leased in (True, False):
                if not leased:
                    here.at.rooms.lose(worker.incarnation, "its lease ran out", proof=None)
                assert await here.ask(ServiceRole.BOOTSTRAP, exited) == "NotProven"
        assert here.at.registry.departed() == []


@SIDES
async def test_a_workers_certificate_makes_another_worker_of_its_side_and_speaks_for_none_there_is(
    ours: Path, side: Side
) -> None:
    party = ServiceRole.of(side)
    admitted = await reached(ours, party)
    own = HANDOVER if side is Side.DECODE else set()
    assert admitted == REGISTRY | own | {"WorkerRegistry/ReportExit", "RoomService/ReportRooms"}
    async with stack(ours) as here:
        assert await here.ask(party, registration(party, "another", NEXT)) == "OK"
        assert here.at.registry.worker(Incarnation(NEXT)).state is WorkerState.JOINING, (
            "a canary passes through it first"
        )
        for other in Side:
            worker = here.worker(other)
            for request in spoken(worker, 1):
                if isinstance(request, workers_pb2.ReportExitRequest):
                    request.pid = worker.pid
                else:
                    request.credential = b"x" * 32
                wanted = "NotAdmitted" if other is not side else "NotProven"
                assert await here.ask(party, request) == wanted, request
            taken = registration(party, worker.name, LATER)
            assert await here.ask(party, taken) == "NameInUse"
        silent = here.worker(side)
        here.at.rooms.lose(silent.incarnation, "its lease ran out", proof=None)
        silent.found = UNKNOWN  # it is stopped, and somebody else answers at its address
        exited = workers_pb2.ReportExitRequest(name=silent.name, pid=silent.pid)
        assert await here.ask(party, exited) == "NotProven"
        assert await here.ask(party, registration(party, silent.name, LATER)) == "OK"
        assert here.at.registry.departed() == []


async def test_the_authoritys_key_is_every_party_of_its_stack_and_of_no_other(
    tmp_path: Path, ours: Path, strangers: Path
) -> None:
    """A certificate signed by the stack's authority is accepted. One signed by another authority is not."""
    assert await reached(ours, ServiceRole.BOOTSTRAP) | await reached(ours, ServiceRole.DECODE) == set(
        ALLOWED_CALLERS
    ) - {
        name
        for name, parties in ALLOWED_CALLERS.items()
        if not parties & {ServiceRole.BOOTSTRAP, ServiceRole.DECODE}
    }
    other = made(tmp_path / "other")
    for folder in (strangers, other):
        async with serving_all(of(ours, "bootstrap")) as (address, _):
            channel = open_channel(
                address, ServiceRole.BOOTSTRAP, Identity(of(folder, ServiceRole.BOOTSTRAP))
            )
            assert (
                await call(channel, METHODS[0], request_of(METHODS[0], ServiceRole.BOOTSTRAP))
                == "UNAVAILABLE"
            )
            await channel.close()


@asynccontextmanager
async def plain_with(token: str) -> AsyncIterator[Stack]:
    """A stack without certificates that requires a run token, and a caller that has it."""
    async with house() as at:
        server = Server(None, token)
        workers_pb2_grpc.add_WorkerRegistryServicer_to_server(WorkerRegistry(at.rooms), server.grpc)
        rooms_pb2_grpc.add_RoomServiceServicer_to_server(RoomService(at.rooms), server.grpc)
        address = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
        await server.start(())
        made_here = Stack(at, address, None)
        made_here.channels = dict.fromkeys(ServiceRole, Channels.showing(None, token))
        try:
            yield made_here
        finally:
            await made_here.close()
            await server.stop(0)


async def test_the_runs_token_is_every_party_but_no_worker_that_registered_and_no_rooms_opener() -> None:
    async with plain_with("a-token-of-this-run-01") as here:
        registry = here.at.registry
        pair = (registry.worker(here.at.prefill.incarnation), registry.worker(here.at.decode.incarnation))
        room = here.at.admission.open_on("request-1", pair, Need(5, 5))
        asked = rooms_pb2.CancelRoomRequest(room=room.id)
        assert await here.ask(ServiceRole.BOOTSTRAP, asked) == "NotProven"
        for side in Side:
            renew, report, drain, _, leave = spoken(here.worker(side), room.id)
            for request in (renew, report, drain, leave):
                request.credential = b"x" * 32
                assert await here.ask(ServiceRole.of(side), request) == "NotProven"
        assert (room.phase, registry.departed()) == (RoomPhase.OPEN, [])
        assert await here.ask(ServiceRole.DECODE, registration(ServiceRole.PREFILL, "another", NEXT)) == "OK"


@SIDES
async def test_a_workers_credential_speaks_for_that_worker_alone(ours: Path, side: Side) -> None:
    async with stack(ours) as here:
        mine = here.worker(side)
        second = registration(ServiceRole.of(side), "second", NEXT, DRAWN[1])
        assert await here.ask(ServiceRole.of(side), second) == "OK"
        leave = workers_pb2.LeaveRequest(incarnation=NEXT, credential=mine.credential)
        assert await here.ask(ServiceRole.of(side), leave) == "NotProven"
        leave.incarnation = mine.incarnation
        assert await here.ask(ServiceRole.of(side), leave) == "OK"
        assert here.at.registry.departed() == [mine.incarnation]


@SIDES
async def test_a_starters_secret_ends_the_process_that_was_started_with_it_alone(
    ours: Path, side: Side
) -> None:
    async with stack(ours) as here:
        party, mine = ServiceRole.of(side), here.worker(side)
        for other in Side:
            worker = here.worker(other)
            report = workers_pb2.ReportExitRequest(name=worker.name, pid=worker.pid, secret=mine.exit_secret)
            wanted = "NotAdmitted" if other is not side else "NotGone"
            assert await here.ask(party, report) == wanted, "it answers"
            if other is not side:
                assert await here.ask(ServiceRole.BOOTSTRAP, report) == "NotProven"
        assert here.at.registry.departed() == []
        mine.found = UNKNOWN
        report.name, report.pid = mine.name, mine.pid
        leave = workers_pb2.LeaveRequest(incarnation=mine.incarnation, credential=mine.exit_secret)
        assert await here.ask(party, leave) == "NotProven"
        assert await here.ask(party, report) == "OK"
        assert here.at.registry.departed() == [mine.incarnation]


async def test_a_rooms_key_ends_that_room_alone() -> None:
    async with stack(None) as here:
        registry = here.at.registry
        pair = (registry.worker(here.at.prefill.incarnation), registry.worker(here.at.decode.incarnation))
        mine, others = (here.at.admission.open_on(f"request-{n}", pair, Need(5, 5)) for n in range(2))
        key = here.at.rooms.credentials.key_of(mine.id)
        for room, wanted in ((others, "NotProven"), (mine, "OK")):
            cancel = rooms_pb2.CancelRoomRequest(room=room.id, key=key)
            assert await here.ask(ServiceRole.DECODE, cancel) == wanted
        assert (mine.phase, others.phase) == (RoomPhase.CLOSING, RoomPhase.OPEN)


async def test_a_clients_key_is_nothing_over_grpc() -> None:
    """A key opens the API's port only. Its routes compute and read, and none ends another client's
    request."""
    key = "sk-a-clients-key-0123456789"
    async with plain_with("a-token-of-this-run-01") as here:
        for token in (key, ""):
            here.channels = dict.fromkeys(ServiceRole, Channels.showing(None, token))
            for request in spoken(here.worker(Side.DECODE), 1):
                assert await here.ask(ServiceRole.DECODE, request) == "NotProven"
            await here.close()
