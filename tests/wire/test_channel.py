"""Tests of gRPC channels and servers: flow control, addresses, and the one place that sets them up."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.ids import Incarnation
from baton.runtime.setting_kinds import join_address
from baton.wire import channel as module
from baton.wire.baton.v1 import inference_pb2, inference_pb2_grpc
from baton.wire.channel import AHEAD_BYTES, Channels, Server
from baton.wire.service_role import ServiceRole
from tests.patience import PATIENCE_S
from tests.wire.servers import channel_to, has_ipv6, serving

LINES = 4_000
SETTLED = 50
"""Number of looks at an unchanged count after which it is taken for final."""


class WordyDecode(inference_pb2_grpc.DecodeServiceServicer):
    """A decode service that sends messages of given numbers of lines, each as soon as the stream takes it."""

    def __init__(self, messages: Sequence[int]) -> None:
        self._messages = messages
        self.said = 0
        """Messages that the stream has taken."""

    async def StreamRooms(self, _: Any, __: Any) -> AsyncIterator[inference_pb2.StreamRoomsReply]:  # noqa: N802
        first = 0
        for lines in self._messages:
            yield inference_pb2.StreamRoomsReply(lines=[_line(first + place) for place in range(lines)])
            first += lines
            self.said += 1

    async def StreamRoom(self, _: Any, __: Any) -> AsyncIterator[inference_pb2.StreamRoomReply]:  # noqa: N802
        raise AssertionError("nobody calls it")
        yield


def test_every_channel_and_server_is_set_up_in_one_place() -> None:
    """One made elsewhere would use an HTTP proxy, send no token, and be open to any caller."""
    makes = re.compile(r"\b(insecure_channel|secure_channel|(aio|grpc)\.server)\(")
    package = Path(module.__file__).parents[1]
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "baton/v1" not in str(path) and makes.search(path.read_text())
    }
    assert found == {"wire/channel.py"}


def _line(number: int) -> inference_pb2.StreamRoomsReply.Line:
    tokens = inference_pb2.Tokens(first=number, tokens=[inference_pb2.Token(token=7)])
    return inference_pb2.StreamRoomsReply.Line(room=9, reply=inference_pb2.StreamRoomReply(tokens=tokens))


@asynccontextmanager
async def replies_of(worker: WordyDecode) -> AsyncIterator[AsyncIterator[inference_pb2.StreamRoomsReply]]:
    def add(server: Any) -> None:
        inference_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server)

    async with serving(add) as address, channel_to(address) as channel:
        yield aiter(inference_pb2_grpc.DecodeServiceStub(channel).StreamRooms())


async def test_a_caller_that_takes_nothing_keeps_the_worker_from_sending_and_misses_nothing() -> None:
    """The worker collects what it cannot send. The caller gets fewer, longer messages when it reads again."""
    worker = WordyDecode([1] * LINES)
    async with replies_of(worker) as replies:
        heard = [await anext(replies)]
        still = before = 0
        while still < SETTLED:
            await asyncio.sleep(0.01)
            still = still + 1 if worker.said == before else 0
            before = worker.said
        assert 0 < before * heard[0].ByteSize() < 2 * AHEAD_BYTES
        heard += [message async for message in replies]
    assert [message.lines[0].reply.tokens.first for message in heard] == list(range(LINES))


async def test_a_message_longer_than_what_may_be_sent_ahead_comes_whole() -> None:
    async with replies_of(WordyDecode([LINES])) as replies:
        message = await anext(replies)
    assert message.ByteSize() > 8 * AHEAD_BYTES
    assert [line.reply.tokens.first for line in message.lines] == list(range(LINES))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_a_server_binds_addresses_of_both_kinds(host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback address (::1)")
    server = Server()
    port = server.bind(host, 0)
    await server.start(())
    async with channel_to(join_address(host, port)) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop(0)


async def test_who_comes_to_the_address_of_a_dead_process_is_reached_at_once() -> None:
    """By default gRPC waits before it reconnects to an address that did not answer, and refuses calls
    meanwhile."""
    dead, next_one, channels = Incarnation(1), Incarnation(2), Channels()
    request = health_pb2.HealthCheckRequest()
    async with serving(lambda _: None) as address:
        way = channels.to(address, ServiceRole.PREFILL, dead)
        await health_pb2_grpc.HealthStub(way).Check(request, timeout=PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while way.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(way).Check(request, timeout=PATIENCE_S)
    async with serving(lambda _: None, int(address.rpartition(":")[2])):
        stub = health_pb2_grpc.HealthStub(channels.to(address, ServiceRole.PREFILL, next_one))
        await stub.Check(request, timeout=PATIENCE_S)
    assert channels.incarnations() == {dead, next_one}
    await channels.close()
