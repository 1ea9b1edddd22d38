"""Tests of two-way streams: however one ends, both ends learn the right cause."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton.wire.baton.v1 import inference_pb2, inference_pb2_grpc
from baton.wire.channel import open_channel
from baton.wire.duplex_stream import ChannelClosed, run_duplex
from baton.wire.errors import NotAdmitted, RemoteError, errors_as_status
from baton.wire.service_role import ServiceRole
from tests.patience import PATIENCE_S
from tests.wire.servers import serving, until


class Echo(inference_pb2_grpc.HandoverServiceServicer):
    """Answers each message, and ends as the test wants."""

    def __init__(self) -> None:
        self.heard: list[inference_pb2.HandOverRequest] = []
        self.ended = 0

    async def HandOver(self, requests: Any, context: Any) -> AsyncIterator[inference_pb2.HandOverReply]:  # noqa: N802
        try:
            async with errors_as_status(context):
                async for request in requests:
                    self.heard.append(request)
                    if request.greeting.secret == b"refuse":
                        raise NotAdmitted("not you")
                    if request.greeting.secret == b"end":
                        return
                    yield inference_pb2.HandOverReply(grants=[inference_pb2.GrantReply(room=7)])
        finally:
            self.ended += 1


class Talk:
    """One two-way stream with a service that echoes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.waiting: list[Any] = []
        self.heard: list[inference_pb2.HandOverReply] = []
        self.news = asyncio.Event()
        call: Any = inference_pb2_grpc.HandoverServiceStub(channel).HandOver()
        self.task = asyncio.ensure_future(run_duplex(call, self.news, self.next, self.hear))

    def next(self) -> Any:
        message = self.waiting.pop(0) if self.waiting else None
        if isinstance(message, Exception):
            raise message
        return message

    def hear(self, reply: inference_pb2.HandOverReply) -> None:
        self.heard.append(reply)

    def say(self, secret: bytes | Exception = b"") -> None:
        if isinstance(secret, Exception):
            self.waiting.append(secret)
        else:
            greeting = inference_pb2.Greeting(secret=secret)
            self.waiting.append(inference_pb2.HandOverRequest(greeting=greeting))
        self.news.set()

    async def end(self) -> RemoteError:
        async with asyncio.timeout(PATIENCE_S):
            return await self.task


@pytest.fixture
async def talk() -> AsyncIterator[tuple[Echo, Talk]]:
    echo = Echo()

    def add(server: grpc.aio.Server) -> None:
        inference_pb2_grpc.add_HandoverServiceServicer_to_server(echo, server)

    async with serving(add) as address:
        channel = open_channel(address, ServiceRole.PREFILL)
        talk = Talk(channel)
        yield echo, talk
        talk.task.cancel()
        await channel.close()
        await until(lambda: echo.ended == 1 or not echo.heard)


async def test_what_is_said_is_answered_for_as_long_as_it_lasts(talk: tuple[Echo, Talk]) -> None:
    echo, mine = talk
    for count in range(1, 4):
        mine.say()
        await until(lambda count=count: len(mine.heard) == count)  # type: ignore[misc]
    assert len(echo.heard) == 3
    mine.say(b"end")
    end = await mine.end()
    assert (end.code, end.kind) == (grpc.StatusCode.OK, "")


async def test_a_refusal_is_told_by_its_kind(talk: tuple[Echo, Talk]) -> None:
    talk[1].say(b"refuse")
    end = await talk[1].end()
    assert (end.kind, end.unreachable) == ("NotAdmitted", False)


async def test_a_channel_that_is_closed_here_says_nothing_of_the_peer(talk: tuple[Echo, Talk]) -> None:
    mine = talk[1]
    mine.say()
    await until(lambda: bool(mine.heard))
    await mine.channel.close()
    assert isinstance(await mine.end(), ChannelClosed)


async def test_who_is_called_off_ends_the_stream_at_its_peer(talk: tuple[Echo, Talk]) -> None:
    echo, mine = talk
    mine.say()
    await until(lambda: bool(mine.heard))
    mine.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await mine.task
    await until(lambda: echo.ended == 1)


@pytest.mark.parametrize("where", ["hearing", "saying"])
async def test_a_bug_ends_the_stream_and_is_logged(
    talk: tuple[Echo, Talk], caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """Otherwise the stream would go on without reading or sending."""
    mine = talk[1]
    mine.say()
    if where == "hearing":
        mine.heard = None  # type: ignore[assignment]
    else:
        await until(lambda: bool(mine.heard))
        mine.say(ValueError("a bug"))
    await mine.end()
    assert [each.levelname for each in caplog.records] == ["ERROR"]


@pytest.mark.parametrize("how", [b"refuse", b"end"])
async def test_why_the_peer_ended_a_stream_is_heard_while_more_is_being_said_on_it(
    talk: tuple[Echo, Talk], how: bytes
) -> None:
    """grpc.aio puts an error of its own in the place of what the peer said, when a write fails by that."""
    wanted = "NotAdmitted" if how == b"refuse" else ""
    for _ in range(40):
        one = Talk(talk[1].channel)
        one.waiting = [
            inference_pb2.HandOverRequest(greeting=inference_pb2.Greeting(secret=each))
            for each in (how, *[b"more"] * 500)
        ]
        one.news.set()
        error = await one.end()
        assert (error.kind, error.code is grpc.StatusCode.INTERNAL) == (wanted, False), error
    talk[0].heard.clear()
