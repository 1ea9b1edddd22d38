"""A client that goes away takes its request with it, at whatever point it goes."""

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any, cast

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from baton.api.app import create_app
from baton.api.backend import Hangup, Overloaded
from baton.api.http.disconnect import ClientGone, UntilDisconnect
from baton.api.http.middleware import ApiMiddleware
from baton.rooms.request import Request
from baton.runtime.listening_ports import bind_port
from baton.web.bounded_http import BoundedHttp
from baton.web.client_connection import IN_STATE, ClientConnection
from baton.web.http_server import serve_http
from tests.api import tiny
from tests.api.requests.test_bad_input import CHAT, COMPLETIONS, chat, completion
from tests.api.scripted import LENGTH, ScriptedBackend, Step, batch, saying

WAIT_S = 20
"""Longest time that a test waits for an event before it fails, seconds."""


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.001)


async def cut_off(url: str, path: str, body: dict[str, Any], holds: Callable[[], object]) -> None:
    """Send a request, and hang up once this holds."""
    async with httpx.AsyncClient(base_url=url) as client:
        request = asyncio.create_task(client.post(path, json=body))
        await until(holds)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def hung_up(backend: ScriptedBackend, streams: int) -> None:
    await until(lambda: len(backend.streams) >= streams)
    async with asyncio.timeout(WAIT_S):
        for stream in backend.streams:
            await stream.hung_up.wait()
    assert all(set(stream.hangups) == {Hangup.CLIENT_GONE} for stream in backend.streams)


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token(url: str, backend: ScriptedBackend, stream: bool) -> None:
    backend.script = lambda _: [asyncio.Event()]
    await cut_off(url, CHAT, chat(stream=stream), lambda: backend.streams)
    await hung_up(backend, 1)


async def test_in_the_middle_of_a_stream(url: str, backend: ScriptedBackend) -> None:
    backend.script = lambda _: [batch(tiny.ids("The")), asyncio.Event()]
    async with (
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", CHAT, json=chat(stream=True)) as reply,
    ):
        async for line in reply.aiter_lines():
            if "The" in line:
                break
    await hung_up(backend, 1)


