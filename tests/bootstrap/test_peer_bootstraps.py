"""Tests that a bootstrap's pages show what the others have, and say which of them did not answer."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import httpx
import pytest
from fastapi import FastAPI

from baton.bootstrap import bootstrap_services, peer_bootstraps
from baton.bootstrap.bootstrap_services import BootstrapService
from baton.bootstrap.peer_bootstraps import LOOK_UP_MS, READS_MAX, SILENT_MS, PeerBootstraps
from baton.bootstrap.timeline.routes import timeline_router
from baton.ids import Opener
from baton.wire.baton.v1.bootstraps_pb2 import GetPageReply, GetPageRequest, RequestsPage, SummaryPage
from baton.wire.baton.v1.bootstraps_pb2_grpc import (
    BootstrapServiceServicer,
    BootstrapServiceStub,
    add_BootstrapServiceServicer_to_server,
)
from baton.wire.bootstrap_addresses import BootstrapAddresses
from baton.wire.errors import remote_error
from tests.bootstrap.scripted import OWN, House, house
from tests.patience import PATIENCE_S
from tests.wire.servers import channel_to, serving, until

SUMMARY: Final = GetPageRequest(summary=SummaryPage())
BEFORE_MS: Final = 200
"""Longest wait for a bootstrap that never answers, in milliseconds."""

Answer = Callable[[GetPageRequest], GetPageReply]


class Peer(BootstrapServiceServicer):
    """Another bootstrap, which answers by a function, with a status, or only after an event."""

    def __init__(
        self,
        answer: Answer,
        status: grpc.StatusCode | None = None,
        until: asyncio.Event | None = None,
    ) -> None:
        self.answer = answer
        self.status = status
        self.until = until
        self.calls = 0

    async def GetPage(self, request: GetPageRequest, context: grpc.aio.ServicerContext) -> GetPageReply:  # noqa: N802
        self.calls += 1
        if self.until is not None:
            await self.until.wait()
        if self.status is not None:
            await context.abort(self.status, "as it was told")
        return self.answer(request)


class CountingService(BootstrapService):
    """The product's service, with the number of calls that it has had."""

    calls = 0

    async def GetPage(self, request: GetPageRequest, context: grpc.aio.ServicerContext) -> GetPageReply:  # noqa: N802
        self.calls += 1
        return await super().GetPage(request, context)


def page(body: Any, opener: int = 7) -> Answer:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return lambda _: GetPageReply(opener=Opener(opener), json=text)


@asynccontextmanager
async def offered(service: BootstrapServiceServicer) -> AsyncIterator[str]:
    async with serving(lambda server: add_BootstrapServiceServicer_to_server(service, server)) as address:
        yield address


@pytest.fixture
async def here() -> AsyncIterator[House]:
    async with house() as made:
        yield made


@pytest.fixture
async def there() -> AsyncIterator[House]:
    """Another bootstrap of the stack."""
    async with house() as made:
        made.clock.advance(500)
        yield made


async def get(at: House, peers: PeerBootstraps, path: str, **parameters: str) -> httpx.Response:
    app = FastAPI()
    app.include_router(timeline_router(at.rooms, peers))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bootstrap") as http:
        return await http.get(path, params=parameters)


