"""Bodies count from their first byte, and no caller shuts another out."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.backend import Overloaded
from baton.api.http import body_pool, request_bodies
from baton.api.http.authentication import AccessControl
from baton.api.http.body_pool import BodyPool, PooledBody
from baton.runtime.listening_ports import bind_port
from baton.web.api_keys import ApiKeys
from baton.web.http_server import serve_http
from tests.api import tiny
from tests.api.requests.test_bad_input import COMPLETIONS
from tests.api.scripted import ScriptedBackend

KEY, OTHER = "sk-one-0123456789", "sk-two-0123456789"
PATIENCE_S: Final = 20.0
BODY_BYTES: Final = 60_000
POOL_BYTES: Final = 10 * BODY_BYTES


class Pool:
    """A pool of 100 bytes, 60 of one caller, and which bodies had to make room."""

    def __init__(self) -> None:
        self.pool = BodyPool(100, 60)
        self.dropped: list[str] = []

    def body(self, caller: bytes, name: str, size: int) -> PooledBody:
        body = PooledBody(caller, lambda: self.dropped.append(name))
        self.pool.take(body, size)
        return body


@pytest.fixture
async def at() -> Pool:
    return Pool()


@pytest.fixture
def stalled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_pool, "STALLED_S", 0.0)


async def test_the_caller_that_has_most_makes_room_for_another(at: Pool) -> None:
    for name in ("a1", "a2", "a3"):
        at.body(b"a", name, 20)
    at.body(b"b", "b1", 40)
    at.body(b"c", "c1", 15)
    assert at.dropped == ["a1"]
    assert at.pool.bytes == 95
    at.body(b"c", "c2", 6)
    assert at.dropped == ["a1", "a2"]


async def test_the_body_of_which_nothing_came_for_longest_makes_room(at: Pool) -> None:
    first, *_ = (at.body(b"a", name, 15) for name in ("a1", "a2", "a3"))
    at.pool.take(first, 5)
    at.body(b"b", "b1", 45)
    at.body(b"c", "c1", 10)
    assert at.dropped == ["a2"]


async def test_a_body_that_comes_in_again_replaces_another_that_has_stalled(
    at: Pool, stalled_at_once: None
) -> None:
    """The body that grows may be the one that waited longest."""
    first, _ = (at.body(b"a", name, 25) for name in ("a1", "a2"))
    at.pool.take(first, 20)
    assert at.dropped == ["a2"]


async def test_a_body_that_is_whole_makes_no_room(at: Pool) -> None:
    first = at.body(b"a", "a1", 50)
    at.pool.finish(first)
    at.body(b"b", "b1", 40)
    at.body(b"c", "c1", 30)
    assert at.dropped == ["b1"]
    with pytest.raises(Overloaded):
        at.body(b"d", "d1", 50)
    at.pool.release(first)
    at.pool.release(first)
    at.body(b"d", "d1", 50)
    assert at.pool.bytes == 80


async def test_a_caller_at_its_bound_is_refused_while_its_bodies_go_on(at: Pool) -> None:
    at.body(b"a", "a1", 50)
    with pytest.raises(Overloaded):
        at.body(b"a", "a2", 20)
    at.body(b"b", "b1", 20)
    assert at.dropped == []


@pytest.mark.usefixtures("stalled_at_once")
async def test_a_body_that_stalled_makes_room_for_its_own_callers(at: Pool) -> None:
    at.body(b"a", "a1", 50)
    at.body(b"a", "a2", 20)
    assert at.dropped == ["a1"]
    with pytest.raises(Overloaded):
        at.body(b"a", "a3", 61)


async def test_what_one_caller_sends_is_no_reason_to_refuse_another_with_less(at: Pool) -> None:
    for number in range(100):
        at.body(f"{number}".encode(), f"{number}", 1)
    with pytest.raises(Overloaded):
        at.body(b"more", "more", 1)
    assert at.dropped == []


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bodies, "BEGINNINGS_BYTES", POOL_BYTES)


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    app = create_app(
        ScriptedBackend(),
        tiny.model(),
        CollectorRegistry(),
        access_control=AccessControl(ApiKeys([KEY, OTHER], None)),
    )
    server = await serve_http(app, bind_port("127.0.0.1", 0, "test"), 1, answers_refusals=True)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield server.port
    finally:
        await server.stop()


class Stalling:
    """A connection that sends most of a body and then nothing."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.status: asyncio.Task[str] = asyncio.create_task(self._read(reader))

    @classmethod
    async def open(cls, port: int, key: str, length: str) -> "Stalling":
        stalling = cls(*await asyncio.open_connection("127.0.0.1", port))
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {key}\r\n{length}\r\n\r\n"
        )
        chunk = b"" if "Length" in length else b"%x\r\n" % (2 * BODY_BYTES)
        stalling.writer.write(head.encode() + chunk + b"{" + b" " * (BODY_BYTES - 1))
        return stalling

    async def _read(self, reader: asyncio.StreamReader) -> str:
        return (await reader.readline())[9:12].decode()

    def close(self) -> None:
        self.status.cancel()
        self.writer.transport.abort()


LENGTHS: Final = {"announced": "Content-Length: 65000", "chunked": "Transfer-Encoding: chunked"}


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


@pytest.mark.usefixtures("small_pool")
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
async def test_bodies_that_stall_are_bounded_together_and_another_key_is_served(length: str) -> None:
    async with serving() as port:
        stalling = [await Stalling.open(port, KEY, length) for _ in range(40)]
        await until(lambda: sum(each.status.done() for each in stalling) >= 35)
        assert {each.status.result() for each in stalling if each.status.done()} == {"429"}
        body = {"model": tiny.MODEL, "prompt": "x" * 400, "metadata": {"much": "y" * 40_000}}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            for _ in range(20):
                headers = {"Authorization": f"Bearer {OTHER}"}
                reply = await client.post(COMPLETIONS, json=body, headers=headers)
                assert reply.status_code == 200, reply.text
        for each in stalling:
            each.close()


@pytest.mark.usefixtures("small_pool", "stalled_at_once")
async def test_bodies_that_stall_do_not_shut_out_whole_ones_of_their_own_key() -> None:
    async with serving() as port:
        stalling = [await Stalling.open(port, KEY, LENGTHS["announced"]) for _ in range(20)]
        await until(lambda: sum(each.status.done() for each in stalling) == 15)
        body = {"model": tiny.MODEL, "prompt": "x" * 400, "metadata": {"much": "y" * 40_000}}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            reply = await client.post(COMPLETIONS, json=body, headers={"Authorization": f"Bearer {KEY}"})
            assert reply.status_code == 200, reply.text
        for each in stalling:
            each.close()