async def test_in_the_middle_of_a_whole_reply(url: str, backend: ScriptedBackend) -> None:
    backend.script = lambda _: [*saying("The quick", finish=LENGTH)[:-1], asyncio.Event()]
    await cut_off(url, CHAT, chat(), lambda: backend.streams and backend.streams[0].read)
    await hung_up(backend, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_all_prompts_of_a_request(url: str, backend: ScriptedBackend, stream: bool) -> None:
    backend.script = lambda _: [asyncio.Event()]
    body = completion(prompt=[[5], [6], [7]], stream=stream)
    await cut_off(url, COMPLETIONS, body, lambda: len(backend.streams) == 3)
    await hung_up(backend, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_ended_since_another_prompt_failed_is_no_hang_up(
    url: str, backend: ScriptedBackend, stream: bool
) -> None:
    """One prompt of the request is refused. Of the others, one has its room and one waits for a room."""

    def script(request: Request) -> list[Step] | BaseException:
        return Overloaded("full", 1) if request.prompt == (7,) else [asyncio.Event()]

    backend.script = script
    backend.waits = (6,)
    async with httpx.AsyncClient(base_url=url) as client:
        reply = await client.post(COMPLETIONS, json=completion(prompt=[[5], [6], [7]], stream=stream))
    assert reply.status_code == 429
    assert [each.hangups for each in backend.streams] == [[Hangup.REQUEST_FAILED]]
    assert backend.given_up == [Hangup.REQUEST_FAILED]


async def test_who_hangs_up_while_waiting_for_a_room_is_told_as_gone(
    url: str, backend: ScriptedBackend
) -> None:
    backend.waits = (6,)
    await cut_off(url, COMPLETIONS, completion(prompt=[[6], [6]]), lambda: len(backend.asked) == 2)
    await until(lambda: len(backend.given_up) == 2)
    assert backend.given_up == [Hangup.CLIENT_GONE] * 2


async def test_at_random_points(url: str, backend: ScriptedBackend) -> None:
    """Of sixty clients, two thirds are cut off after a random number of bytes. The others get all of their
    text, and every stream is ended."""
    text = "The quick brown fox jumps over the lazy dog. " * 3

    def script(request: Request) -> list[Step]:
        return saying(text, finish=LENGTH)

    backend.script = script
    chances = random.Random(7)

    async def client_at(place: int) -> str | None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        body = httpx.Request("POST", url, json=chat(stream=place % 2 == 0)).content
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += "Content-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if place % 3 == 0:
            received = (await reader.read(-1)).decode()
            writer.close()
            return received
        size = chances.randrange(0, 2500)
        received_bytes = 0
        while received_bytes < size and (chunk := await reader.read(size - received_bytes)):
            received_bytes += len(chunk)
        writer.transport.abort()
        return None

    async with asyncio.timeout(WAIT_S):
        replies = await asyncio.gather(*(client_at(place) for place in range(60)))
    await until(lambda: not backend.left_open)
    for place, reply in enumerate(replies):
        if reply is not None:
            assert reply.startswith("HTTP/1.1 200")
            assert ("[DONE]" if place % 2 == 0 else '"finish_reason":"length"') in reply
    assert backend.left_open == []


async def test_a_client_that_stops_reading(backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stops reading fills the buffers, and is disconnected after `stalled_s`."""
    endless: list[Step] = [batch(tiny.ids("The fox "), top=20) for _ in range(20_000)]
    backend.script = lambda _: endless
    monkeypatch.setattr(BoundedHttp, "stalled_s", 0.1)
    app = create_app(backend, tiny.model(), CollectorRegistry())
    server = await serve_http(app, bind_port("127.0.0.1", 0, "test"), graceful_timeout_s=3600)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
    asked = chat(stream=True, logprobs=True, top_logprobs=20)
    body = httpx.Request("POST", "http://x", json=asked).content
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await hung_up(backend, 1)
    async with asyncio.timeout(WAIT_S):
        await server.stop()
    writer.transport.abort()


def request_of(body: bytes) -> bytes:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def asked_and_reset(url: str, backend: ScriptedBackend, sent: bytes) -> None:
    """Send these bytes, and reset the connection once a room is open for the request."""
    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(sent)
    await until(lambda: backend.streams)
    assert not [
        task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__name__", "") == "_disconnected"
    ]
    writer.transport.abort()
    await hung_up(backend, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_who_sends_two_requests_at_once_takes_the_first_with_it(
    url: str,
    backend: ScriptedBackend,
    registry: CollectorRegistry,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    """The second waits for the first, and is never begun."""
    backend.script = lambda _: [asyncio.Event()]
    body = httpx.Request("POST", url, json=chat(stream=stream)).content
    await asked_and_reset(url, backend, 2 * request_of(body))
    labels = {"route": CHAT, "status": "499"}
    await until(lambda: registry.get_sample_value("baton_http_requests_total", labels) == 1)
    assert len(backend.asked) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_after_a_body_so_long_that_the_server_stopped_reading(
    url: str, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: [asyncio.Event()]
    body = httpx.Request("POST", url, json=chat()).content
    await asked_and_reset(url, backend, request_of(body + b" " * 1_000_000))


async def test_for_a_client_that_is_gone_no_work_is_begun() -> None:
    begun = False

    async def work() -> None:
        nonlocal begun
        begun = True

    async def never() -> Message:
        raise AssertionError

    presence = ClientConnection(cast(Any, None))
    presence.lost()
    scope = {"type": "http", "state": {IN_STATE: presence}}
    with pytest.raises(ClientGone), UntilDisconnect(scope, never):
        await work()
    assert not begun


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_task_hangs_up(app: ApiMiddleware, backend: ScriptedBackend, stream: bool) -> None:
    """The server itself gives up on the request: nothing is left behind either."""
    backend.script = lambda _: [batch(tiny.ids("The")), asyncio.Event()]
    body = httpx.Request("POST", "http://x", json=chat(stream=stream)).content
    sent: list[Message] = []
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("test", 80),
    }
    task = asyncio.create_task(app(scope, receive, send))
    async with asyncio.timeout(WAIT_S):
        while not backend.streams or backend.streams[0].read == 0:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.streams[0].hangups == [Hangup.CLIENT_GONE]