def free_address() -> str:
    """Return an address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        return f"127.0.0.1:{held.getsockname()[1]}"


async def test_a_request_of_another_bootstrap_is_explained_and_its_bootstrap_named(
    here: House, there: House
) -> None:
    await there.admission.admit("request-1", 3, 5)
    async with offered(BootstrapService(there.rooms)) as address:
        reply = await get(here, here.reading([address]), "/requests/chatcmpl-request-1")
    assert reply.status_code == 200
    told = reply.json()
    own = (await get(there, there.peers, "/requests/request-1")).json()
    assert (told["bootstrap"], told["unanswered"]) == (address, [])
    assert (own["bootstrap"], own["unanswered"]) == ("", [])
    assert {**told, "bootstrap": ""} == own


async def test_a_request_of_its_own_is_explained_without_a_call_to_others(here: House) -> None:
    await here.admission.admit("request-1", 3, 5)
    peer = Peer(page({}))
    async with offered(peer) as address:
        assert (await get(here, here.reading([address]), "/requests/request-1")).status_code == 200
    assert peer.calls == 0


async def test_of_several_requests_with_one_id_the_newest_is_explained(here: House, there: House) -> None:
    await there.admission.admit("request-1", 3, 5)
    newer = {"begun_wall_ms": there.clock.wall_ms() + 1, "request_id": "request-1"}
    async with offered(BootstrapService(there.rooms)) as older, offered(Peer(page(newer))) as address:
        for addresses in ([older, address], [address, older]):
            told = (await get(here, here.reading(addresses), "/requests/request-1")).json()
            assert told == {**newer, "bootstrap": address, "unanswered": []}


async def test_what_no_bootstrap_knows_is_not_found_and_the_silent_one_is_named(
    here: House, there: House
) -> None:
    gone = free_address()
    async with offered(BootstrapService(there.rooms)) as address:
        reply = await get(here, here.reading([address, gone]), "/requests/never-was")
    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    assert message.startswith(
        f"Nothing is kept of request 'never-was' here, nor at {address}."
        f" Bootstrap {gone} did not answer: there is no connection to it. It may know the request. "
    )


async def test_the_live_view_has_a_row_of_each_bootstrap_and_the_requests_of_all(
    here: House, there: House
) -> None:
    await here.admission.admit("request-here", 3, 5)
    await there.admission.admit("request-there", 3, 5)
    waiting = [asyncio.create_task(there.admission.admit(f"waits-{each}", 3, 5)) for each in range(2)]
    await until(lambda: there.admission.queued() == 1)
    async with offered(BootstrapService(there.rooms)) as address:
        live = (await get(here, here.reading([address]), "/live")).json()
    rows = {row["address"]: row for row in live["bootstraps"]}
    assert list(rows) == [OWN, address]
    assert [(row["queued"], row["rooms"]["open"]) for row in rows.values()] == [(0, 1), (1, 2)]
    assert rows[address]["ready"] == {"prefill": 1, "decode": 1}
    assert (live["queued"], live["rooms"]["open"], live["kept"]) == (1, 3, 3)
    listed = [(each["request_id"], each["bootstrap"]) for each in live["requests"]]
    assert set(listed) == {("request-here", ""), *((f"waits-{each}", address) for each in range(2))} | {
        ("request-there", address)
    }
    assert listed[-1] == ("request-here", ""), "it came before the others"
    assert live["unanswered"] == []
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_search_finds_the_newest_of_all_bootstraps(here: House, there: House) -> None:
    await here.admission.admit("same-0", 3, 5)
    await there.admission.admit("same-1", 3, 5)
    async with offered(BootstrapService(there.rooms)) as address:
        peers = here.reading([address])
        found = [
            (await get(here, peers, "/requests", search="same", limit=limit)).json()["requests"]
            for limit in ("1", "2")
        ]
        assert [[each["request_id"] for each in some] for some in found] == [["same-1"], ["same-1", "same-0"]]
        failed = (await get(here, peers, "/requests", failed="true")).json()
    assert failed == {"requests": [], "unanswered": []}


async def test_a_bootstrap_knows_itself_among_the_addresses_and_calls_itself_once(here: House) -> None:
    service = CountingService(here.rooms)
    async with offered(service) as address:
        peers = here.reading([address])
        assert peers.own_address == OWN
        for _ in range(3):
            live = (await get(here, peers, "/live")).json()
            assert [row["address"] for row in live["bootstraps"]] == [address]
        assert service.calls == 1


async def test_a_bootstrap_with_two_addresses_is_shown_once(here: House, there: House) -> None:
    async with offered(BootstrapService(there.rooms)) as address:
        second = address.replace("127.0.0.1", "localhost")
        answers = await here.reading([address, second]).read(SUMMARY)
    assert (list(answers.pages), answers.unanswered) == ([address], [])


async def test_no_call_goes_round(here: House, there: House) -> None:
    first, second = CountingService(here.rooms), CountingService(there.rooms)
    async with offered(first) as address, offered(second) as other:
        peers = {id(here): here.reading([other]), id(there): there.reading([address])}
        for number, at in enumerate((here, there), start=1):
            for path in ("/requests/never-was", "/live", "/requests"):
                await get(at, peers[id(at)], path)
            assert (first.calls, second.calls) == (3 * (number - 1), 3)


async def test_a_silent_bootstrap_is_named_and_others_are_shown(here: House, there: House) -> None:
    await there.admission.admit("request-1", 3, 5)
    silent = Peer(page({}), grpc.StatusCode.DEADLINE_EXCEEDED)
    async with offered(BootstrapService(there.rooms)) as address, offered(silent) as other:
        peers = here.reading([other, address])
        for _ in range(3):
            told = (await get(here, peers, "/requests/request-1")).json()
            assert told["bootstrap"] == address
            assert told["unanswered"] == [f"Bootstrap {other} did not answer within {PATIENCE_S:g} s."]
        assert silent.calls == 1, "it is not called again at once"
        here.clock.advance(SILENT_MS)
        silent.status = None
        assert (await get(here, peers, "/requests/request-1")).json()["unanswered"] == []
        assert silent.calls == 2


async def test_a_call_that_is_not_answered_ends(here: House) -> None:
    answers = asyncio.Event()
    async with offered(Peer(page({}), until=answers)) as address:
        found = await here.reading([address], answer_s=BEFORE_MS / 1000).read(SUMMARY)
        answers.set()
    assert found.unanswered == [f"Bootstrap {address} did not answer within 0.2 s."]


async def test_pages_that_wait_for_others_are_bounded(here: House) -> None:
    answers = asyncio.Event()
    peer = Peer(page({}), until=answers)
    async with offered(peer) as address:
        peers = here.reading([address])
        waiting = [asyncio.create_task(peers.read(SUMMARY)) for _ in range(READS_MAX)]
        await until(lambda: peer.calls == READS_MAX)
        one_more = await peers.read(SUMMARY)
        assert (one_more.pages, peer.calls) == ({}, READS_MAX)
        assert one_more.unanswered == [
            f"The other bootstraps were not called: {READS_MAX} pages wait for them."
        ]
        answers.set()
        assert all(each.pages for each in await asyncio.gather(*waiting))
        assert (await peers.read(SUMMARY)).pages


UNREADABLE: Final[Sequence[Any]] = (
    b"{",
    b"\xff",
    b"[]",
    b"1",
    b"[" * 100_000,
    {"queued": 1},
    {"queued": 0, "rooms": [], "kept": 0, "ready": {}, "requests": [], "failed": []},
    {
        "queued": 0,
        "rooms": {"open": 0, "streaming": 0, "closing": 0},
        "kept": 0,
        "ready": {"prefill": 1, "decode": 1},
        "requests": [{}],
        "failed": [],
    },
)


@pytest.mark.parametrize("body", UNREADABLE, ids=range(len(UNREADABLE)))
async def test_a_page_of_another_form_is_named_and_spoils_no_other(
    here: House, there: House, body: Any
) -> None:
    async with offered(Peer(page(body))) as odd, offered(BootstrapService(there.rooms)) as address:
        live = (await get(here, here.reading([odd, address]), "/live")).json()
    assert [row["address"] for row in live["bootstraps"]] == [OWN, address]
    assert live["unanswered"] == [f"Bootstrap {odd} answered in another form than this version reads."]


@pytest.mark.parametrize("body", [{"state": "answered"}, {"begun_wall_ms": None}, {"requests": 5}])
@pytest.mark.parametrize("path", ["/requests/request-1", "/requests"])
async def test_a_timeline_or_list_of_another_form_is_named(here: House, path: str, body: Any) -> None:
    async with offered(Peer(page(body))) as odd:
        reply = await get(here, here.reading([odd]), path)
    assert f"Bootstrap {odd} answered in another form" in reply.text


async def test_a_bootstrap_of_an_earlier_version_is_named(here: House) -> None:
    async with serving(lambda _: None) as address:
        answers = await here.reading([address]).read(SUMMARY)
    assert answers.unanswered == [f"Bootstrap {address} did not answer: Method not found!."]


async def test_a_page_that_is_too_long_is_neither_sent_nor_read(
    here: House, there: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with offered(BootstrapService(there.rooms)) as address:
        with monkeypatch.context() as patched:
            patched.setattr(peer_bootstraps, "PAGE_BYTES_MAX", 10)
            found = await here.reading([address]).read(SUMMARY)
            assert "in another form" in found.unanswered[0]
        monkeypatch.setattr(bootstrap_services, "PAGE_BYTES_MAX", 10)
        found = await here.reading([address]).read(SUMMARY)
    assert "bytes, at most 10 are sent" in found.unanswered[0]


async def test_a_name_with_several_addresses_is_looked_up_again_and_old_channels_are_closed(
    here: House, there: House
) -> None:
    listed: list[str] = []
    looked_up: list[str] = []

    def look_up(host: str, port: int) -> Sequence[tuple[Any, ...]]:
        looked_up.append(f"{host}:{port}")
        split = (each.rpartition(":") for each in listed)
        return [(socket.AF_INET, 0, 0, "", (name, int(number))) for name, _, number in split]

    second = CountingService(there.rooms)
    async with offered(Peer(page({}))) as address, offered(second) as other:
        listed += [address, other]
        addresses = BootstrapAddresses(["bootstraps:8100"], look_up)
        peers = PeerBootstraps(
            addresses, here.channels, here.rooms.opener, OWN, here.clock, answer_s=PATIENCE_S
        )
        opened = len(here.channels)
        assert set((await peers.read(SUMMARY)).pages) == {address, other}
        assert len(here.channels) == opened + 2
        listed.remove(address)
        await peers.read(SUMMARY)
        assert looked_up == ["bootstraps:8100"]
        here.clock.advance(LOOK_UP_MS)
        assert list((await peers.read(SUMMARY)).pages) == [other]
        assert len(looked_up) == 2
        assert len(here.channels) == opened + 1


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (GetPageRequest(), "page is not set"),
        (GetPageRequest(requests=RequestsPage()), "requests.limit must be 1 to 500"),
        (GetPageRequest(requests=RequestsPage(limit=501)), "requests.limit must be 1 to 500"),
    ],
)
async def test_a_request_for_no_page_is_malformed(here: House, request_: GetPageRequest, text: str) -> None:
    async with offered(BootstrapService(here.rooms)) as address, channel_to(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await BootstrapServiceStub(channel).GetPage(request_, timeout=PATIENCE_S)
    assert (remote_error(refused.value).kind, refused.value.details()) == ("Malformed", text)
