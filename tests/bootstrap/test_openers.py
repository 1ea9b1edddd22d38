"""Tests that a router names itself as the opener of its rooms, and leaves other routers' rooms alone."""

from collections.abc import AsyncIterator

import pytest

from baton.api.backend import Hangup
from baton.ids import Incarnation
from baton.rooms.errors import RoomExists
from baton.wire.baton.v1 import rooms_pb2, workers_pb2
from baton.wire.worker_credential import incarnation_of
from tests.bootstrap.scripted import LAYOUT, D, House, P, accepted, asked, first, house, read, tokens
from tests.bootstrap.test_bootstrap_services import MINE, OWN, Client, client  # noqa: F401 - a fixture
from tests.bootstrap.test_choices import several
from tests.bootstrap.test_request_stream import decodes, prefills
from tests.wire.servers import until


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house(rooms_max=3) as made:
        yield made


def test_each_run_of_a_router_draws_another_opener() -> None:
    openers = {House().rooms.opener for _ in range(8)}
    assert len(openers) == 8
    assert all(0 < opener < 2**63 for opener in openers)


async def test_opener_owns_every_message_about_a_room_names_its_opener(at: House) -> None:
    at.prefill.script = [accepted(P), first(7)]
    at.decode.script = [accepted(D), tokens(0, [7])]
    stream = await at.backend.generate(several(2))
    await stream.next()
    stream.end_choice(1)
    await until(lambda: at.decode.enough == [(1, 1)])
    await stream.hang_up(Hangup.CLIENT_GONE)
    await until(lambda: 1 in at.prefill.cancels and 1 in at.decode.cancels)
    assert at.prefill.openers == at.decode.openers == {at.rooms.opener}


async def test_opener_owns_an_id_that_another_router_has_open_is_left_to_it(at: House) -> None:
    """The worker refuses the second room, and the request goes on under another id."""
    at.prefill.scripts, at.prefill.script = [[accepted(P)]], prefills()
    at.decode.scripts, at.decode.script = [[RoomExists("room 1 is or was in use here")]], decodes()
    assert await read(await at.backend.generate(asked())) == ([7, 8, 9], "length")
    assert at.decode.called == [1, 2]


def registration(name: str, credential: bytes) -> workers_pb2.RegisterRequest:
    peer = rooms_pb2.Peer(name=name, incarnation=incarnation_of(credential), address="127.0.0.1:1")
    return workers_pb2.RegisterRequest(
        worker=peer,
        side=rooms_pb2.SIDE_PREFILL,
        layout=LAYOUT,
        tokens_max=10,
        rooms_max=1,
        credential=credential,
    )


async def test_a_worker_learns_the_opener_with_its_lease(client: Client) -> None:  # noqa: F811
    registered = await client.call(client.workers.Register, registration("new", OWN))
    renewal = workers_pb2.RenewRequest(incarnation=MINE, credential=OWN)
    renewed = await client.call(client.workers.Renew, renewal)
    opening = rooms_pb2.OpenRoomRequest(request_id="request-1", prompt_tokens=3, tokens=5)
    opened = await client.call(client.rooms.OpenRoom, opening)
    assert registered.opener == renewed.opener == opened.opener == client.at.rooms.opener


async def test_gone_is_monotone_and_another_process_of_a_name_is_no_proof(client: Client) -> None:  # noqa: F811
    """A router that knew the former holder of a name does not report it as gone, and no other router can."""
    await client.call(client.workers.Register, registration("new", OWN))
    client.at.rooms.lose(MINE, "its lease ran out", proof=None)
    successor = b"drawn by its successor"
    await client.call(client.workers.Register, registration("new", successor))
    renewal = workers_pb2.RenewRequest(incarnation=incarnation_of(successor), credential=successor)
    assert MINE not in (await client.call(client.workers.Renew, renewal)).departed
    client.at.rooms.lose(MINE, "its process exited", proof="exited")
    for _ in range(2):
        assert Incarnation(MINE) in (await client.call(client.workers.Renew, renewal)).departed
