"""Tests of the messages by which a worker's load reaches placement and wakes waiting requests."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from baton.bootstrap.bootstrap_services import RoomService, WorkerRegistry
from baton.fleet.room_entry import RoomEntry
from baton.ids import RoomId
from baton.rooms.phases import Side
from baton.wire.baton.v1 import rooms_pb2, rooms_pb2_grpc, workers_pb2, workers_pb2_grpc
from baton.wire.load_messages import load_from_wire
from baton.wire.worker_credential import of_ranks
from tests.bootstrap.scripted import LENGTH, D, House, P, accepted, asked, ended, first, house, read, tokens
from tests.bootstrap.test_bootstrap_services import Client
from tests.wire.servers import channel_to, serving, until


def load(free: int, number: int, **more: int) -> rooms_pb2.WorkerLoad:
    return rooms_pb2.WorkerLoad(
        number=number, free_pages=[free], asked_pages=[0], running_max=64, waiting=9, **more
    )


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with house(places=9) as at:

        def add(server: grpc.aio.Server) -> None:
            rooms_pb2_grpc.add_RoomServiceServicer_to_server(RoomService(at.rooms), server)
            workers_pb2_grpc.add_WorkerRegistryServicer_to_server(WorkerRegistry(at.rooms), server)

        async with serving(add) as address, channel_to(address) as channel:
            yield Client(at, channel)


async def renewed(client: Client, told: rooms_pb2.WorkerLoad) -> None:
    decode = client.at.decode
    request = workers_pb2.RenewRequest(
        incarnation=decode.incarnation, credential=decode.credential, load=told
    )
    await client.call(client.workers.Renew, request)


async def waiting(at: House) -> "asyncio.Future[RoomEntry]":
    found = asyncio.ensure_future(at.admission.admit("late", 3, 5))
    await until(lambda: at.admission.queued() == 1)
    return found


async def test_a_renewal_tells_it(client: Client) -> None:
    await renewed(client, load(free=0, number=1))
    late = await waiting(client.at)
    await renewed(client, load(free=100, number=2))
    assert (await late).decode.name == "decode-0"
    assert client.at.registry.worker(client.at.decode.incarnation).tokens == 1_000 - 100 + 5


async def test_the_report_of_what_was_given_back_tells_it(client: Client) -> None:
    at = client.at
    room = await client.open()
    await renewed(client, load(free=0, number=1, entered=room))
    late = await waiting(at)
    request = rooms_pb2.ReportRoomsRequest(
        incarnation=at.decode.incarnation,
        credential=at.decode.credential,
        reports=[rooms_pb2.RoomReport(room=room, retired=True)],
        load=load(free=100, number=2),
    )
    await client.call(client.rooms.ReportRooms, request)
    assert (await late).decode.name == "decode-0"


async def test_what_gives_a_room_back_without_a_word_of_its_load_gives_nobody_a_place(client: Client) -> None:
    """The worker may have granted its pages to a room that waits there."""
    room = await client.open()
    await renewed(client, load(free=0, number=1, entered=room))
    late = await waiting(client.at)
    client.at.rooms.side_retired(RoomId(room), Side.DECODE)
    await asyncio.sleep(0)
    assert not late.done()
    late.cancel()


async def test_only_its_first_rank_and_nobody_else_tells_it(client: Client) -> None:
    at = client.at
    await renewed(client, load(free=0, number=1))
    for incarnation, rank in ((at.decode.incarnation, 1), (0, 0)):
        request = rooms_pb2.ReportRoomsRequest(incarnation=incarnation, rank=rank, load=load(100, number=2))
        if rank:
            request.credential = of_ranks(at.decode.credential)
        await client.call(client.rooms.ReportRooms, request)
    assert at.registry.worker(at.decode.incarnation).usage.left == 0


async def test_the_message_in_which_a_room_ends_tells_it_and_those_who_wait_are_served_soon() -> None:
    async with house(places=9) as at:
        goes_on = asyncio.Event()
        at.prefill.script = [accepted(P), first(7), ended(P)]
        at.decode.scripts = [[accepted(D), tokens(0, [7]), goes_on, tokens(1, [8, 9], LENGTH), ended(D)]]
        at.decode.script = [accepted(D)]
        stream = await at.backend.generate(asked())
        at.rooms.update_load(at.decode.incarnation, load_from_wire(load(free=0, number=1, entered=1)))
        late = await waiting(at)
        at.decode.says = load(free=100, number=2)
        goes_on.set()
        assert await read(stream) == ([7, 8, 9], "length")
        assert (await late).decode.name == "decode-0"
        at.admission.discard(await late)
        at.retired()
        await at.unfollowed()
        assert at.registry.open_count() == 0


async def test_who_waits_is_looked_at_once_for_many_words_at_one_time() -> None:
    async with house(places=9) as at:
        told = [load_from_wire(load(free=free, number=free + 1)) for free in range(100)]
        at.rooms.update_load(at.decode.incarnation, told[0])
        late, looks = await waiting(at), list[None]()
        wake = at.admission.wake

        def counted() -> None:
            looks.append(None)
            wake()

        at.admission.wake = counted  # type: ignore[method-assign]
        for each in told[1:]:
            at.rooms.update_load(at.decode.incarnation, each)
        assert not looks, "whoever's room ended with this very word is to wait by then"
        assert (await late).decode.name == "decode-0"
        assert len(looks) == 1
